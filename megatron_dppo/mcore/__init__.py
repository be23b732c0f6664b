"""Shims for Megatron-Core: CPU, bug fixes, process groups."""
