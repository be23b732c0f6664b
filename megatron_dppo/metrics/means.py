"""Registries of metrics that are means over the learning tokens of a step, or over the groups of a rollout.

One decorated function defines a metric. Its values are merged over micro-batches and ranks, and written to
metrics.jsonl.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from megatron_dppo.algorithms import have_equal_rewards
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.kernels import FusedPolicyLoss
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.types import Microbatch, SampleGroup

TokenValue = Callable[[FusedPolicyLoss, Microbatch], Tensor]
"""Returns a value for each token, [T], from a micro-batch and its loss. Only learning tokens count."""
GroupValue = Callable[[SampleGroup], float]
"""Returns a value for all responses to one prompt."""

_token_means: dict[str, TokenValue] = {}
_group_means: dict[str, GroupValue] = {}
TOKEN_MEANS: Mapping[str, TokenValue] = MappingProxyType(_token_means)
"""Metrics of each gradient step by name, read-only. `token_mean` adds to it."""
GROUP_MEANS: Mapping[str, GroupValue] = MappingProxyType(_group_means)
"""Metrics of each rollout by name, read-only. `group_mean` adds to it."""

_Value = TypeVar("_Value", bound=Callable[..., object])


def _register(registry: dict[str, _Value], name: str, function: _Value) -> _Value:
    if name in registry:
        found = f"a second registration of {name!r}"
        raise ConfigError(Problem("metrics", found, "one function per name", "Choose another name."))
    registry[name] = function
    return function


def token_mean(name: str) -> Callable[[TokenValue], TokenValue]:
    """Register a function as the metric `name` of each gradient step: the mean value."""
    return lambda function: _register(_token_means, name, function)


def group_mean(name: str) -> Callable[[GroupValue], GroupValue]:
    """Register a function as the metric `name` of each rollout: the mean value."""
    return lambda function: _register(_group_means, name, function)


def add_token_means(metrics: Metrics, out: FusedPolicyLoss, microbatch: Microbatch) -> None:
    """Add every registered token metric of one micro-batch, in float64."""
    rows = microbatch.loss_mask.bool()
    with torch.no_grad():
        for name, function in _token_means.items():
            values = function(out, microbatch)[rows].double()
            metrics.add_mean(name, values.sum(), values.numel())


def add_group_means(metrics: Metrics, group: SampleGroup) -> None:
    """Add every registered group metric of one group."""
    for name, function in _group_means.items():
        metrics.add_mean(name, function(group), 1)


@token_mean("policy/entropy")
def entropy(out: FusedPolicyLoss, microbatch: Microbatch) -> Tensor:
    """Return the entropy over the full vocabulary at each position, [T], in nats."""
    return out.entropy


@group_mean("reward/zero_variance_fraction")
def has_zero_variance(group: SampleGroup) -> float:
    """Return 1.0 if all rewards of the group are equal up to rounding, so that no token learns."""
    return float(have_equal_rewards([float(sample.reward or 0.0) for sample in group.rollouts]))
