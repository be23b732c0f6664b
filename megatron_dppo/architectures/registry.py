"""The registry of model families, by the name in config.json's `architectures`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_dppo.architectures.family import HFConfig, ModelFamily
from megatron_dppo.architectures.layout import architecture_of, read_model_config
from megatron_dppo.architectures.llama import LLAMA
from megatron_dppo.architectures.qwen2 import QWEN2
from megatron_dppo.architectures.qwen3 import QWEN3, QWEN3_MOE
from megatron_dppo.architectures.refusals import common_problems, value_problems
from megatron_dppo.errors import ConfigError, Problem

FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {family.architecture: family for family in (QWEN3_MOE, QWEN3, QWEN2, LLAMA)}
)
"""All families. A new one is added here, and nowhere else."""


def family_of(hf: HFConfig) -> ModelFamily:
    """Return the family of a config.json.

    Raises:
        ConfigError: No family has this architecture.
    """
    name = architecture_of(hf)
    if name not in FAMILIES:
        action = "Use a model of one of these."
        raise ConfigError(Problem("model.load", name, " or ".join(FAMILIES), action))
    return FAMILIES[name]


def variant_problems(hf: HFConfig) -> Iterator[Problem]:
    """Yield what in a config.json would make a supported architecture compute something else than ours does."""
    family = FAMILIES.get(architecture_of(hf))
    yield from value_problems(hf, {} if family is None else family.variants)
    yield from common_problems(hf)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a Hugging Face folder, or of a Megatron checkpoint made from one (`hf/config.json`).

    Raises:
        ConfigError: There is none, it is torn, or it describes a model that we would compute wrongly.
    """
    _, hf = read_model_config(folder)
    problems = list(variant_problems(hf))
    if problems:
        raise ConfigError(problems)
    return hf
