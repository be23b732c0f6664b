"""Registry of model families, by the name in config.json's `architectures`; refuses what none implements."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_dppo.architectures.deepseek_v3 import DEEPSEEK_V3, GLM4_MOE_LITE
from megatron_dppo.architectures.family import ModelFamily
from megatron_dppo.architectures.glm4_moe import GLM4_MOE
from megatron_dppo.architectures.gpt_oss import GPT_OSS
from megatron_dppo.architectures.llama import LLAMA
from megatron_dppo.architectures.minimax_m2 import MINIMAX_M2
from megatron_dppo.architectures.mixtral import MIXTRAL
from megatron_dppo.architectures.published_names import BLOCK
from megatron_dppo.architectures.qwen2 import QWEN2, QWEN2_MOE
from megatron_dppo.architectures.qwen3 import QWEN3, QWEN3_MOE
from megatron_dppo.architectures.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from megatron_dppo.architectures.qwen3_next import QWEN3_NEXT
from megatron_dppo.architectures.sizes import (
    HFConfig,
    ModelSizes,
    architecture_of,
    read_model_config,
    rope_kind,
    rope_table,
    rotary_part,
)
from megatron_dppo.errors import ConfigError, Problem

ENTRY_POINTS = "megatron_dppo.families"
"""Entry-point group in which an installed package registers its families."""


def _families() -> Iterator[ModelFamily]:
    yield from (QWEN3_MOE, QWEN3, QWEN2, LLAMA, GLM4_MOE, DEEPSEEK_V3, GLM4_MOE_LITE, MIXTRAL, QWEN2_MOE)
    yield from (MINIMAX_M2, GPT_OSS, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
    yield from (point.load() for point in entry_points(group=ENTRY_POINTS))


FAMILIES: Mapping[str, ModelFamily] = MappingProxyType({family.architecture: family for family in _families()})
"""All families; a package's family replaces the built-in family of the same architecture."""


def family_of(hf: HFConfig) -> ModelFamily:
    """Return the family of a config.json."""
    name = architecture_of(hf)
    if name not in FAMILIES:
        raise ConfigError(architecture_problem(name, FAMILIES))
    return FAMILIES[name]


def variant_problems(hf: HFConfig) -> Iterator[Problem]:
    """Yield the problems of a config.json: variants of a supported architecture that are not implemented."""
    family = FAMILIES.get(architecture_of(hf))
    if family is None:
        yield from common_problems(hf, ModelFamily("", (), {}))
        return
    unclear = list(family.key_problems(hf))
    if unclear:
        yield from unclear
        return
    hf = family.completed(hf)
    yield from value_problems(hf, family.variants)
    yield from family.problems(hf)
    yield from common_problems(hf, family)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a Hugging Face folder, or of a Megatron checkpoint made from one (`hf/config.json`).

    The entry for block-wise 8-bit weights or MXFP4 is left out, because these weights become bfloat16 when
    they are read.
    """
    _, hf = read_model_config(folder)
    problems = list(variant_problems(hf))
    if problems:
        raise ConfigError(problems)
    return of_dequantized(hf)


def model_sizes(hf: HFConfig) -> ModelSizes:
    """Return the sizes in a config.json; KeyError, TypeError or ValueError if one is not there or no number."""
    return family_of(hf).sizes_of(hf)


def read_model_sizes(folder: Path) -> ModelSizes:
    """Read a model's sizes from its folder, without loading any weight.

    Args:
        folder: Hugging Face folder, or Megatron checkpoint with `hf/config.json`. Keys may be written by
            transformers 4 or 5 (num_experts or num_local_experts, rope_theta or rope_parameters).
    """
    path, content = read_model_config(folder)
    family = family_of(content)
    try:
        return family.sizes_of(content)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        reason = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
        action = "Use a config.json as transformers writes it."
        problem = Problem("model.load", f"{path}: {reason}", "the model's sizes", action)
        raise ConfigError(problem) from error


QUANTIZED = "quantization_config"

_LLAMA3_ROPE = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Constants that Megatron hard-codes for llama3 frequencies; only `factor` can be chosen."""
_ACTION = "Use a model of the supported variant; another one would be trained wrongly."


def value_problems(hf: Mapping[str, Any], variants: Mapping[str, tuple[Any, Any]]) -> Iterator[Problem]:
    """Yield the keys of a config.json with values that are not implemented; see `ModelFamily.variants`."""
    for key, (default, supported) in variants.items():
        found = hf.get(key, default)
        if found != supported:
            yield _problem(f"{key} = {found!r}", repr(supported))


def common_problems(hf: Mapping[str, Any], family: ModelFamily) -> Iterator[Problem]:
    """Yield the problems common to all families: quantised weights, other attention, other rotary tables."""
    quantized = hf.get(QUANTIZED)
    if quantized is not None and not is_dequantized(hf):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        action = "Name the original model, in bfloat16: quantised weights are for rollouts."
        found = f"{QUANTIZED} with quant_method {method!r} in config.json"
        expected = f"weights that are not quantised, or {readable_format(hf)}"
        yield Problem("model.load", found, expected, action)
    others = sorted(set(map(str, hf.get("layer_types") or ())) - set(family.layer_types))
    if others:
        expected = f"{' or '.join(family.layer_types)} in every layer"
        yield _problem(f"layer_types with {', '.join(others)}", expected)
    yield from _rope_problems(hf, family.rope_types, family.partial_rotary)


def is_block_fp8(quantized: object) -> bool:
    """Whether a quantization_config describes block-wise 8-bit weights, which are dequantised."""
    table: Mapping[str, Any] = quantized if isinstance(quantized, Mapping) else {}
    return table.get("quant_method") == "fp8" and table.get("weight_block_size") == [BLOCK, BLOCK]


def is_mxfp4(hf: Mapping[str, Any]) -> bool:
    """Whether a config.json describes experts in MXFP4 of a family that publishes them in this format."""
    family, quantized = FAMILIES.get(architecture_of(hf)), hf.get(QUANTIZED)
    is_published = family is not None and family.has_interleaved_stacks
    return is_published and isinstance(quantized, Mapping) and quantized.get("quant_method") == "mxfp4"


def is_dequantized(hf: Mapping[str, Any]) -> bool:
    """Whether a config.json describes quantised weights that are read, as bfloat16."""
    family = FAMILIES.get(architecture_of(hf))
    if family is not None and family.has_interleaved_stacks:
        return is_mxfp4(hf)
    return is_block_fp8(hf.get(QUANTIZED))


def readable_format(hf: Mapping[str, Any]) -> str:
    """Return the quantised format that is read of the architecture, for messages."""
    family = FAMILIES.get(architecture_of(hf))
    if family is not None and family.has_interleaved_stacks:
        return "'mxfp4'"
    return f"'fp8' with weight_block_size {[BLOCK, BLOCK]}"


def of_dequantized(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the weights after reading: quantised weights become bfloat16."""
    if not is_dequantized(hf):
        return dict(hf)
    rest = {key: value for key, value in hf.items() if key != QUANTIZED}
    return rest | {key: "bfloat16" for key in ("dtype", "torch_dtype") if key in rest}


def architecture_problem(architecture: str, families: Iterable[str]) -> Problem:
    """Return the problem of an unsupported architecture."""
    action = "Use a model of one of these, or add its family: megatron_dppo/architectures/README.md."
    return Problem("model.load", f"{architecture} in config.json", " or ".join(families), action)


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
        yield _problem(f"rope_theta of {sorted(thetas)}", "the same rope_theta in all places")
    if len(tables) > 1 and tables[0] != tables[1]:
        yield _problem("rope_scaling and another rope_parameters", "one of them")
    if partial_rotary is None and rotary_part(hf) != 1:
        yield _problem(f"partial_rotary_factor = {rotary_part(hf)!r}", "1.0")
    rope_type = rope_kind(hf)
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
    if rope.get("attention_factor") is not None:  # Megatron derives it from the factor
        yield _problem(f"rope_type = 'yarn' with attention_factor = {rope['attention_factor']!r}", "None")
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
