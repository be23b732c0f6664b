"""Shadow masks: the masks of other objectives on the tokens that one objective trains on."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.algorithms.divergence import DIVERGENCES
from megatron_dppo.algorithms.inputs import LearningTokens, PolicyLossInputs, learning_tokens
from megatron_dppo.algorithms.loss import compared_log_masses, learning_mask
from megatron_dppo.algorithms.objective import Objective


def with_inputs(
    objectives: Mapping[str, Objective], *, has_topk: bool, has_old_log_probs: bool
) -> dict[str, Objective]:
    """Return the objectives whose inputs exist: the rollout's Top-K, and recomputed log-probs."""
    return {
        name: objective
        for name, objective in objectives.items()
        if (has_topk or not objective.needs_topk) and (has_old_log_probs or objective.anchor != "recomputed")
    }


@torch.no_grad()
def shadow_masks(objectives: Mapping[str, Objective], inputs: PolicyLossInputs) -> dict[str, Tensor]:
    """Return the mask M of each objective, [T] bool, equal to `policy_loss(objective, inputs).mask`.

    What objectives have in common is computed once: each divergence, and what it compares. Nothing here is of
    the vocabulary's size. Top-K objectives use the columns there are, at most their `top_k`: fewer make their
    divergence smaller. An objective whose inputs are none is left out. The inputs are those of a loss that was
    made before: their values are not checked again.

    Args:
        objectives: By name.
        inputs: T tokens; gradients, token_weights and entropy are not read.

    Raises:
        ConfigError: An input has another shape or type.
    """
    has_topk = inputs.topk is not None and inputs.targets is not None
    evaluated = with_inputs(objectives, has_topk=has_topk, has_old_log_probs=inputs.old_log_probs is not None)
    by_anchor = {
        anchor: _Shared([o for o in evaluated.values() if o.anchor == anchor], inputs)
        for anchor in {objective.anchor for objective in evaluated.values()}
    }
    return {name: by_anchor[objective.anchor].mask(objective) for name, objective in evaluated.items()}


class _Shared:
    """The tokens of one micro-batch and their divergences, for objectives with one anchor."""

    def __init__(self, objectives: Iterable[Objective], inputs: PolicyLossInputs) -> None:
        """Neutralise the tokens once, with as many Top-K columns as any objective uses."""
        widest = max(objectives, key=lambda objective: objective.needs_topk * objective.top_k)
        widest = replace(widest, entropy_coef=0.0)
        self._tokens: LearningTokens = learning_tokens(widest, inputs, has_known_values=True)
        self._log_masses: dict[Any, tuple[Tensor, Tensor]] = {}
        self._divergences: dict[Any, Tensor] = {}

    def mask(self, objective: Objective) -> Tensor:
        """Return the mask M of one objective, [T] bool."""
        return learning_mask(objective, self._tokens, self._divergence(objective))

    def _divergence(self, objective: Objective) -> Tensor:
        partition = None
        if objective.needs_topk:
            partition = (objective.top_k, objective.sampled_token, objective.include_other)
        key = (objective.divergence, partition)
        if key not in self._divergences:
            if partition not in self._log_masses:
                self._log_masses[partition] = compared_log_masses(objective, self._tokens)
            function = DIVERGENCES[objective.divergence].function
            self._divergences[key] = function(*self._log_masses[partition])
        return self._divergences[key]
