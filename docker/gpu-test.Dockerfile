# Where a wheel is tested on a GPU: Python, torch, pytest and the wheel; no CUDA toolkit, no source of the package.
#
#   docker build --build-arg BASE=NAME@sha256:DIGEST --build-arg TORCH=2.10 --file docker/gpu-test.Dockerfile --tag mega-moe-gpu-test .
#   docker run --rm --gpus all --shm-size 8g mega-moe-gpu-test
#
# BASE is an image with Python 3.10 or newer on glibc 2.34 or newer, by digest. The wheel is the one in dist/.
ARG BASE
# hadolint ignore=DL3006
FROM ${BASE}

# torch.compile builds its launchers with the system's compiler; the wheel itself needs none. Unversioned: the digest of
# BASE decides which release the packages come from.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

ARG TORCH
WORKDIR /tests
COPY pyproject.toml ./
# hadolint ignore=DL3013
RUN python3 -m pip install --no-cache-dir --upgrade "pip>=25.1" \
    && python3 -m pip install --no-cache-dir --group test "torch==${TORCH}.*"
COPY ci/test_wheel.sh ci/
COPY python/tests python/tests/
COPY dist dist/

# Not root: nothing is written outside the temporary folder.
USER 65534
ENV HOME=/nonexistent
ENTRYPOINT ["bash", "ci/test_wheel.sh"]
CMD ["gpu", "-p", "no:cacheprovider"]
