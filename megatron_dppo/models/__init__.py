"""Builds Megatron modules from a config, loads their weights, and exports them."""
