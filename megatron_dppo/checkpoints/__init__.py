"""Reads, writes and converts every checkpoint format: Megatron, Hugging Face, LoRA and quantised folders."""
