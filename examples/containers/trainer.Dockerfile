# The trainer on NVIDIA's image for PyTorch. NOT BUILT where it was written; README.md says what that leaves open.
#
#     docker build -f examples/containers/trainer.Dockerfile -t megatron-dppo-trainer .

ARG IMAGE=nvcr.io/nvidia/pytorch:26.08-py3
FROM ${IMAGE}

WORKDIR /opt/megatron_dppo
COPY . .

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# torch and what was compiled against it stay the image's, all else is what CI tests. The image's own constraints
# ($PIP_CONSTRAINT) name older versions of that, and are left out. nvcc is there: the kernels are compiled here.
RUN pip list --format=freeze \
      | grep -iE '^(torch|torchvision|triton|pytorch.triton|transformer.engine.*|flash.attn|apex)==' >/tmp/constraints.txt \
    && sed -E '/^(torch|megatron-core)==/d' constraints.txt >>/tmp/constraints.txt \
    && PIP_CONSTRAINT="" pip install --no-cache-dir -c /tmp/constraints.txt '.[track]' \
    && megatron-dppo --help >/dev/null
