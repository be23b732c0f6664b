"""Describes model architectures without Megatron."""
