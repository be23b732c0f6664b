"""Refuses variants of supported architectures that are not implemented."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron_dppo.architectures.published_names import BLOCK
from megatron_dppo.errors import Problem

QUANTIZED = "quantization_config"

_LLAMA3_ROPE = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Constants that Megatron hard-codes for llama3 frequencies; only `factor` can be chosen."""
_YARN_AS_DERIVED = {"attention_factor": None, "truncate": True}
"""Keys of YaRN that Megatron's latent attention has no option for."""
_GATED_DELTA = (
    "gated delta nets in three of four layers (Megatron-Core 0.16.1's take no packed sequences, later ones on "
    "GPUs alone with flash-linear-attention), norms of 1 + weight, gated attention outputs and shared experts"
)
_LACKING: Mapping[str, str] = {
    "GptOssForCausalLM": "attention sinks and sliding windows in our attention, biased experts with clamped "
    "and interleaved gates stored [in, out], weights in MXFP4",
    "Qwen3NextForCausalLM": _GATED_DELTA,
    **dict.fromkeys(
        (
            *("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
            *("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        ),
        f"{_GATED_DELTA}, and the names of a model with vision",
    ),
}
"""Requested architectures, and the features that their families would need."""

_ACTION = "Use a model of the supported variant; another one would be trained wrongly."


def value_problems(hf: Mapping[str, Any], variants: Mapping[str, tuple[Any, Any]]) -> Iterator[Problem]:
    """Yield the keys of a config.json with values that are not implemented; see `ModelFamily.variants`."""
    for key, (default, supported) in variants.items():
        found = hf.get(key, default)
        if found != supported:
            yield _problem(f"{key} = {found!r}", repr(supported))


def common_problems(
    hf: Mapping[str, Any], rope_types: Sequence[str], partial_rotary: float | None
) -> Iterator[Problem]:
    """Yield the problems common to all families: quantised weights, other attention, other rotary tables.

    Args:
        hf: Content of config.json.
        rope_types: Types of rotary frequencies that the family supports.
        partial_rotary: Default part of a head that is rotated. None allows only complete heads.
    """
    quantized = hf.get(QUANTIZED)
    if quantized is not None and not is_block_fp8(quantized):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        action = "Name the original model, in bfloat16: quantised weights are for rollouts."
        found = f"{QUANTIZED} with quant_method {method!r} in config.json"
        expected = f"weights that are not quantised, or 'fp8' with weight_block_size {[BLOCK, BLOCK]}"
        yield Problem("model.load", found, expected, action)
    others = sorted(set(map(str, hf.get("layer_types") or ())) - {"full_attention"})
    if others:
        yield _problem(f"layer_types with {', '.join(others)}", "full_attention in every layer")
    yield from _rope_problems(hf, rope_types, partial_rotary)


def is_block_fp8(quantized: object) -> bool:
    """Whether a quantization_config describes block-wise 8-bit weights, which are dequantised."""
    table: Mapping[str, Any] = quantized if isinstance(quantized, Mapping) else {}
    return table.get("quant_method") == "fp8" and table.get("weight_block_size") == [BLOCK, BLOCK]


def of_dequantized(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the weights after reading: block-wise 8-bit weights become bfloat16."""
    if not is_block_fp8(hf.get(QUANTIZED)):
        return dict(hf)
    rest = {key: value for key, value in hf.items() if key != QUANTIZED}
    return rest | {key: "bfloat16" for key in ("dtype", "torch_dtype") if key in rest}


def architecture_problem(architecture: str, families: Iterable[str]) -> Problem:
    """Return the problem of an unsupported architecture, with the missing features if it is known."""
    if architecture in _LACKING:
        expected = f"layers that Megatron computes as transformers does; lacking: {_LACKING[architecture]}"
        return Problem(
            "model.load", f"{architecture} in config.json", expected, "Use a model of another family."
        )
    action = "Use a model of one of these, or add its family: megatron_dppo/architectures/README.md."
    return Problem("model.load", f"{architecture} in config.json", " or ".join(families), action)


def rope_scaling_factor(hf: Mapping[str, Any]) -> float | None:
    """Return the factor of llama3's frequencies; None for other rotary frequencies."""
    rope = rope_table(hf)
    return float(rope["factor"]) if _rope_type(rope) == "llama3" else None


def rope_kind(hf: Mapping[str, Any]) -> str:
    """Return the kind of a model's rotary frequencies, `rope_type`."""
    return _rope_type(rope_table(hf))


def rotary_part(hf: Mapping[str, Any], default: float = 1.0) -> float:
    """Return the part of a head that is rotated."""
    return float(hf.get("partial_rotary_factor") or rope_table(hf).get("partial_rotary_factor") or default)


def yarn_table(hf: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return YaRN's numbers for Megatron; None for other rotary frequencies.

    transformers scales cosines and sines by the quotient of both mscales if both are set, and otherwise as if
    they were 1 and 0.
    """
    rope = rope_table(hf)
    if _rope_type(rope) != "yarn":
        return None
    both: tuple[Any, Any] = rope.get("mscale"), rope.get("mscale_all_dim")
    mscale, of_all = both if all(both) else (1.0, 0.0)
    return {**rope, "mscale": float(mscale), "mscale_all_dim": float(of_all)}


def rope_table(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary embedding's table that transformers reads; the older key takes precedence."""
    table = hf.get("rope_scaling") or hf.get("rope_parameters")
    return table if isinstance(table, Mapping) else {}


def _rope_type(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _rope_problems(
    hf: Mapping[str, Any], rope_types: Sequence[str], partial_rotary: float | None
) -> Iterator[Problem]:
    tables = [hf[key] for key in ("rope_scaling", "rope_parameters") if hf.get(key)]
    if not all(isinstance(table, Mapping) for table in tables):
        yield _problem(f"a rope of {tables!r}", "a table with rope_type")
        return
    rope = rope_table(hf)
    thetas = {table["rope_theta"] for table in (hf, *tables) if table.get("rope_theta") is not None}
    if len(thetas) > 1:
        yield _problem(f"rope_theta of {sorted(thetas)}", "the same rope_theta wherever it stands")
    if len(tables) > 1 and tables[0] != tables[1]:
        yield _problem("rope_scaling and another rope_parameters", "one of them")
    if partial_rotary is None and rotary_part(hf) != 1:
        yield _problem(f"partial_rotary_factor = {rotary_part(hf)!r}", "1.0")
    rope_type = _rope_type(rope)
    if rope_type not in rope_types:
        yield _problem(f"rope_type = {rope_type!r}", " or ".join(map(repr, rope_types)))
    elif rope_type == "llama3":
        yield from _llama3_problems(hf, rope)
    elif rope_type == "yarn":
        yield from _yarn_problems(rope)


def _yarn_problems(rope: Mapping[str, Any]) -> Iterator[Problem]:
    for key in ("factor", "original_max_position_embeddings"):
        if not isinstance(rope.get(key), int | float) or rope[key] < 1:
            yield _problem(f"rope_type = 'yarn' with {key} = {rope.get(key)!r}", "a number of at least 1")
    for key, supported in _YARN_AS_DERIVED.items():
        if rope.get(key, supported) != supported:
            yield _problem(f"rope_type = 'yarn' with {key} = {rope[key]!r}", f"{supported!r}")
    if rope.get("mscale_all_dim") and not rope.get("mscale"):
        yield _problem("rope_type = 'yarn' with mscale_all_dim and no mscale", "both or none of them")


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
