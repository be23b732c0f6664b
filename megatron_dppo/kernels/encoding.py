"""Encodes objectives as numbers, which operators and compiled kernels take.

Every number is written down, here or with its divergence or rule, and none depends on an order. The numbers
that the compiled kernels read are equal to the numbers in `csrc/capi.h`.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch

from megatron_dppo.algorithms import DIVERGENCES, RULES, Objective
from megatron_dppo.algorithms.loss_terms import LOSS_TERMS
from megatron_dppo.errors import ConfigError, Problem

MAX_TOP_K = 64
LOGITS_DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # and their numbers in capi.h


# The number of each value of an objective's other fields that have names.
IDS: Mapping[str, Mapping[Any, int]] = MappingProxyType(
    {
        "relax": {"none": 0, "high": 1, "low": 2, "both": 3},
        "anchor": {"rollout": 0, "recomputed": 1},
        "sampled_token": {"union": 0, "replace": 1},
        "include_other": {False: 0, True: 1},
    }
)


# Bits of `DppoObjective.flags`.
FLAGS: Mapping[str, int] = MappingProxyType({"include_other": 1, "replace": 2})


# The rules and divergences that `csrc` computes.
COMPILED: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "rule": {"none": 0, "ratio": 1, "divergence": 2, "negative": 3},
        "divergence": {"binary_tv": 0, "binary_kl": 1, "topk_tv": 2, "topk_kl": 3},
    }
)


# Further fields that must have these values in the compiled kernels.
OF_EVERY_COMPILED: Mapping[str, Any] = MappingProxyType(
    {"importance": "token", **dict.fromkeys(LOSS_TERMS, 0.0)}
)


CHOICES = ("rule", "divergence", *IDS)
NUMBERS: Mapping[str, float] = MappingProxyType(
    {
        **dict.fromkeys(("delta_low", "delta_high", "eps_low", "eps_high"), math.inf),
        "alpha": 0.0,
        "ratio_cap": math.inf,
        "entropy_coef": 0.0,
        "top_k": 20,
    }
)
"""The numbers that the compiled kernels take, each with the value that has no effect."""
NO_RELAX = "none"


def ids_of(field: str) -> Mapping[Any, int]:
    """Returns the number of each value that one of the CHOICES may have."""
    if field == "rule":
        return {name: rule.id for name, rule in RULES.items()}
    if field == "divergence":
        return {name: divergence.id for name, divergence in DIVERGENCES.items()}
    return IDS[field]


def encode(objective: Objective) -> list[float]:
    """Return the numbers of a compiled objective, without its name; `decode` inverts this."""
    require_compiled(objective)
    choices = [float(ids_of(field)[getattr(objective, field, NO_RELAX)]) for field in CHOICES]
    return choices + [number_of(objective, field) for field in NUMBERS]


def number_of(objective: Objective, field: str) -> float:
    """Return one of NUMBERS; a field that the rule lacks has no effect."""
    return float(getattr(objective, field, NUMBERS[field]))


def decode(code: list[float]) -> Objective:
    """Return the objective from its numbers, without its name."""
    return _decode(tuple(code))


@lru_cache
def _decode(code: tuple[float, ...]) -> Objective:
    fields: dict[str, Any] = {}
    for field, number in zip(CHOICES, code, strict=False):
        fields[field] = {id: value for value, id in ids_of(field).items()}[int(number)]
    fields |= dict(zip(NUMBERS, code[len(CHOICES) :], strict=True))
    fields["top_k"] = int(fields["top_k"])
    rule = RULES[fields.pop("rule")]
    known = {each.name for each in dataclasses.fields(rule)}
    return rule(name="decoded", **{name: value for name, value in fields.items() if name in known})


def flags_of(objective: Objective) -> int:
    """Returns the objective's FLAGS, or-ed."""
    is_set = {
        "include_other": objective.include_other,
        "replace": objective.sampled_token == "replace",
    }
    return sum(FLAGS[name] for name in FLAGS if is_set[name])


def is_compiled(objective: Objective) -> bool:
    """Return whether the compiled kernels support an objective; otherwise `combine` runs in PyTorch."""
    if any(getattr(objective, field) != known for field, known in OF_EVERY_COMPILED.items()):
        return False
    names = {field: getattr(objective, field) for field in COMPILED}  # torch.compile cannot trace := in all()
    return all(known.get(names[field]) == ids_of(field)[names[field]] for field, known in COMPILED.items())


def require_compiled(objective: Objective) -> None:
    """Refuse an objective that the compiled kernels do not support; the message names the field and value."""
    action = (
        "Combine it in PyTorch, as the losses of kernels do, or add it to csrc/ and to COMPILED of "
        "kernels/encoding.py."
    )
    problems: list[Problem] = []
    for field, known in COMPILED.items():
        name = getattr(objective, field)
        if known.get(name) != (id := ids_of(field)[name]):
            expected = f"one that the compiled kernels know: {', '.join(known)}"
            found = f"{name!r} (id {id})"
            problems.append(Problem(f"fused_policy_loss.objective.{field}", found, expected, action))
    for field, known in OF_EVERY_COMPILED.items():
        if (value := getattr(objective, field)) != known:
            expected = f"{known!r}, all that the compiled kernels know"
            problems.append(Problem(f"fused_policy_loss.objective.{field}", repr(value), expected, action))
    if problems:
        raise ConfigError(problems)
