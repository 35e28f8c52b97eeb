# syntax=docker/dockerfile:1
# motet for nodes without a GPU. From the checkout's root:
#   docker build -f deploy/images/cpu.Dockerfile -t motet-cpu .
#
# The base image is named by its tag. For a reproducible build give its digest as well:
#   --build-arg PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm@sha256:...
# docker buildx imagetools inspect docker.io/library/python:3.11.14-slim-bookworm prints it.
ARG PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/motet
WORKDIR /src
COPY deploy/images/requirements-cpu.lock ./
# Wheels only: no downloaded code runs while the image is built. scripts/lock makes the lock.
RUN /opt/motet/bin/pip install --only-binary :all: --require-hashes --extra-index-url https://download.pytorch.org/whl/cpu -r requirements-cpu.lock
COPY LICENSE README.md __init__.py py.typed pyproject.toml ./
COPY adapters adapters
COPY cluster cluster
COPY kernels kernels
COPY router router
COPY workers workers
# setuptools is in the lock, too.
RUN /opt/motet/bin/pip install --no-build-isolation --no-deps --no-index . && \
    /opt/motet/bin/motet edge-program /opt/motet/bin/motet-haproxy

FROM ${PYTHON_IMAGE}
# A login shell sets its own PATH. KubeRay's commands call bash, ray and python; its probes that do not use HTTP call wget.
# The C++ kernels are compiled at first use, for the machine's CPU.
# Debian's packages are not pinned: mirrors keep only the newest version of a release.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install --no-install-recommends -y g++ wget && \
    rm -rf /var/lib/apt/lists/* && \
    groupadd --gid 1000 motet && \
    useradd --create-home --gid 1000 --shell /bin/bash --uid 1000 motet && \
    install -d -g motet -o motet /models /var/cache/motet /var/lib/motet && \
    echo "PATH=/opt/motet/bin:\$PATH" > /etc/profile.d/motet.sh
# Owned by root: processes of the user motet cannot change it.
COPY --from=build /opt/motet /opt/motet
COPY examples/demo/adapters /opt/motet/examples/adapters
COPY examples/demo/base /opt/motet/examples/base
ENV PATH=/opt/motet/bin:/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin \
    HF_HOME=/var/cache/motet/huggingface \
    MOTET_SLOW_KERNELS=refuse \
    PYTHONUNBUFFERED=1 \
    TRITON_HOME=/var/cache/motet \
    XDG_CACHE_HOME=/var/cache
# Variables of Ray and Serve: cluster/edge/serve_variables.py explains them.
ENV GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
    RAY_SERVE_DEFAULT_HTTP_HOST=0.0.0.0 \
    RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S=5 \
    RAY_SERVE_ENABLE_HA_PROXY=1 \
    RAY_SERVE_HAPROXY_BINARY_PATH=/opt/motet/bin/motet-haproxy \
    RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S=86400 \
    RAY_SERVE_HAPROXY_METRICS_ENABLED=0 \
    RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S=120 \
    RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT=1000000 \
    RAY_SERVE_PORT_QUARANTINE_S=150 \
    RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=60 \
    RAY_SERVE_THROUGHPUT_OPTIMIZED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_agent_register_timeout_ms=300000 \
    RAY_gcs_server_port_wait_time_s=120 \
    RAY_gcs_server_request_timeout_seconds=120 \
    RAY_worker_niceness=0 \
    RAY_worker_register_timeout_seconds=300
USER 1000:1000
WORKDIR /home/motet
# Fails the build if the C++ kernels cannot be compiled: the plain ones are many times slower.
RUN ["python", "-P", "-m", "motet.kernels.native.build"]
EXPOSE 8000 9400
ENTRYPOINT ["motet"]
CMD ["serve", "/opt/motet/examples/base", "--host", "0.0.0.0", "--data-dir", "/var/lib/motet"]
