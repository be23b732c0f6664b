"""Which models can be trained; kept apart from the models so that checks need no Megatron."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dppo.errors import Problem

SUPPORTED_ARCHITECTURES: tuple[str, ...] = ("Qwen3MoeForCausalLM",)
"""Names as in `architectures` of a Hugging Face config.json; each has a family in `megatron_dppo.models`."""

_VARIANTS: dict[str, tuple[Any, Any]] = {
    "hidden_act": ("silu", "silu"),
    "attention_bias": (False, False),
    "norm_topk_prob": (False, True),
    "use_sliding_window": (False, False),
    "quantization_config": (None, None),
}
"""Keys of config.json that change the forward pass: transformers' default, and the value whose pass we have."""


def variant_problems(hf: Mapping[str, Any]) -> Iterator[Problem]:
    """What in a config.json would make a supported architecture compute something else than ours does."""
    action = "Use a model of the supported variant; another one would be trained wrongly."
    for key, (default, supported) in _VARIANTS.items():
        found = hf.get(key, default)
        if found != supported:
            yield Problem("model.load", f"{key} = {found!r} in config.json", repr(supported), action)
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type != "default":
        yield Problem("model.load", f"rope_type = {rope_type!r} in config.json", "'default'", action)
