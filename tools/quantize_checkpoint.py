"""Runs `megatron-dppo quantize` with the same options."""

from megatron_dppo.cli.checkpoints import quantize
from megatron_dppo.cli.options import program

if __name__ == "__main__":
    program(quantize)()
