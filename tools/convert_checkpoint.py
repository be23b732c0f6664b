"""Runs `megatron-dppo convert` with the same options. torchrun can start it on several processes."""

from megatron_dppo.cli.checkpoints import convert

if __name__ == "__main__":
    convert()
