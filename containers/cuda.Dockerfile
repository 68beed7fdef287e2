# harness1 on NVIDIA GPUs; docs/containers.md says how to build and run it.
# The packages of torch bring CUDA's libraries with them, so the base needs none; the driver is the host's.
FROM python:3.11-slim AS build
# Extras of harness1, a requirement for torch, and the addresses of package indexes for pip; each may be left out.
ARG EXTRAS=faiss-gpu,grammar,serve,train
ARG TORCH
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /source
COPY LICENSE README.md pyproject.toml ./
COPY harness1 harness1
RUN python -m venv /opt/harness1 \
    && /opt/harness1/bin/pip install --no-cache-dir ${TORCH:+"$TORCH"} ".${EXTRAS:+[$EXTRAS]}"

FROM python:3.11-slim
# Triton, by which vLLM runs its kernels, calls a C compiler. Any version does, and a pinned one leaves Debian's archive.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --no-create-home --home-dir /work harness1 && install --directory --owner harness1 /work
COPY --from=build /opt/harness1 /opt/harness1
# Caches go below HOME: into the folder that is mounted, for whichever user runs the container.
ENV PATH=/opt/harness1/bin:$PATH HOME=/work NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /work
ENTRYPOINT ["harness1"]
CMD ["--help"]
