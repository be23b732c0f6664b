"""The shims of Megatron-Core: CPU, fixes of its bugs, process groups."""
