"""Runs `megatron-dppo convert`, with the same options; torchrun may start several of it."""

from megatron_dppo.cli.checkpoints import convert

if __name__ == "__main__":
    convert()
