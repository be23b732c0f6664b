"""The kernels in plain PyTorch: the operators run them on CPU tensors, and tests compare the kernels with them.

`row_statistics`, `combine` and `logits_gradient` compute the same as the CUDA kernels of the same names, in
float32 (float64 for float64). Masks and divergences come from `algorithms`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from megatron_dppo.algorithms import Objective, PolicyLossInputs
from megatron_dppo.algorithms.loss import learning_tokens, token_updates
from megatron_dppo.algorithms.loss_terms import added_terms
from megatron_dppo.types import RolloutTokens

LN2 = math.log(2.0)
LOG2E = 1.0 / LN2
BLOCK_NUMBERS = 2**17
STATISTICS = 4  # columns of `row_statistics` before the columns of the top-K
# Per token, as `combine` returns them: [len(ROWS), T].
ROWS = (
    "log_probs",
    "entropy",
    "divergence",
    "ratio",
    "weight",
    "coefficient",
    "loss",
    "log_prob_gradient",
    "entropy_gradient",
    "highest",
    "log2_sum",
)


@dataclass(frozen=True, eq=False)
class TokenLogProbs:
    """Log-probs and entropy of each position; outside the loss mask 0, and -inf for the top-K."""

    log_probs: Float[Tensor, " T"]  # log pi(target)
    entropy: Float[Tensor, " T"]  # nats, over the full vocabulary
    topk_log_probs: Float[Tensor, "T K"] | None  # log pi of the rollout's top-K tokens; -inf for an id of -1
    score_norms: Float[Tensor, " T"] | None = None  # |d log pi(target) / dh| of the output layer's input h

    @property
    def columns(self) -> Tensor:
        """[T, 1 + K + 1]: log-probs of the target and the top-K, and the score norm, without absent ones."""
        parts = [self.log_probs[:, None], self.topk_log_probs]
        parts.append(None if self.score_norms is None else self.score_norms[:, None])
        return torch.cat([part for part in parts if part is not None], dim=1)


@dataclass(frozen=True)
class LogitColumns:
    """How the kernels read and write the columns of one shard's logits."""

    start: int  # global id of the first column
    num: int  # columns that are tokens; the others are never read, and get a gradient of 0
    temperature: float  # divides the logits
    with_entropy: bool  # whether the entropy is needed, or has a gradient

    @classmethod
    def of(
        cls,
        logits: Float[Tensor, "T V"],
        vocab_start: int,
        vocab_size: int,
        temperature: float,
        with_entropy: bool,
    ) -> "LogitColumns":
        """Return the columns of the shard from `vocab_start` on; those from `vocab_size` on are padding."""
        num = max(0, min(logits.shape[1], vocab_size - vocab_start))
        return cls(vocab_start, num, temperature, with_entropy)


def row_statistics(
    logits: Float[Tensor, "T V"],
    targets: Integer[Tensor, " T"],
    topk_ids: Integer[Tensor, "T K"] | None,
    is_learning: Bool[Tensor, " T"] | None,
    columns: LogitColumns,
) -> Float[Tensor, "T 4+K"]:
    """Return one shard's statistics of each row: (m, s, w, y of the target, y of each top-K id).

    y = logit / temperature in base 2 (times log2 e), m = max y, s = sum 2^(y-m), w = sum 2^(y-m) (y-m). Ids
    of other shards, or of padding, give 0; rows that do not learn give (-inf, 0, 0, ...).
    """
    ids = targets[:, None] if topk_ids is None else torch.cat([targets[:, None], topk_ids.long()], dim=1)
    scale = LOG2E / columns.temperature
    parts = [
        _row_statistics(logits[rows, : columns.num], ids[rows] - columns.start, scale, columns.with_entropy)
        for rows in _blocks(logits.shape)
    ]
    statistics = torch.cat(parts)
    if is_learning is None:
        return statistics
    neutral = statistics.new_zeros(statistics.shape[1])
    neutral[0] = -math.inf
    return torch.where(is_learning[:, None], statistics, neutral)


def _row_statistics(logits: Tensor, local_ids: Tensor, scale: float, with_entropy: bool) -> Tensor:
    num_columns = logits.shape[1]
    own = logits.to(wide_dtype(logits)) * scale
    if num_columns:
        highest = own.amax(1, keepdim=True)
        is_here = (local_ids >= 0) & (local_ids < num_columns)
        chosen = torch.where(is_here, own.gather(1, local_ids.clamp(0, num_columns - 1)), 0.0)
    else:
        highest, chosen = own.new_full((own.shape[0], 1), -math.inf), own.new_zeros(local_ids.shape)
    below = own.sub_(torch.where(highest == -math.inf, 0.0, highest))
    powers = below.exp2()
    total = powers.sum(1, keepdim=True)
    # A power of 0 times -inf counts for nothing; a NaN shows in the total.
    weighted = below.mul_(powers).nansum(1, keepdim=True) if with_entropy else torch.zeros_like(total)
    return torch.cat([highest, total, weighted, chosen], dim=1)


def _blocks(shape: torch.Size) -> Iterator[slice]:
    """Yield blocks of rows that are small enough to stay in a processor's cache; at least one block."""
    num_rows, step = shape[0], max(1, BLOCK_NUMBERS // max(shape[1], 1))
    for start in range(0, max(num_rows, 1), step):
        yield slice(start, min(start + step, num_rows))


@dataclass(frozen=True, eq=False)
class _Merged:
    """All shards' statistics as one; `highest` and `log2_sum` stay apart: log-probs near 0 keep digits."""

    highest: Float[Tensor, " T"]  # base 2
    log2_sum: Float[Tensor, " T"]
    entropy: Float[Tensor, " T"]  # nats
    log_probs: Float[Tensor, "T 1+K"]  # of the target and of the top-K


def _merge(statistics: Tensor) -> _Merged:
    highest_of_shards = statistics[:, :, 0]
    highest = highest_of_shards.amax(0)
    below = torch.where(highest_of_shards == -math.inf, -1e30, highest_of_shards - highest)
    scale = below.exp2()
    total = (scale * statistics[:, :, 1]).sum(0)
    weighted = (scale * (statistics[:, :, 2] + below.clamp(min=-1e4) * statistics[:, :, 1])).sum(0)
    log2_sum = total.log2()
    chosen = statistics[:, :, STATISTICS - 1 :].sum(0)
    return _Merged(
        highest,
        log2_sum,
        entropy=(log2_sum - weighted / total) * LN2,
        log_probs=((chosen - highest[:, None]) - log2_sum[:, None]) * LN2,
    )


def log_probs_of(
    statistics: Float[Tensor, "shards T 4+K"],
    topk_ids: Integer[Tensor, "T K"] | None,
    is_learning: Bool[Tensor, " T"] | None,
) -> TokenLogProbs:
    """Log-probs and entropy from the statistics [shards, T, 4+K] of all shards."""
    return _token_log_probs(_merge(statistics), topk_ids, is_learning)


def _token_log_probs(merged: _Merged, topk_ids: Tensor | None, is_learning: Tensor | None) -> TokenLogProbs:
    log_probs, entropy, topk = merged.log_probs[:, 0], merged.entropy, None
    if topk_ids is not None:
        topk = merged.log_probs[:, 1:].masked_fill(topk_ids < 0, -math.inf)
    if is_learning is not None:
        log_probs, entropy = (torch.where(is_learning, x, 0.0) for x in (log_probs, entropy))
        topk = None if topk is None else torch.where(is_learning[:, None], topk, -math.inf)
    return TokenLogProbs(log_probs, entropy, topk)


def combine(
    statistics: Float[Tensor, "shards T 4+K"],
    objective: Objective,
    tokens: RolloutTokens,
    *,
    response_lengths: Integer[Tensor, " B"] | None = None,
    has_known_values: bool = False,
) -> tuple[Float[Tensor, "ROWS T"], Float[Tensor, "T K"]]:
    """Return the loss of each row and its gradient by log-prob and entropy, and the Top-K log-probs.

    Args:
        statistics: Statistics over all vocabulary shards.
        objective: Objective to optimise.
        tokens: T tokens.
        response_lengths: [B], needed by rules over complete responses.
        has_known_values: Values are not checked, and the call does not synchronise with the device.
    """
    merged = _merge(statistics)
    found = _token_log_probs(merged, tokens.topk_ids, tokens.loss_mask)
    inputs = PolicyLossInputs.of(
        tokens,
        found.log_probs,
        topk_log_probs=found.topk_log_probs,
        entropy=found.entropy,
        response_lengths=response_lengths,
    )
    learning = learning_tokens(objective, inputs, has_known_values=has_known_values)
    updates = token_updates(objective, learning)
    is_learning, weights = learning.loss_mask, learning.token_weights
    by_log_prob = torch.where(weights != 0, -updates.coefficient * weights, 0.0)
    by_entropy = torch.where(is_learning, -objective.entropy_coef * weights, 0.0)
    loss = torch.where(by_log_prob != 0, by_log_prob * found.log_probs, 0.0)
    loss = loss + torch.where(by_entropy != 0, by_entropy * found.entropy, 0.0)
    for added, by_added in added_terms(objective, learning, updates.ratio):
        loss, by_log_prob = loss + added, by_log_prob + by_added
    rows = {
        "log_probs": found.log_probs,
        "entropy": found.entropy,
        "divergence": updates.divergence,
        "ratio": updates.ratio,
        "weight": updates.weight,
        "coefficient": updates.coefficient,
        "loss": loss,
        "log_prob_gradient": by_log_prob,
        "entropy_gradient": by_entropy,
        "highest": torch.where(is_learning, merged.highest, 0.0),
        "log2_sum": torch.where(is_learning, merged.log2_sum, 0.0),
    }
    topk = found.topk_log_probs
    return (
        torch.stack([rows[name].to(statistics.dtype) for name in ROWS]),
        statistics.new_empty((statistics.shape[1], 0)) if topk is None else topk,
    )


def logits_gradient(
    logits: Float[Tensor, "T V"],
    rows: Float[Tensor, "ROWS T"],
    targets: Integer[Tensor, " T"],
    columns: LogitColumns,
    *,
    upstream: Tensor | None = None,
    sources: Integer[Tensor, " N"] | None = None,
    out: Float[Tensor, "N V"],
) -> None:
    """Write the loss's gradient by the logits to `out`, which may be the logits themselves.

    d log pi(a) / dz_j = (1[j = a] - pi_j) / T, and dH / dz_j = -pi_j (log pi_j + H) / T.

    Args:
        logits: [T, V/shards].
        rows: [len(ROWS), T], from `combine`.
        targets: [T] int64.
        columns: Columns of the logits, as in `row_statistics`.
        upstream: Scalar, the gradient by the loss; `None` means 1.
        sources: [N] int64: row i of `out` is for row sources[i] of the logits; `None` keeps the order.
        out: [N, V/shards] of the logits' dtype.
    """
    num_columns = columns.num
    named = {name: row[:, None] for name, row in zip(ROWS, rows, strict=True)}
    scale = 1.0 / columns.temperature if upstream is None else upstream.to(rows.dtype) / columns.temperature
    by_log_prob, by_entropy = named["log_prob_gradient"] * scale, named["entropy_gradient"] * scale
    for block in _blocks(out.shape):
        source = block if sources is None else sources[block]
        own = logits[source, :num_columns].to(rows.dtype) * (LOG2E / columns.temperature)
        log2_pi = own.sub_(named["highest"][source]).sub_(named["log2_sum"][source])
        by_own, by_its_entropy = by_log_prob[source], by_entropy[source]
        if columns.with_entropy:
            pi = log2_pi.exp2()
            surprise = log2_pi.clamp_(min=-1e30).mul_(LN2).add_(named["entropy"][source])
            gradient = surprise.mul_(-by_its_entropy).sub_(by_own).mul_(pi)
        else:
            gradient = log2_pi.exp2_().mul_(-by_own)
        local = (targets[source] - columns.start)[:, None]
        is_here = (local >= 0) & (local < num_columns)
        if num_columns:
            gradient.scatter_add_(1, local.clamp(0, num_columns - 1), torch.where(is_here, by_own, 0.0))
        gradient[((by_own == 0) & (by_its_entropy == 0))[:, 0]] = 0.0
        out[block, :num_columns] = gradient
    out[:, num_columns:] = 0.0


def wide_dtype(values: Tensor) -> torch.dtype:
    """Return the type of log-probs and gradients by them, from logits or hidden states of any type."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32
