# harness1 on a CPU; docs/containers.md says how to build and run it.
FROM python:3.11-slim AS build
# Extras of harness1, a requirement for torch, and the addresses of package indexes for pip; each may be left out.
ARG EXTRAS
ARG TORCH
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /source
COPY LICENSE README.md pyproject.toml ./
COPY harness1 harness1
RUN python -m venv /opt/harness1 \
    && /opt/harness1/bin/pip install --no-cache-dir ${TORCH:+"$TORCH"} ".${EXTRAS:+[$EXTRAS]}"

FROM python:3.11-slim
COPY --from=build /opt/harness1 /opt/harness1
RUN useradd --uid 1000 --no-create-home --home-dir /work harness1 && install --directory --owner harness1 /work
# Caches go below HOME: into the folder that is mounted, for whichever user runs the container.
ENV PATH=/opt/harness1/bin:$PATH HOME=/work
USER 1000
WORKDIR /work
ENTRYPOINT ["harness1"]
CMD ["--help"]
