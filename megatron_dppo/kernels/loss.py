"""The policy loss from logits: forward reads them once, backward writes their gradient once."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.algorithms import Objective
from megatron_dppo.algorithms.inputs import CLAMP_COUNTED_FROM
from megatron_dppo.algorithms.loss import TokenUpdates, update_metrics
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.kernels import ops
from megatron_dppo.kernels.encoding import encode
from megatron_dppo.kernels.reference import ROWS, TokenLogProbs, log_probs_of
from megatron_dppo.kernels.tokens import check_values, checked_tokens, rollout_tokens
from megatron_dppo.kernels.vocab_parallel import VocabShard, gather_statistics
from megatron_dppo.types import RolloutTokens

LOGIT_TYPES = (torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class FusedPolicyLoss(TokenUpdates):
    """The loss and what it did with each token, float32 (float64 for float64). Only `loss_sum` has gradient.

    Where `loss_mask` is False the logits are not looked at: log-prob, entropy, divergence and coefficient 0,
    mask False, ratio 1, top-K log-probs -inf.
    """

    loss_sum: Tensor  # scalar, the same on every tensor-parallel rank
    log_probs: Tensor  # [T] log pi(y_t)
    entropy: Tensor  # [T] nats
    topk_log_probs: Tensor | None  # [T, K], of the columns in use; -inf where the id is -1


def fused_policy_loss(
    logits: Tensor,
    targets: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    objective: Objective,
    *,
    loss_mask: Tensor | None = None,
    token_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_rollout_log_probs: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    inplace_backward: bool = False,
    debug: bool = False,
) -> FusedPolicyLoss:
    """`algorithms.policy_loss` of a micro-batch, from the logits (Eq. 12 and 23 of arXiv 2602.04879).

    With a split vocabulary all ranks of `tp_group` call it together, on the same tokens; one all-gather of
    [T, 4+K] numbers gives each the same results, bit for bit.

    Args:
        logits: [T, V/tp] bfloat16, float32 or (on CPU) float64: this rank's columns.
        targets: [T] integer, global ids of the sampled tokens.
        rollout_log_probs: [T] log mu(y_t).
        advantages: [T].
        objective: What to optimise.
        loss_mask: [T] bool: the tokens that learn; none means all. Nothing is read of the others.
        token_weights: [T] >= 0, multiplies each token's loss; none means 1.
        topk_ids: [T, K] integer ids of mu's most probable tokens, best first, -1 pads; needed by Top-K
            divergences, which use the first `top_k`. Otherwise all K are only reported.
        topk_rollout_log_probs: [T, K] log mu of them.
        old_log_probs: [T], needed where anchor = "recomputed".
        temperature: Divides the logits.
        vocab_start: Global id of the first column.
        vocab_size: Of the model, without padding; none: there is no padding. Columns beyond never count.
        tp_group: The ranks that hold the other columns, shards in rank order.
        inplace_backward: Write the gradient over the logits; a second backward pass is refused.
        debug: Also check values, at the price of device synchronisations.

    Raises:
        ConfigError: An input is missing or of the wrong shape or type, the shard does not cover the vocabulary,
            the compiled kernels of a GPU do not know the objective's rule or divergence, or (always on CPU, on
            other devices with `debug`) an input holds what no learning token may have.
    """
    tokens = rollout_tokens(
        objective,
        topk_ids,
        topk_rollout_log_probs,
        targets=targets,
        rollout_log_probs=rollout_log_probs,
        advantages=advantages,
        loss_mask=loss_mask,
        token_weights=token_weights,
        old_log_probs=old_log_probs,
    )
    return packed_policy_loss(
        logits,
        tokens,
        objective,
        temperature=temperature,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        tp_group=tp_group,
        inplace_backward=inplace_backward,
        debug=debug,
    )


def packed_policy_loss(
    logits: Tensor,
    tokens: RolloutTokens,
    objective: Objective,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    inplace_backward: bool = False,
    debug: bool = False,
) -> FusedPolicyLoss:
    """`fused_policy_loss` of a record of tokens, such as a micro-batch; it takes and raises the same."""
    shard = require_shard(logits, vocab_start, vocab_size, tp_group)
    require_temperature(temperature)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    ready = checked_tokens(objective, tokens, logits.shape[0], shard.vocab_size, dtype)
    if debug:
        check_values(objective, ready, shard, logits.shape[1])
    topk_ids = None if ready.topk is None else ready.topk.ids
    own = token_statistics(logits, ready.targets, topk_ids, ready.loss_mask, shard, temperature)
    statistics = gather_statistics(own, tp_group)
    results = combine_statistics(
        logits, statistics, ready, objective, shard, temperature, is_in_place=inplace_backward
    )
    return describe(*results, has_topk=tokens.topk is not None)


def token_statistics(
    logits: Tensor,
    targets: Tensor,
    topk_ids: Tensor | None,
    loss_mask: Tensor | None,
    shard: VocabShard,
    temperature: float,
) -> Tensor:
    """[T, 4+K] of this rank's columns; see `reference.row_statistics`."""
    start, size = shard.start, shard.vocab_size
    return ops.row_statistics(logits.detach(), targets, topk_ids, loss_mask, start, size, temperature, True)


def combine_statistics(
    logits: Tensor,
    statistics: Tensor,
    tokens: RolloutTokens,
    objective: Objective,
    shard: VocabShard,
    temperature: float,
    *,
    is_in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, [len(ROWS), T], [T, K] log-probs) from the statistics [shards, T, 4+K]; see `ops.policy_loss`."""
    topk = tokens.topk
    return ops.policy_loss(
        logits,
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
        shard.start,
        shard.vocab_size,
        temperature,
        is_in_place,
    )


def fused_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    loss_mask: Tensor | None = None,
    topk_ids: Tensor | None = None,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> TokenLogProbs:
    """Log-probs and entropies without gradient, by the path of `fused_policy_loss`, and its arguments."""
    shard = require_shard(logits, vocab_start, vocab_size, tp_group)
    require_temperature(temperature)
    ids = None if topk_ids is None else topk_ids.to(torch.int32).contiguous()
    own = token_statistics(logits, targets, ids, loss_mask, shard, temperature)
    return log_probs_of(gather_statistics(own, tp_group), ids, loss_mask)


def describe(loss_sum: Tensor, rows: Tensor, topk_log_probs: Tensor, *, has_topk: bool) -> FusedPolicyLoss:
    """The results of `ops.policy_loss` by name."""
    named = dict(zip(ROWS, rows.detach(), strict=True))
    return FusedPolicyLoss(
        mask=named["mask"] != 0,
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
    rollout_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
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


def require_shard(
    logits: Tensor, vocab_start: int, vocab_size: int | None, group: dist.ProcessGroup | None
) -> VocabShard:
    """Where this rank's columns stand.

    Raises:
        ConfigError: The logits are no matrix of a type that is computed with, or the first rank's shard does
            not begin, or the last one's does not reach the end of, the vocabulary.
    """
    size = 1 if group is None else group.size()
    rank = 0 if group is None else group.rank()
    if logits.dim() != 2 or logits.dtype not in LOGIT_TYPES:
        found = f"shape {list(logits.shape)}, {logits.dtype}"
        expected = "[T, V/tp] in bfloat16, float32 or float64"
        raise ConfigError(
            Problem("fused_policy_loss.logits", found, expected, "Flatten batch and sequence into T.")
        )
    whole = logits.shape[1] * size if vocab_size is None else vocab_size
    end = vocab_start + logits.shape[1]
    if vocab_start < 0 or (rank == 0 and vocab_start != 0) or (rank == size - 1 and end < whole):
        raise ConfigError(
            Problem(
                "fused_policy_loss.vocab_start",
                f"columns {vocab_start} to {end} on rank {rank} of {size}",
                f"shards in rank order that cover the {whole} tokens of the vocabulary",
                "Pass the global id of the shard's first column, vocab_size without padding, and the group "
                "whose ranks hold the other columns.",
            )
        )
    return VocabShard(vocab_start, whole, group)


def require_temperature(temperature: float) -> None:
    """Refuse what logits cannot be divided by.

    Raises:
        ConfigError: It is not a finite number above 0.
    """
    if not 0 < temperature < float("inf"):
        action = "Pass the temperature that the rollout sampled with."
        raise ConfigError(
            Problem("fused_policy_loss.temperature", repr(temperature), "a finite number > 0", action)
        )
