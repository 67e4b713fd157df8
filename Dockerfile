# The official Python is built with profile-guided and link-time optimisation; one that is not decides a fifth slower.
# This one has a C compiler, for the request path.
FROM python:3.11-bookworm AS build
WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY envoy ./envoy
COPY picker ./picker
COPY scripts ./scripts
# What the picker needs, in the versions it was tested with; nothing of what only builds or tests need, and no pip.
RUN python -m venv --without-pip /opt/build \
    && python -m pip --python /opt/build/bin/python install --no-cache-dir --disable-pip-version-check \
        --constraint requirements.lock hatchling mypy setuptools types-protobuf . \
    && PICKER_COMPILE=3 python -m pip --python /opt/build/bin/python wheel --no-cache-dir --disable-pip-version-check \
        --no-deps --no-build-isolation --wheel-dir /opt/wheels . \
    && python -m venv --without-pip /opt/picker \
    && python -m pip --python /opt/picker/bin/python install --no-cache-dir --disable-pip-version-check \
        --constraint requirements.lock /opt/wheels/*.whl \
    && /opt/picker/bin/picker --version

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="picker" \
      org.opencontainers.image.description="An Envoy endpoint picker for LLM inference" \
      org.opencontainers.image.licenses="Apache-2.0"
# The root file system may be read-only; only temporary files are ever written, under /tmp.
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
COPY --from=build /opt/picker /opt/picker
# A number, so that Kubernetes can tell that it is not root.
USER 65532:65532
# ext_proc, admin, metrics
EXPOSE 9002 9003 9090
# `docker run picker serve --config ...`; flags alone are those of an endpoint picker, `picker --pool-name ...`.
ENTRYPOINT ["/opt/picker/bin/picker"]
CMD ["serve", "--config", "/etc/picker/picker.yaml"]
