"""Model families: what to tell Megatron-Core about each Hugging Face architecture, and its weight table.

A new family is one file that builds a `ModelFamily`, a line in `family_of`, and its name in `architectures.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from megatron_dppo.actor.layout import model_sizes, read_model_config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.models.architectures import variant_problems
from megatron_dppo.models.weight_map import HeadSizes, WeightRule, WeightTable

HFConfig = Mapping[str, Any]  # config.json, in either spelling of transformers 4 and 5


@dataclass(frozen=True)
class ModelFamily:
    """One architecture.

    Attributes:
        architecture: The name in config.json's `architectures`.
        transformer_config: From config.json to keywords of Megatron's TransformerConfig.
        rules: Weight rules of the architecture; tied embeddings leave out the output layer by themselves.
    """

    architecture: str
    transformer_config: Callable[[HFConfig], dict[str, Any]]
    rules: tuple[WeightRule, ...]

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


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder, or of a Megatron checkpoint made from one (`hf/config.json`).

    Raises:
        ConfigError: There is none, it is torn, or it describes a model that we would compute wrongly.
    """
    _, hf = read_model_config(folder)
    problems = list(variant_problems(hf))
    if problems:
        raise ConfigError(problems)
    return hf


def family_of(hf: HFConfig) -> ModelFamily:
    """The family of a config.json.

    Raises:
        ConfigError: No family has this architecture.
    """
    from megatron_dppo.models.llama import LLAMA
    from megatron_dppo.models.qwen2 import QWEN2
    from megatron_dppo.models.qwen3 import QWEN3, QWEN3_MOE

    families = {family.architecture: family for family in (QWEN3_MOE, QWEN3, QWEN2, LLAMA)}
    names = hf.get("architectures") or ["none"]
    if names[0] not in families:
        raise ConfigError(
            Problem("model.load", f"architecture {names[0]}", " or ".join(families), "Use a supported model.")
        )
    return families[names[0]]
