# syntax=docker/dockerfile:1
# The fork for processors of any kind, with the shipped model: the demo, tests of deployments, no GPU and no driver.
#
#   docker build -f docker/cpu.Dockerfile -t fast-verify-cpu .
#   docker run --rm fast-verify-cpu demo
#
# The digest was taken from public repositories that pin this tag; the tag has moved since.
ARG BASE=python:3.11-slim-bookworm@sha256:528257d48c1da0dcecc2e725d1ae34498d60c965f1241e39cd6a85a8859bdf84

# hadolint ignore=DL3006
FROM ${BASE} AS wheel
WORKDIR /source
COPY . .
RUN python3 -m pip wheel --quiet --no-cache-dir --no-deps --wheel-dir /wheels .

# hadolint ignore=DL3006
FROM ${BASE}
ARG UID=10001
LABEL org.opencontainers.image.title="fast-verify-cpu" \
      org.opencontainers.image.description="SGLang 0.5.17 with fast verification, on a processor, with a small model" \
      org.opencontainers.image.licenses="Apache-2.0"

COPY requirements/cpu.txt /opt/fast-verify/requirements.txt
COPY docker/slim-cuda /opt/fast-verify/bin/
# The list is complete, so nothing is resolved. PyPI's torch brings CUDA libraries; what no processor loads goes again.
RUN python3 -m pip install --quiet --no-cache-dir --no-deps -r /opt/fast-verify/requirements.txt \
    && /opt/fast-verify/bin/slim-cuda /usr/local/lib
COPY docker/install-fork docker/entrypoint docker/healthcheck.py /opt/fast-verify/bin/
COPY recipes/nano.cpu.yaml /opt/fast-verify/recipes/
COPY models/prompts.jsonl /opt/fast-verify/models/
COPY models/nano /opt/fast-verify/models/nano
COPY models/nano-eagle3 /opt/fast-verify/models/nano-eagle3
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    /opt/fast-verify/bin/install-fork --fresh /wheels/sglang-*.whl \
    && useradd --uid "${UID}" --user-group --home-dir /cache --no-create-home --shell /usr/sbin/nologin verify \
    && install --directory --owner verify --group verify /cache

ENV HOME=/cache \
    XDG_CACHE_HOME=/cache/xdg \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TMPDIR=/tmp \
    OMP_NUM_THREADS=1 \
    TORCHDYNAMO_DISABLE=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    FAST_VERIFY_SERVING=cpu
VOLUME /cache
WORKDIR /opt/fast-verify
USER ${UID}
EXPOSE 30000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=30s --start-period=5m --retries=3 \
    CMD ["python3", "/opt/fast-verify/bin/healthcheck.py"]
ENTRYPOINT ["/opt/fast-verify/bin/entrypoint"]
CMD ["--config", "/opt/fast-verify/recipes/nano.cpu.yaml"]
