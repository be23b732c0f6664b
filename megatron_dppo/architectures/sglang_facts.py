"""Defines facts about SGLang's implementation of an architecture, read from its source."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SglangFacts:
    """Facts of SGLang's model class of an architecture.

    Attributes:
        has_dense_layers: Whether it builds `first_k_dense_replace` dense layers before the MoE layers. If not,
            it treats every layer as sparse, loads the tensors that fit, and serves nonsense.
        config_keys: Keys of config.json that it needs and transformers may leave out, with the values that
            training uses. Without them no server starts.
        arguments: Server arguments that apply unless [sglang] sets them.
        derives_head_dim: Whether it uses hidden_size / num_attention_heads as head size and ignores `head_dim`.
        has_plain_rotary: Whether it reads only `rope_theta` of the rotary frequencies. It would silently serve
            other frequencies as plain ones.
        has_own_output: Whether it builds a separate output layer even if config.json ties it to the embedding,
            and loads none from a checkpoint without one. Weight sync then sends the embedding by that name too.
        lacks_routes: Versions with routers that do not know their layer. A server that returns routes fails at
            the first request.
    """

    has_dense_layers: bool = False
    config_keys: Mapping[str, Any] = field(default_factory=dict[str, Any])
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    derives_head_dim: bool = False
    has_plain_rotary: bool = False
    has_own_output: bool = False
    lacks_routes: tuple[str, ...] = ()


SHARED_EXPERTS_APART: Mapping[str, Any] = {"disable_shared_experts_fusion": True}
"""Arguments for models with shared experts.

On some GPUs, SGLang would otherwise fuse one with the routed experts, as another column of the routes, under
another name.
"""
