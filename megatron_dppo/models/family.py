"""Model families: what to tell Megatron-Core about each Hugging Face architecture, and its weight table.

A new family is one file that builds a `ModelFamily`, and one line in `FAMILIES`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.models.weight_map import HeadSizes, WeightRule, WeightTable

HFConfig = Mapping[str, Any]  # config.json, either spelling of transformers 4 and 5


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
        heads = HeadSizes(hf["num_attention_heads"], hf["num_key_value_heads"], head_dim(hf))
        return WeightTable(self.rules, heads)


def head_dim(hf: HFConfig) -> int:
    """Size of one attention head."""
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def num_experts(hf: HFConfig) -> int | None:
    """Experts of each MoE layer; none for a dense model."""
    return hf.get("num_experts") or hf.get("num_local_experts")


def rope_theta(hf: HFConfig) -> float:
    """Base of the rotary embedding.

    Raises:
        ConfigError: The rotary embedding is scaled, which is not supported.
    """
    parameters = hf.get("rope_parameters") or {}
    scaling = hf.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise ConfigError(
            Problem("model.load", f"rope_type {kind!r}", "'default'", "Use a model without RoPE scaling.")
        )
    return float(parameters.get("rope_theta") or hf.get("rope_theta") or 10000.0)


def moe_layers(hf: HFConfig) -> tuple[int, ...]:
    """0-based indices of the layers with experts."""
    if not num_experts(hf):
        return ()
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    return tuple(i for i in range(hf["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder, or of a Megatron checkpoint made from one (`hf/config.json`)."""
    path = next((p for p in (folder / "config.json", folder / "hf" / "config.json") if p.is_file()), None)
    if path is None:
        raise ConfigError(
            Problem(
                "model.load",
                f"{folder} without config.json or hf/config.json",
                "a Hugging Face folder or a Megatron checkpoint",
                "Convert the model with tools/convert_checkpoint.py, or give the folder that holds config.json.",
            )
        )
    return json.loads(path.read_text())


def family_of(hf: HFConfig) -> ModelFamily:
    """The family of a config.json.

    Raises:
        ConfigError: No family has this architecture.
    """
    from megatron_dppo.models.qwen3 import QWEN3_MOE

    families = {family.architecture: family for family in (QWEN3_MOE,)}
    names = hf.get("architectures") or ["none"]
    if names[0] not in families:
        raise ConfigError(
            Problem("model.load", f"architecture {names[0]}", " or ".join(families), "Use a supported model.")
        )
    return families[names[0]]
