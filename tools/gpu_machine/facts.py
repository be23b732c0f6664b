"""Prints PyTorch's report of the environment, and the kernels of attention that a run takes on this machine."""

import torch
from torch.utils import collect_env

from megatron_dppo.runtime.process import gpu_libraries

HEAD_DIM = 128  # of most models


def main() -> None:
    """Print both."""
    collect_env.main()
    gpu_libraries()  # before Megatron
    from megatron_dppo.models.attention import choose_flash_attention

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"attention: {choose_flash_attention(device, torch.bfloat16, HEAD_DIM)}")


if __name__ == "__main__":
    main()
