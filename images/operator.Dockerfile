# The operator: neither PyTorch nor vLLM.
#   docker build -f images/operator.Dockerfile -t miles-operator:0.1.0 .
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir --disable-pip-version-check uv==0.13.9
WORKDIR /opt/miles
ENV UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_SYSTEM_CERTS=1
# Hash-pinned dependencies first: a layer that a change of the code leaves alone.
COPY pyproject.toml uv.lock ./
RUN /opt/uv/bin/uv sync --frozen --no-install-project --extra operator
COPY setup.cfg README.md LICENSE ./
COPY operators operators
COPY pipeline pipeline
RUN /opt/uv/bin/uv sync --frozen --no-cache --no-editable --extra operator

FROM ${BASE}
COPY --from=build /opt/miles/.venv /opt/miles/.venv
ENV PATH=/opt/miles/.venv/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
ENTRYPOINT ["python", "-m", "operators"]
