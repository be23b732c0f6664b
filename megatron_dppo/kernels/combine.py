"""The part of a fused loss that has a few numbers per token: its inputs, and what `combine` makes of them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.library import custom_op

from megatron_dppo.algorithms import Objective
from megatron_dppo.algorithms.inputs import CLAMP_COUNTED_FROM
from megatron_dppo.algorithms.loss import TokenUpdates, update_metrics
from megatron_dppo.algorithms.loss_terms import OPTIONAL_INPUTS
from megatron_dppo.kernels import ops, reference
from megatron_dppo.kernels.encoding import decode, encode, is_compiled
from megatron_dppo.kernels.inputs import PackedResponses, require_tokens
from megatron_dppo.kernels.reference import ROWS
from megatron_dppo.types import ROLLOUT_TOKENS, RolloutTokens, RolloutTopK, each_token


@dataclass(frozen=True, eq=False)
class FusedPolicyLoss(TokenUpdates):
    """The loss and its results for each token, float32 (float64 for float64). Only `loss_sum` has gradient.

    Logits outside `loss_mask` are not read: log-prob, entropy, divergence, weight and coefficient are 0, mask
    is False, ratio 1, and top-K log-probs are -inf.
    """

    loss_sum: Float[Tensor, ""]  # the same on every tensor-parallel rank
    log_probs: Float[Tensor, " T"]  # log pi(y_t)
    entropy: Float[Tensor, " T"]  # nats
    topk_log_probs: Float[Tensor, "T K"] | None  # of the columns in use; -inf for an id of -1


def checked_tokens(
    objective: Objective, tokens: RolloutTokens, num_tokens: int, vocab_size: int, dtype: torch.dtype
) -> RolloutTokens:
    """Return the tokens of a loss in the kernels' types, contiguous, after the checks of `require_tokens`.

    Unused Top-K columns, and the optional inputs that the objective does not read, are left out. `dtype` is
    float32, or float64 if the logits are float64. The other arguments are as for `require_tokens`.
    """
    known: dict[str, Any] = {name: getattr(tokens, name) for name in ROLLOUT_TOKENS}
    known |= {name: None for name in OPTIONAL_INPUTS if name not in objective.inputs_of_terms}
    if objective.anchor != "recomputed":
        known["old_log_probs"] = None
    if objective.own is None:
        known |= {"positions": None, "lengths": None}
    tokens = RolloutTokens(**known)
    require_tokens(objective, tokens, num_tokens, vocab_size)
    topk, mask = tokens.topk, tokens.loss_mask
    if topk is not None:
        used = slice(None, objective.top_k if objective.needs_topk else None)
        ids, log_probs = topk.ids[:, used].to(torch.int32), topk.log_probs[:, used]
        topk = RolloutTopK(ids, log_probs) if topk.ids.shape[1] else None
    tokens = replace(
        tokens,
        targets=tokens.targets.to(torch.int64),
        loss_mask=None if mask is None else mask.bool(),
        topk=topk,
    )

    def ready(values: Tensor, _: float) -> Tensor:
        return values.detach().to(dtype if values.is_floating_point() else values.dtype).contiguous()

    return each_token(tokens, ready)


@torch.no_grad()
def combine_statistics(
    statistics: Float[Tensor, "shards T 4+K"],
    tokens: RolloutTokens,
    objective: Objective,
    responses: PackedResponses | None = None,
) -> tuple[Float[Tensor, "ROWS T"], Float[Tensor, "T K"]]:
    """Return the rows and the Top-K log-probs from the statistics; see `reference.combine`.

    Objectives that the compiled kernels do not support are computed in PyTorch, on any device.

    Args:
        statistics: Statistics of all shards of the vocabulary.
        tokens: T tokens, in the kernels' types.
        objective: Objective to optimise.
        responses: Responses, needed by rules over complete responses, which read all their tokens.
    """
    if is_compiled(objective):
        topk = tokens.topk
        return combine(
            statistics,
            tokens.targets,
            None if topk is None else topk.ids,
            tokens.rollout_log_probs,
            None if topk is None else topk.log_probs,
            tokens.old_log_probs,
            tokens.advantages,
            tokens.loss_mask,
            tokens.token_weights,
            encode(objective),
        )
    has_known_values = ops.is_compiled_for(statistics.device.type)
    if responses is None or not objective.needs_responses:
        return reference.combine(statistics, objective, tokens, has_known_values=has_known_values)
    rows, topk_log_probs = reference.combine(
        responses.whole(statistics.transpose(0, 1)).transpose(0, 1),
        objective,
        responses.whole_record(tokens),
        response_lengths=responses.lengths,
        has_known_values=has_known_values,
    )
    return responses.own(rows, dim=1), responses.own(topk_log_probs)


@custom_op("megatron_dppo::combine", mutates_args=())
def combine(
    statistics: Tensor,
    targets: Tensor,
    topk_ids: Tensor | None,
    rollout_log_probs: Tensor,
    topk_rollout_log_probs: Tensor | None,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor | None,
    token_weights: Tensor | None,
    objective: list[float],
) -> tuple[Tensor, Tensor]:
    """([len(ROWS), T], [T, K] log-probs) from the statistics [shards, T, 4+K] of all shards; no gradient.

    The operator takes the fields of a `RolloutTokens`, because a schema has no records.
    """
    topk = None
    if topk_ids is not None and topk_rollout_log_probs is not None:
        topk = RolloutTopK(topk_ids, topk_rollout_log_probs)
    tokens = RolloutTokens(
        targets=targets,
        rollout_log_probs=rollout_log_probs,
        advantages=advantages,
        loss_mask=loss_mask,
        token_weights=token_weights,
        old_log_probs=old_log_probs,
        topk=topk,
    )
    return ops.kernels_of(statistics).combine(statistics, decode(objective), tokens)


@combine.register_fake
def _(statistics: Tensor, targets: Tensor, topk_ids: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    num_rows, num_topk = statistics.shape[1], 0 if topk_ids is None else topk_ids.shape[1]
    return statistics.new_empty((len(ROWS), num_rows)), statistics.new_empty((num_rows, num_topk))


def describe(
    loss_sum: Float[Tensor, ""],
    rows: Float[Tensor, "ROWS T"],
    topk_log_probs: Float[Tensor, "T K"],
    *,
    has_topk: bool,
) -> FusedPolicyLoss:
    """The loss and the rows of `combine` by name."""
    named = dict(zip(ROWS, rows.detach(), strict=True))
    return FusedPolicyLoss(
        weight=named["weight"],
        mask=named["weight"] != 0,
        divergence=named["divergence"],
        ratio=named["ratio"],
        coefficient=named["coefficient"],
        loss_sum=loss_sum,
        log_probs=named["log_probs"],
        entropy=named["entropy"],
        topk_log_probs=topk_log_probs if has_topk else None,
    )


def fused_metrics(
    objective: Objective,
    out: FusedPolicyLoss,
    rollout_log_probs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    old_log_probs: Float[Tensor, " T"] | None = None,
) -> dict[str, Tensor]:
    """The additive metrics that `algorithms.policy_loss` documents, of the same tokens [T]."""
    mu, advantages = (
        torch.where(loss_mask, x.to(out.ratio.dtype), 0.0) for x in (rollout_log_probs, advantages)
    )
    highest = torch.maximum(out.log_probs, mu)
    if objective.anchor == "recomputed" and old_log_probs is not None:
        highest = torch.maximum(highest, torch.where(loss_mask, old_log_probs.to(highest.dtype), 0.0))
    return update_metrics(
        objective,
        out,
        is_learning=loss_mask,
        log_probs=out.log_probs.clamp(max=0),
        rollout_log_probs=mu.clamp(max=0),
        advantages=advantages,
        num_clamped=(highest > CLAMP_COUNTED_FROM).sum(),
    )
