"""Megatron modules: built from a config, filled with weights, and exported."""
