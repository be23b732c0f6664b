"""Runs `megatron-dppo quantize`, with the same options."""

from megatron_dppo.cli_checkpoints import quantize
from megatron_dppo.cli_options import program

if __name__ == "__main__":
    program(quantize)()
