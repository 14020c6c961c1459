# Two images: `docker build --target cpu .` and `docker build --target cuda .`; see docs/containers.md.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY . .
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim AS base
ENV PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 tensorgrad && mkdir /work && chown tensorgrad /work
WORKDIR /work
ENTRYPOINT ["tensorgrad"]
CMD ["info"]

# CUDA's libraries and compiler come with the wheels of the extra; the host brings the driver.
FROM base AS cuda
ARG EXTRAS=cuda13,hub,mpi,plot,text
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python -m pip install --no-cache-dir "$(echo /wheels/*.whl)[${EXTRAS}]"
USER 1000

FROM base AS cpu
ARG EXTRAS=hub,mpi,plot,text
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python -m pip install --no-cache-dir "$(echo /wheels/*.whl)[${EXTRAS}]"
USER 1000
