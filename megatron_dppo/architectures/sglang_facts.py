"""What SGLang makes of an architecture: facts of its source that say what it can serve, and how."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SglangFacts:
    """Facts of SGLang's model class of an architecture.

    Attributes:
        has_dense_layers: It builds `first_k_dense_replace` dense layers in front of those with experts.
            Otherwise it takes every layer as sparse, loads what fits, and serves nonsense.
        config_keys: Keys that it reads of config.json and transformers may leave out, with the values that are
            trained by. Without them no server starts.
        arguments: Arguments of a server to which [sglang] says nothing.
        derives_head_dim: It takes a head as hidden_size / num_attention_heads, whatever `head_dim` says.
        has_plain_rotary: It reads no more of rotary frequencies than `rope_theta`. Others would be served as
            plain ones, without a word.
        has_own_output: It builds an output layer beside the embedding even where config.json ties the two, and
            loads none from a checkpoint without one. Weight sync then sends the embedding by that name too.
        lacks_routes: Versions whose routers do not say of which layer they are: a server that is to return
            routes ends at the first request.
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

SGLang would fuse one with the routed experts on some GPUs, as a further column of the routes, by another name.
"""
