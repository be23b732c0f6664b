"""Shadows: what other objectives would make of the tokens that one objective trains on."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.algorithms.divergence import DIVERGENCES
from megatron_dppo.algorithms.inputs import PolicyLossInputs, TrustRegionTokens
from megatron_dppo.algorithms.loss import (
    as_a_rule_reads,
    compared_log_masses,
    learning_tokens,
    learning_weight,
)
from megatron_dppo.algorithms.loss_terms import LOSS_TERMS
from megatron_dppo.algorithms.objective import Objective


def with_inputs(
    objectives: Mapping[str, Objective],
    *,
    has_topk: bool,
    has_old_log_probs: bool,
    has_responses: bool = True,
) -> dict[str, Objective]:
    """Return the objectives with available inputs: Top-K and recomputed log-probs, complete responses."""
    return {
        name: objective
        for name, objective in objectives.items()
        if (has_topk or not objective.needs_topk)
        and (has_old_log_probs or objective.anchor != "recomputed")
        and (has_responses or not objective.needs_responses)
    }


@torch.no_grad()
def shadow_masks(objectives: Mapping[str, Objective], inputs: PolicyLossInputs) -> dict[str, Tensor]:
    """Return the mask of each objective, [T] bool, equal to `policy_loss(objective, inputs).mask`.

    Takes and raises what `shadow_weights` does.
    """
    return {name: weight != 0 for name, weight in shadow_weights(objectives, inputs).items()}


@torch.no_grad()
def shadow_weights(objectives: Mapping[str, Objective], inputs: PolicyLossInputs) -> dict[str, Tensor]:
    """Return the weight M of each objective, [T], equal to `policy_loss(objective, inputs).weight`.

    Work that objectives share is done once: each divergence, and the log-probs that it compares. No tensor here
    is of the vocabulary's size. Top-K objectives use the available columns, at most their `top_k`; with fewer
    columns their divergence is smaller. An objective is left out if an input is None. The values of
    the inputs are not checked again, because the training loss has already checked them.

    Args:
        objectives: Objectives by name.
        inputs: T tokens; gradients, token_weights and entropy are not read.

    Raises:
        ConfigError: An input has another shape or type.
    """
    has_topk = inputs.topk is not None and inputs.targets is not None
    evaluated = with_inputs(
        objectives,
        has_topk=has_topk,
        has_old_log_probs=inputs.old_log_probs is not None,
        has_responses=inputs.response_lengths is not None,
    )
    by_anchor = {
        anchor: _Shared([o for o in evaluated.values() if o.anchor == anchor], inputs)
        for anchor in {objective.anchor for objective in evaluated.values()}
    }
    return {name: by_anchor[objective.anchor].weight(objective) for name, objective in evaluated.items()}


@torch.no_grad()
def rule_values(objective: Objective, inputs: PolicyLossInputs) -> dict[str, Tensor]:
    """Return the named values of the tokens, [T], that a custom rule returns with its weights; or none.

    Rows that do not learn have 0. The values of the inputs are not checked again.
    """
    return {} if objective.own is None else _Shared([objective], inputs).values(objective)


class _Shared:
    """The tokens of one micro-batch and their divergences, for objectives with one anchor."""

    def __init__(self, objectives: Iterable[Objective], inputs: PolicyLossInputs) -> None:
        """Neutralise the tokens once, with the largest number of Top-K columns that an objective uses."""
        objectives = tuple(objectives)
        widest = max(objectives, key=lambda objective: objective.needs_topk * objective.top_k)
        if any(objective.needs_responses for objective in objectives) and not widest.needs_responses:
            widest = replace(widest, importance="response")
        widest = replace(widest, entropy_coef=0.0, **dict.fromkeys(LOSS_TERMS, 0.0))
        self._tokens: TrustRegionTokens = learning_tokens(widest, inputs, has_known_values=True)
        self._log_masses: dict[Any, tuple[Tensor, Tensor]] = {}
        self._divergences: dict[Any, Tensor] = {}

    def weight(self, objective: Objective) -> Tensor:
        """Return the weight M of one objective, [T]."""
        log_masses, divergence = self._compared(objective)
        return learning_weight(objective, self._tokens, log_masses, divergence)

    def values(self, objective: Objective) -> dict[str, Tensor]:
        """Return the named values of a custom rule, [T] each."""
        assert objective.own is not None, "only custom rules return values"
        return objective.own.values(as_a_rule_reads(objective, self._tokens, *self._compared(objective)))

    def _compared(self, objective: Objective) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return the log-masses and values of the objective's divergence, each computed once."""
        partition = None
        if objective.needs_topk:
            partition = (objective.top_k, objective.sampled_token, objective.include_other)
        key = (objective.divergence, partition)
        if partition not in self._log_masses:
            self._log_masses[partition] = compared_log_masses(objective, self._tokens)
        log_masses = self._log_masses[partition]
        if key not in self._divergences:
            self._divergences[key] = DIVERGENCES[objective.divergence].function(*log_masses)
        return log_masses, self._divergences[key]
