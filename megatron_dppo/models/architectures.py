"""Which model architectures can be trained; kept apart from the models so that checks need no Megatron."""

SUPPORTED_ARCHITECTURES: tuple[str, ...] = ("Qwen3MoeForCausalLM",)
"""Names as in `architectures` of a Hugging Face config.json; each has a family in `megatron_dppo.models`."""
