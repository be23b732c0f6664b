"""Runs `megatron-dppo measure-mismatch` with the same options. torchrun can start it on several processes."""

from megatron_dppo.cli.analysis import measure_mismatch
from megatron_dppo.cli.options import program

if __name__ == "__main__":
    program(measure_mismatch)()
