"""Refuses variants of supported architectures that would be computed wrongly."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dppo.errors import Problem

_LLAMA3_ROPE = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Megatron's llama3 frequencies have these built in; only `factor` can be chosen."""

_ACTION = "Use a model of the supported variant; another one would be trained wrongly."


def value_problems(hf: Mapping[str, Any], variants: Mapping[str, tuple[Any, Any]]) -> Iterator[Problem]:
    """Yield the keys of a config.json whose values are not implemented; see `ModelFamily.variants`."""
    for key, (default, supported) in variants.items():
        found = hf.get(key, default)
        if found != supported:
            yield _problem(f"{key} = {found!r}", repr(supported))


def common_problems(hf: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems common to all families: quantised weights, other attention, other rotary tables."""
    quantized = hf.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        action = "Name the original model, in bfloat16: quantised weights are for rollouts."
        found = f"quantization_config with quant_method {method!r} in config.json"
        yield Problem("model.load", found, "weights that are not quantised", action)
    others = sorted(set(map(str, hf.get("layer_types") or ())) - {"full_attention"})
    if others:
        yield _problem(f"layer_types with {', '.join(others)}", "full_attention in every layer")
    yield from _rope_problems(hf)


def rope_scaling_factor(hf: Mapping[str, Any]) -> float | None:
    """Return the factor of llama3's frequencies; None where rotary frequencies are the plain ones."""
    rope = _rope(hf)
    return float(rope["factor"]) if _rope_type(rope) == "llama3" else None


def _rope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary embedding's table that transformers reads: the older spelling first."""
    return hf.get("rope_scaling") or hf.get("rope_parameters") or {}


def _rope_type(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _rope_problems(hf: Mapping[str, Any]) -> Iterator[Problem]:
    tables = [hf[key] for key in ("rope_scaling", "rope_parameters") if hf.get(key)]
    if not all(isinstance(table, Mapping) for table in tables):
        yield _problem(f"a rope of {tables!r}", "a table with rope_type")
        return
    rope = _rope(hf)
    thetas = {table["rope_theta"] for table in (hf, *tables) if table.get("rope_theta") is not None}
    if len(thetas) > 1:
        yield _problem(f"rope_theta of {sorted(thetas)}", "the same rope_theta wherever it stands")
    if len(tables) > 1 and tables[0] != tables[1]:
        yield _problem("rope_scaling and another rope_parameters", "one of them")
    partial = hf.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
    if partial != 1:
        yield _problem(f"partial_rotary_factor = {partial!r}", "1.0")
    rope_type = _rope_type(rope)
    if rope_type == "llama3":
        yield from _llama3_problems(hf, rope)
    elif rope_type != "default":
        yield _problem(f"rope_type = {rope_type!r}", "'default' or 'llama3'")


def _llama3_problems(hf: Mapping[str, Any], rope: Mapping[str, Any]) -> Iterator[Problem]:
    factor, length = rope.get("factor"), "original_max_position_embeddings"
    if not isinstance(factor, int | float) or factor < 1:
        yield _problem(f"rope_type = 'llama3' with factor = {factor!r}", "a number of at least 1")
    found = {**rope, length: hf.get(length, rope.get(length, hf.get("max_position_embeddings")))}
    for key, supported in _LLAMA3_ROPE.items():
        if found.get(key) != supported:
            yield _problem(
                f"rope_type = 'llama3' with {key} = {found.get(key)!r}", f"{supported}, as Megatron has"
            )


def _problem(found: str, expected: str) -> Problem:
    return Problem("model.load", f"{found} in config.json", expected, _ACTION)
