# The daemon in an image of its own. It holds no part of the driver: the NVIDIA container runtime brings the library.
ARG PYTHON=3.13.16-slim-trixie

FROM python:${PYTHON} AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md CHANGELOG.md LICENSE ./
COPY exporter exporter
# Every dependency comes as a wheel: no compiler is needed. pip itself stays out of what is shipped.
RUN python -m venv --without-pip /opt/oomwatch \
 && pip --python /opt/oomwatch/bin/python install --no-cache-dir --only-binary :all: --no-binary oomwatch \
      --constraint constraints.txt .

FROM python:${PYTHON}
LABEL org.opencontainers.image.title="oomwatch" \
      org.opencontainers.image.description="Tells capacity, fragmentation and leaks of vLLM's GPU memory apart before the OOM" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10666 oomwatch \
 && useradd --uid 10666 --gid oomwatch --no-log-init --no-create-home --home-dir /var/lib/oomwatch \
      --shell /usr/sbin/nologin oomwatch \
 && install -d -m 750 -o oomwatch -g oomwatch /var/lib/oomwatch \
 && install -d -m 755 /etc/oomwatch
COPY --from=build /opt/oomwatch /opt/oomwatch
# All GPUs, and of the driver only NVML and nvidia-smi. Without the NVIDIA runtime nobody reads these two.
ENV PATH=/opt/oomwatch/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=utility \
    HEALTH_URL=http://127.0.0.1:18666/-/healthy
# By number, so that Kubernetes can see that it is not root.
USER 10666:10666
EXPOSE 18666
# Certificates are not checked: it asks itself. For another port or https set HEALTH_URL.
HEALTHCHECK --interval=60s --timeout=10s --start-period=30s --retries=3 \
  CMD ["python", "-ISc", "import os, ssl, urllib.request as r; r.build_opener(r.ProxyHandler({}), r.HTTPSHandler(context=ssl._create_unverified_context())).open(os.environ['HEALTH_URL'], timeout=8)"]
ENTRYPOINT ["oomwatch"]
CMD ["run"]
