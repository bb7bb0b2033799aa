# What a wheel is built in: manylinux_2_28 with the CUDA toolkit, and the build's tools at fixed versions.
#
#   docker build --build-arg BASE=NAME@sha256:DIGEST --file docker/wheel.Dockerfile --tag mega-moe-wheel .
#
# BASE has no default: ci/matrix.toml names one per CUDA version and platform, by digest, and `nox -s wheel_manylinux`
# passes it. Nothing is fetched but the packages of docker/requirements.txt.
ARG BASE
# hadolint ignore=DL3006
FROM ${BASE}

COPY docker/requirements.txt /opt/mega-moe/requirements.txt
# --no-deps: of torch only the headers and libtorch.so are used, not the libraries that it would bring.
RUN /opt/python/cp311-cp311/bin/python -m pip install --no-cache-dir --no-deps --requirement /opt/mega-moe/requirements.txt

ENV CUDACXX=/usr/local/cuda/bin/nvcc
