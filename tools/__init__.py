"""Scripts outside the package: thin wrappers of `megatron-dppo` commands, and benchmarks."""
