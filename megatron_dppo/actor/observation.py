"""Computes the statistics of a gradient step from the loss's results."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from megatron_dppo.actor.forward import packed_responses
from megatron_dppo.algorithms import Objective, PolicyLossInputs, TopKLogProbs, preset, shadow_masks
from megatron_dppo.algorithms.paper_rules import PAPER
from megatron_dppo.algorithms.shadow import rule_values, with_inputs
from megatron_dppo.algorithms.trial import names_of_values
from megatron_dppo.config.sections import TrackingConfig
from megatron_dppo.kernels import FusedPolicyLoss, fused_metrics
from megatron_dppo.metrics.masked_tokens import ACTIVE, TokenLists
from megatron_dppo.metrics.means import add_token_means
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.metrics.step_metrics import (
    add_bound_of_tokens,
    add_clipped,
    add_loss_terms,
    add_mismatch,
    add_mismatch_by_age,
    add_noise,
    add_prob_diff_extremes,
    add_shadow_masks,
    add_topk_tv,
    add_trust_region,
)
from megatron_dppo.types import Microbatch


@dataclass(frozen=True)
class Step:
    """Results of one gradient step on this rank."""

    metrics: Metrics
    faults: tuple[str, ...] = ()  # values of this rank that were not finite, in words
    is_skipped: bool = False  # the weights were left as they were, on every rank
    lists: TokenLists | None = None  # tokens that each mask dropped, if `lists_clipped`


class Observer:
    """Adds the statistics of each micro-batch to a step's metrics, from the loss's results."""

    def __init__(self, objective: Objective, tracking: TrackingConfig, *, num_topk_log_probs: int) -> None:
        """Choose the shadow objectives, which are evaluated in addition to the training objective.

        Args:
            objective: Training objective.
            tracking: Settings with the shadow presets.
            num_topk_log_probs: Columns of the rollout's Top-K that each token carries.
        """
        self._objective = objective
        self.shadows: Mapping[str, Objective] = {}
        if tracking.shadow:
            options: Mapping[str, Mapping[str, Any]] = tracking.shadow_options
            named = {name: preset(name, **options.get(name, {})) for name in tracking.shadow_presets or PAPER}
            self.shadows = with_inputs(
                named, has_topk=num_topk_log_probs > 0, has_old_log_probs=objective.anchor == "recomputed"
            )

    @cached_property
    def _with_values(self) -> dict[str, Objective]:
        """The custom rules that return values with their weights, by their metrics' area."""
        areas = {"rule": self._objective, **{f"shadow/{name}": rule for name, rule in self.shadows.items()}}
        return {area: rule for area, rule in areas.items() if names_of_values(rule)}

    @property
    def reads_places(self) -> bool:
        """Whether a rule may read the places of tokens in their responses: a custom one."""
        return any(rule.own is not None for rule in (self._objective, *self.shadows.values()))

    @property
    def topk_columns(self) -> int:
        """Largest number of the rollout's Top-K columns that a shadow reads; 0 if no shadow reads them."""
        return max((shadow.top_k for shadow in self.shadows.values() if shadow.needs_topk), default=0)

    def observe(
        self,
        metrics: Metrics,
        out: FusedPolicyLoss,
        microbatch: Microbatch,
        *,
        is_first: bool,
        weight_version: int | None = None,
        lists: TokenLists | None = None,
    ) -> None:
        """Add the statistics of one micro-batch.

        Args:
            metrics: Gets them.
            out: Loss of this rank's tokens.
            microbatch: This rank's tokens.
            is_first: The weights are still those that the rollout sampled with.
            weight_version: Version of the current weights; enables mismatch metrics per staleness.
            lists: Lists to which the tokens that each mask drops are added, or None.
        """
        m = microbatch
        metrics.add_mean("loss/policy", out.loss_sum.detach(), m.num_loss_tokens)
        counts = fused_metrics(
            self._objective,
            out,
            m.rollout_log_probs,
            m.advantages,
            m.loss_mask,
            old_log_probs=m.old_log_probs,
        )
        add_trust_region(metrics, counts)
        values: dict[str, Tensor] = dict(
            log_probs=out.log_probs,
            rollout_log_probs=m.rollout_log_probs,
            advantages=m.advantages,
            loss_mask=m.loss_mask,
        )
        add_clipped(metrics, out.mask, entropy=out.entropy, **values)
        add_token_means(metrics, out, m)
        add_loss_terms(metrics, self._objective, out.log_probs, m)
        add_bound_of_tokens(metrics, out.log_probs, m.rollout_log_probs, m.advantages, m.loss_mask)
        add_prob_diff_extremes(metrics, out.log_probs, m.rollout_log_probs, m.loss_mask)
        measured = m.loss_mask if m.is_measured is None else m.loss_mask & m.is_measured
        add_mismatch(metrics, out.log_probs, m.rollout_log_probs, measured, prefix="drift")
        topk = _topk_of(out, m)
        if topk is not None:
            add_topk_tv(metrics, topk, m.targets, out.log_probs, m.rollout_log_probs, measured, prefix="drift")
        if is_first:
            add_mismatch(metrics, out.log_probs, m.rollout_log_probs, m.loss_mask)
            add_noise(metrics, out.mask, m.advantages, m.loss_mask, m.weight_versions, weight_version)
            if weight_version is not None and m.weight_versions is not None:
                add_mismatch_by_age(
                    metrics, out.log_probs, m.rollout_log_probs, measured, m.weight_versions, weight_version
                )
        masks = self._evaluate_rules(metrics, out, m)
        add_shadow_masks(metrics, self.shadows, masks, out.mask, **values)
        if lists is not None:
            lists.masked.add(m, mask=out.mask, divergence=out.divergence, log_probs=out.log_probs)
            named = {ACTIVE: out.mask, **masks}
            lists.clipped.add(named, targets=m.targets, entropy=out.entropy, **values)

    def _evaluate_rules(self, metrics: Metrics, out: FusedPolicyLoss, m: Microbatch) -> dict[str, Tensor]:
        """Return the shadows' masks of this rank's tokens, and add the values that custom rules return."""
        if not self.shadows and not self._with_values:
            return {}
        inputs = PolicyLossInputs.of(m, out.log_probs, topk_log_probs=out.topk_log_probs)
        responses = None
        if any(rule.needs_responses for rule in (*self.shadows.values(), *self._with_values.values())):
            responses = packed_responses(m)
            topk = None if out.topk_log_probs is None else responses.whole(out.topk_log_probs)
            inputs = PolicyLossInputs.of(
                responses.whole_record(m),
                responses.whole(out.log_probs),
                topk_log_probs=topk,
                response_lengths=responses.lengths,
            )

        def own(values: Tensor) -> Tensor:
            return values if responses is None else responses.own(values)

        for area, rule in self._with_values.items():
            for name, values in rule_values(rule, inputs).items():
                metrics.add_mean(f"{area}/{name}", own(values).double().sum(), m.loss_mask.sum())
        return {name: own(mask) for name, mask in shadow_masks(self.shadows, inputs).items()}


def _topk_of(out: FusedPolicyLoss, m: Microbatch) -> TopKLogProbs | None:
    """Return the rollout's Top-K columns that the loss reported, if it did."""
    if m.topk is None or out.topk_log_probs is None:
        return None
    used = slice(None, out.topk_log_probs.shape[1])
    return TopKLogProbs(m.topk.ids[:, used], m.topk.log_probs[:, used], out.topk_log_probs)
