"""A model family: what to tell Megatron-Core about a Hugging Face architecture, its weights and its variants.

A new family is one file that builds a `ModelFamily`, and its name in `registry.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from megatron_dppo.architectures.layout import model_sizes
from megatron_dppo.architectures.weight_map import QK_NORM, QKV_BIAS, HeadSizes, WeightRule, WeightTable

HFConfig = Mapping[str, Any]  # config.json, in either spelling of transformers 4 and 5
Variants = Mapping[str, tuple[Any, Any]]
"""Keys of config.json that change the forward pass: transformers' default, and the implemented value."""

SILU_ONLY: Variants = {"hidden_act": ("silu", "silu")}


@dataclass(frozen=True)
class ModelFamily:
    """One architecture.

    Attributes:
        architecture: The name in config.json's `architectures`.
        transformer_config: From config.json to keywords of Megatron's TransformerConfig.
        rules: Weight rules of the architecture; tied embeddings leave out the output layer by themselves.
        variants: What of config.json is refused: any value but the second of each key.
    """

    architecture: str
    transformer_config: Callable[[HFConfig], dict[str, Any]]
    rules: tuple[WeightRule, ...]
    variants: Variants

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalised."""
        return set(QK_NORM) <= set(self.rules)

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return set(QKV_BIAS) <= set(self.rules)

    def weight_table(self, hf: HFConfig) -> WeightTable:
        """The family's rules with this model's head sizes."""
        sizes = model_sizes(hf)
        return WeightTable(
            self.rules, HeadSizes(sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim)
        )


def backbone_config(hf: HFConfig) -> dict[str, Any]:
    """TransformerConfig's keywords for what the families share: RMSNorm, rotary attention, SiLU-gated MLP."""
    sizes = model_sizes(hf)
    return dict(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        ffn_hidden_size=sizes.intermediate_size,
        num_attention_heads=sizes.num_attention_heads,
        num_query_groups=sizes.num_key_value_heads,
        kv_channels=sizes.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf.get("rms_norm_eps", 1e-6),
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
    )
