# The server on CPUs: docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu -t omniloop .
# docker run --rm -p 127.0.0.1:8000:8000 -v omniloop-cache:/cache omniloop
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/omniloop
ENV PATH=/opt/omniloop/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 OMNILOOP_BUILD_JOBS=4
# torch is installed first: it is large and seldom changes. Without TORCH_INDEX, an index of builds for CPUs, the image
# holds the libraries of CUDA too.
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
RUN pip install ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "${TORCH}"
# Everything else in the versions, and with the hashes, of the lock.
COPY .ci/locks /src/locks/
RUN pip install --no-deps --require-hashes -r /src/locks/server.txt
COPY pyproject.toml setup.py README.md LICENSE /src/
COPY _fast /src/_fast
COPY engine /src/engine
COPY mm /src/mm
COPY server /src/server
RUN pip install --no-deps --no-build-isolation /src

FROM python:${PYTHON}-slim-bookworm
RUN useradd --uid 1000 --create-home omniloop \
    && mkdir /cache \
    && chown omniloop /cache
COPY --from=build /opt/omniloop /opt/omniloop
ENV PATH=/opt/omniloop/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton \
    NUMBA_CACHE_DIR=/cache/numba
USER 1000
WORKDIR /home/omniloop
VOLUME /cache
EXPOSE 8000
# A server that loads is not ready; after half an hour that counts as unhealthy.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["omniloop"]
