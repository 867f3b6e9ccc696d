# For GPUs: NVIDIA's image with its own torch, Transformer Engine and apex; see docs/containers.md.
ARG BASE=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${BASE}

LABEL org.opencontainers.image.title="megatron-kd" \
      org.opencontainers.image.description="Knowledge distillation on Megatron-Core, for GPUs" \
      org.opencontainers.image.licenses="Apache-2.0"

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# The image pins its own packages by PIP_CONSTRAINT, ours are pinned in docker/requirements.txt.
ENV PIP_CONSTRAINT="" \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

# What is installed must leave torch alone: its version is kept here and compared at the end.
RUN python -c "import torch; print(torch.__version__)" > /tmp/torch-version

ARG MEGATRON_CORE_VERSION=0.19.2
RUN pip install --no-deps "megatron-core==${MEGATRON_CORE_VERSION}"

COPY docker/requirements.txt /tmp/requirements.txt
RUN pip install --no-deps --requirement /tmp/requirements.txt

RUN useradd --create-home --uid 10001 kd && install --directory --owner kd --group kd /workspace/kd

# Sources last: a change of them repeats the two layers below alone. Editable, so that configs/ is found beside them.
COPY pyproject.toml README.md LICENSE /opt/megatron-kd/
COPY configs /opt/megatron-kd/configs
COPY recipes /opt/megatron-kd/recipes
COPY megatron_kd /opt/megatron-kd/megatron_kd
COPY docker/import_check.py /tmp/import_check.py
RUN pip install --no-deps --editable /opt/megatron-kd \
    && python /tmp/import_check.py "$(cat /tmp/torch-version)"

USER 10001
WORKDIR /workspace/kd

# Not the doctor: a GPU that trains is busy, which the doctor would call a failure.
HEALTHCHECK --interval=10m --timeout=60s --retries=3 CMD ["megatron-kd", "version"]
CMD ["megatron-kd", "doctor"]
