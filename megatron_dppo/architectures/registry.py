"""Registry of model families, by the name in config.json's `architectures`."""

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_dppo.architectures.deepseek_v3 import DEEPSEEK_V3, GLM4_MOE_LITE
from megatron_dppo.architectures.family import ModelFamily
from megatron_dppo.architectures.glm4_moe import GLM4_MOE
from megatron_dppo.architectures.llama import LLAMA
from megatron_dppo.architectures.mixtral import MIXTRAL
from megatron_dppo.architectures.qwen2 import QWEN2
from megatron_dppo.architectures.qwen2_moe import QWEN2_MOE
from megatron_dppo.architectures.qwen3 import QWEN3, QWEN3_MOE
from megatron_dppo.architectures.refusals import (
    architecture_problem,
    common_problems,
    of_dequantized,
    value_problems,
)
from megatron_dppo.architectures.sizes import HFConfig, ModelSizes, architecture_of, read_model_config
from megatron_dppo.errors import ConfigError, Problem

ENTRY_POINTS = "megatron_dppo.families"
"""Entry-point group in which an installed package registers its families."""


def _families() -> Iterator[ModelFamily]:
    yield from (QWEN3_MOE, QWEN3, QWEN2, LLAMA, GLM4_MOE, DEEPSEEK_V3, GLM4_MOE_LITE, MIXTRAL, QWEN2_MOE)
    yield from (point.load() for point in entry_points(group=ENTRY_POINTS))


FAMILIES: Mapping[str, ModelFamily] = MappingProxyType({family.architecture: family for family in _families()})
"""All families; a package's family replaces the built-in family of the same architecture."""


def family_of(hf: HFConfig) -> ModelFamily:
    """Return the family of a config.json.

    Raises:
        ConfigError: No family has this architecture.
    """
    name = architecture_of(hf)
    if name not in FAMILIES:
        raise ConfigError(architecture_problem(name, FAMILIES))
    return FAMILIES[name]


def variant_problems(hf: HFConfig) -> Iterator[Problem]:
    """Yield the problems of a config.json: variants of a supported architecture that are not implemented."""
    family = FAMILIES.get(architecture_of(hf))
    if family is None:
        yield from common_problems(hf, ("default", "llama3"), None)
        return
    unclear = list(family.key_problems(hf))
    if unclear:
        yield from unclear
        return
    hf = family.completed(hf)
    yield from value_problems(hf, family.variants)
    yield from family.problems(hf)
    yield from common_problems(hf, family.rope_types, family.partial_rotary)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a Hugging Face folder, or of a Megatron checkpoint made from one (`hf/config.json`).

    The entry for block-wise 8-bit weights is left out, because these weights become bfloat16 when they are
    read.

    Raises:
        ConfigError: There is no config.json, it is torn, or it describes a variant that is not implemented.
    """
    _, hf = read_model_config(folder)
    problems = list(variant_problems(hf))
    if problems:
        raise ConfigError(problems)
    return of_dequantized(hf)


def model_sizes(hf: HFConfig) -> ModelSizes:
    """Return the sizes in a config.json; KeyError, TypeError or ValueError if one is missing or not a number.

    Raises:
        ConfigError: No family has the architecture.
    """
    return family_of(hf).sizes_of(hf)


def read_model_sizes(folder: Path) -> ModelSizes:
    """Read a model's sizes from its folder, without loading any weight.

    Args:
        folder: Hugging Face folder, or Megatron checkpoint with `hf/config.json`. Keys may be written by
            transformers 4 or 5 (num_experts or num_local_experts, rope_theta or rope_parameters).

    Raises:
        ConfigError: There is no config.json, no family has its architecture, or a size is missing.
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
