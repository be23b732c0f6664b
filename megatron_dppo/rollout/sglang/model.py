"""Reads the sizes of a model that servers and clients need from its config.json."""

from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.architectures.refusals import QUANTIZED, is_block_fp8
from megatron_dppo.architectures.registry import FAMILIES, read_model_sizes
from megatron_dppo.architectures.sizes import read_model_config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.rollout.sglang.protocol import ServedModel


def served_model(folder: Path, end_tokens: Sequence[int]) -> ServedModel:
    """Read the model in `folder`, and check that SGLang serves it as it is.

    Raises:
        ConfigError: There is no config.json, it names dense layers that SGLang would serve as sparse ones, or
            weights in 8 bits, which the trainer's could not replace.
    """
    sizes = read_model_sizes(folder)
    path, hf = read_model_config(folder)
    if is_block_fp8(hf.get(QUANTIZED)):
        action = f"Run megatron-dppo convert to-megatron --hf {folder} --out NEW, and name NEW as model.load."
        found = f"{path}, whose weights are 8-bit floats in blocks"
        expected = "weights in bfloat16: a server of these would drop what the trainer sends"
        raise ConfigError(Problem("model.load", found, expected, action))
    dense = sorted(set(range(sizes.num_layers)) - set(sizes.moe_layers)) if sizes.num_experts else []
    if dense and not FAMILIES[sizes.architecture].sglang_mixes_layers:
        action = "Use rollout.engine = 'transformers' for this model."
        found = f"{folder}, whose layers {dense[:8]} are dense"
        expected = "experts in every layer: SGLang takes all layers of this architecture as sparse"
        raise ConfigError(Problem("model.load", found, expected, action))
    return ServedModel(sizes.vocab_size, sizes.num_layers, tuple(end_tokens), sizes.routing)
