"""What a model is, without Megatron."""
