"""Reads model sizes from a config.json, and refuses models that SGLang would serve wrongly."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.architectures.registry import FAMILIES, family_of, read_model_sizes
from megatron_dppo.architectures.sizes import ModelSizes, has_vision, read_model_config, rope_kind
from megatron_dppo.engines.sglang.protocol import ServedModel
from megatron_dppo.errors import ConfigError, Problem

_NUM_DENSE = "first_k_dense_replace"
INTERVAL = "full_attention_interval"


def served_model(folder: Path, end_tokens: Sequence[int]) -> ServedModel:
    """Read the sizes of the model in `folder`, and check that SGLang serves it correctly."""
    sizes = read_model_sizes(folder)
    problems = list(model_problems(folder, read_model_config(folder)[1], sizes))
    if problems:
        raise ConfigError(problems)
    return ServedModel(sizes.vocab_size, sizes.num_layers, tuple(end_tokens), sizes.routing)


def model_problems(folder: Path, hf: Mapping[str, Any], sizes: ModelSizes) -> Iterator[Problem]:
    """Yield the problems that make SGLang serve another model than the trainer trains.

    These are heads and rotary frequencies that SGLang does not support, dense layers that SGLang builds as
    sparse ones, and missing keys of config.json.

    Args:
        folder: Folder of model.load.
        hf: Content of config.json.
        sizes: Sizes of the model.
    """
    if has_vision(folder):
        found = f"{folder}, a text model inside a model with vision"
        action = "Convert it first: megatron-dppo convert to-megatron, then to-hf."
        yield Problem("model.load", found, "the text model alone: SGLang would serve the other one", action)
    yield from _attention_problems(folder, hf, sizes)
    facts = FAMILIES[sizes.architecture].sglang
    keys = dict(facts.config_keys)
    dense = sorted(set(range(sizes.num_layers)) - set(sizes.moe_layers)) if sizes.num_experts else []
    is_in_front = dense == list(range(len(dense)))
    if dense and not (facts.has_dense_layers and is_in_front):
        action = "Use rollout.engine = 'transformers' for this model."
        found = f"{folder}, whose layers {dense[:8]} are dense"
        expected = "experts in every layer: SGLang builds all layers of this architecture as sparse ones"
        if facts.has_dense_layers:
            expected = "dense layers only before all sparse ones: SGLang builds them nowhere else"
        yield Problem("model.load", found, expected, action)
    elif facts.has_dense_layers:
        keys[_NUM_DENSE] = len(dense)
    if sizes.linear is not None:
        interval = attention_interval(sizes)
        keys |= {} if interval is None else {INTERVAL: interval}
        if interval is None:
            found = f"{folder}, with linear attention in the layers {list(sizes.linear.layers)}"
            expected = "attention in every n-th layer: SGLang reads no list of layers"
            action = "Use rollout.engine = 'transformers' for this model."
            yield Problem("model.load", found, expected, action)
    other = {key: value for key, value in keys.items() if hf.get(key) != value}
    if other:
        found = ", ".join(f"{key} = {hf[key]!r}" if key in hf else f"no {key}" for key in other)
        expected = ", ".join(f'"{key}": {value!r}'.replace("'", '"') for key, value in other.items())
        action = "Add them to config.json: publishers write them, but transformers may not save them."
        yield Problem(
            "model.load", f"{found} in config.json of {folder}", f"{expected}, which SGLang reads", action
        )


def attention_interval(sizes: ModelSizes) -> int | None:
    """Return n if exactly every n-th layer has attention instead of linear attention; None otherwise."""
    others = [layer for layer in range(sizes.num_layers) if layer not in sizes.linear_layers]
    interval = others[0] + 1
    return interval if others == list(range(interval - 1, sizes.num_layers, interval)) else None


def _attention_problems(folder: Path, hf: Mapping[str, Any], sizes: ModelSizes) -> Iterator[Problem]:
    facts = FAMILIES[sizes.architecture].sglang
    action = "Use rollout.engine = 'transformers' for this model."
    derived = sizes.hidden_size // sizes.num_attention_heads
    if facts.derives_head_dim and sizes.head_dim != derived:
        found = f"{folder}, whose heads have {sizes.head_dim} dimensions"
        expected = f"{derived}, hidden_size / num_attention_heads: SGLang derives it for {sizes.architecture}"
        yield Problem("model.load", found, expected, action)
    if facts.has_plain_rotary and rope_kind(hf) != "default":
        found = f"{folder}, whose rotary frequencies are {rope_kind(hf)}'s"
        expected = f"plain ones: SGLang computes no others for {sizes.architecture}"
        yield Problem("model.load", found, expected, action)


def has_own_output(hf: Mapping[str, Any]) -> bool:
    """Return whether a server builds an output layer that no checkpoint of this tied model fills.

    That layer's weights are random until a push sends the embedding under the output layer's name.

    Args:
        hf: Content of the model's config.json.
    """
    family = family_of(hf)
    return family.sglang.has_own_output and family.sizes_of(hf).is_tied
