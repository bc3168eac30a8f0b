# The data plane on NVIDIA GPUs: upstream's vLLM image, with the worker and the trainer in its Python.
#   docker build -f images/gpu.Dockerfile -t miles:0.1.0-gpu .
# Not built by any test. PyTorch and vLLM stay the base's, which were made for each other; of the other packages
# pip chooses the newest that fit, so keep the image, not only this file.
ARG BASE=docker.io/vllm/vllm-openai:v0.32.0
FROM ${BASE}
WORKDIR /opt/miles
COPY pyproject.toml setup.cfg README.md LICENSE ./
COPY operators operators
COPY pipeline pipeline
RUN python3 -c 'import torch; print("torch==" + torch.__version__)' >/tmp/constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/constraints.txt '.[rollout,trainer]' \
    && rm /tmp/constraints.txt \
    && { command -v python || ln -s "$(command -v python3)" /usr/local/bin/python; }
ENV PYTHONUNBUFFERED=1
USER 10001:10001
# Each container of a job brings its own command.
ENTRYPOINT []
