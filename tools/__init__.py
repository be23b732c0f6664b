"""The commands beside the package: thin programs of `megatron-dppo`, and benchmarks."""
