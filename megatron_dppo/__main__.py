"""`python -m megatron_dppo`, the form that torchrun starts."""

from megatron_dppo.cli import main

main()
