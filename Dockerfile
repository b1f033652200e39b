# The command `ultrascale` for NVIDIA GPUs, from this checkout's wheel:
#   docker build -t ultrascale .
#   docker run --gpus all --ipc host --ulimit memlock=-1 -v "$PWD/out:/run/out" ultrascale train llama3_8b --log.run-dir out/x
FROM python:3.12-slim AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# JAX's own wheels bring CUDA's libraries, cuDNN and NCCL; the image has what the driver needs of the host.
FROM nvidia/cuda:12.8.1-base-ubuntu24.04
# The newest packages of the release, for their security updates.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/ultrascale
COPY --from=wheel /wheels/*.whl /wheels/
RUN wheel=$(echo /wheels/*.whl) \
    && /opt/ultrascale/bin/pip install --no-cache-dir "${wheel}[cuda12,tb,chat,data]" \
    && rm -r /wheels
ENV PATH=/opt/ultrascale/bin:$PATH
WORKDIR /run
ENTRYPOINT ["ultrascale"]
