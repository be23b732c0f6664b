"""Converts whole checkpoints between Hugging Face and Megatron, in pieces, without building the model."""
