"""Runs `megatron-dppo prepare-data` with the same options."""

from megatron_dppo.cli.data import prepare_data
from megatron_dppo.cli.options import program

if __name__ == "__main__":
    program(prepare_data)()
