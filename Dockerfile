# Image of trainload for the pods of `trainload manifest`: `make image`.
#
#   TORCH    build of torch: cpu, cuda (that of PyPI), or a folder of PyTorch's index, such as rocm7.1
#   EXTRAS   extras of trainload
#
# Versions are those of constraints.txt.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
ARG TORCH=cpu
ARG EXTRAS=ray,s3,report
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# torch has a layer of its own, which is built again only if constraints.txt changes
COPY constraints.txt /build/
RUN python -m venv --without-pip /opt/trainload \
    && if [ "$TORCH" != cuda ]; then \
        pip --python /opt/trainload install --no-deps -c /build/constraints.txt \
            --index-url "https://download.pytorch.org/whl/$TORCH" torch; \
    else \
        pip --python /opt/trainload install -c /build/constraints.txt torch; \
    fi
COPY . /build/source
RUN pip install -c /build/constraints.txt setuptools wheel \
    && pip wheel --no-deps --no-build-isolation -w /build/wheel /build/source \
    && pip --python /opt/trainload install -c /build/constraints.txt \
        "$(echo /build/wheel/*.whl)[$EXTRAS]"

FROM python:${PYTHON}-slim-bookworm
# g++: Inductor compiles graphs on each node. wget: KubeRay's probes call it.
# hadolint ignore=DL3008  # Debian removes earlier versions from its archive
RUN apt-get update \
    && apt-get install --no-install-recommends -y g++ wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --gid 100 --create-home trainload
COPY --from=build /opt/trainload /opt/trainload
ENV PATH=/opt/trainload/bin:$PATH
WORKDIR /home/trainload
# the user and group of the pods, by number, such that Kubernetes can check that it is not root
USER 1000:100
CMD ["trainload", "--help"]
