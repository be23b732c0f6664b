"""What servers and clients need of a model, read from its config.json."""

from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.architectures.layout import read_model_sizes
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.rollout.sglang.protocol import ServedModel
from megatron_dppo.types import ModelRouting


def served_model(folder: Path, end_tokens: Sequence[int]) -> ServedModel:
    """The model in `folder`, once it is one that SGLang serves as it is.

    Raises:
        ConfigError: There is no config.json, or it names dense layers that SGLang would serve as sparse ones.
    """
    sizes = read_model_sizes(folder)
    dense = sorted(set(range(sizes.num_layers)) - set(sizes.moe_layers)) if sizes.num_experts else []
    if dense:
        action = "Use rollout.engine = 'transformers' for this model."
        found = f"{folder}, whose layers {dense[:8]} are dense"
        expected = "experts in every layer: SGLang takes all layers of this architecture as sparse"
        raise ConfigError(Problem("model.load", found, expected, action))
    routing = None
    if sizes.num_experts:
        routing = ModelRouting(sizes.moe_layers, sizes.num_experts, sizes.experts_per_token)
    return ServedModel(sizes.vocab_size, sizes.num_layers, tuple(end_tokens), routing)
