"""The kernels' source built for the host, and the loss through it: what the kernel tests share."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.algorithms import (
    PRESETS,
    Objective,
    PolicyLossInputs,
    PolicyLossOutput,
    policy_loss,
    preset,
)
from megatron_dppo.kernels.encoding import is_compiled
from megatron_dppo.kernels.library import KernelLibrary
from megatron_dppo.kernels.reference import ROWS, LogitColumns
from megatron_dppo.types import RolloutTokens, RolloutTopK, each_token

PADDING = (math.nan, 1e4)


def compiled_presets(top_k: int) -> list[Objective]:
    """The presets that the kernels compute; a preset of a Top-K divergence gets that many columns."""
    return [
        preset(name, **({"top_k": top_k} if objective.needs_topk else {}))
        for name, objective in PRESETS.items()
        if is_compiled(objective)
    ]


@dataclass(frozen=True, eq=False)
class Tokens:
    """N tokens over a vocabulary of V, clean: what the kernel must make nothing of is put in by `Run`."""

    logits: Tensor  # [N, V] float32 or bfloat16
    targets: Tensor  # [N] int64
    topk_ids: Tensor  # [N, K] int32
    topk_rollout_log_probs: Tensor  # [N, K]
    rollout_log_probs: Tensor  # [N]
    old_log_probs: Tensor  # [N]
    advantages: Tensor  # [N]
    is_learning: Tensor  # [N] bool
    token_weights: Tensor  # [N]
    temperature: float = 1.0

    @classmethod
    def of(cls, rollout_log_probs: Tensor, **changes: Any) -> "Tokens":
        """Tokens with id 0 that all learn, with advantage and weight 1, no Top-K, and no logits."""
        num, ones = len(rollout_log_probs), torch.ones(len(rollout_log_probs))
        known: dict[str, Any] = dict(
            logits=torch.empty(0),
            targets=torch.zeros(num, dtype=torch.int64),
            topk_ids=torch.empty(num, 0, dtype=torch.int32),
            topk_rollout_log_probs=torch.empty(num, 0),
            rollout_log_probs=rollout_log_probs,
            old_log_probs=rollout_log_probs,
            advantages=ones,
            is_learning=ones.bool(),
            token_weights=ones,
        )
        return cls(**known | changes)

    def record(self, ignored: float = math.nan) -> RolloutTokens:
        """The same as the kernels take it, with `ignored` in all rows that do not learn."""

        def filled(values: Tensor) -> Tensor:
            learns = self.is_learning if values.dim() == 1 else self.is_learning[:, None]
            return values.where(learns, ignored)

        has_topk = self.topk_ids.shape[1] > 0
        return RolloutTokens(
            targets=self.targets,
            rollout_log_probs=filled(self.rollout_log_probs),
            advantages=filled(self.advantages),
            loss_mask=self.is_learning,
            token_weights=filled(self.token_weights),
            old_log_probs=filled(self.old_log_probs),
            topk=RolloutTopK(self.topk_ids, filled(self.topk_rollout_log_probs)) if has_topk else None,
        )


def random_tokens(
    num: int,
    vocab_size: int,
    top_k: int,
    *,
    dtype: torch.dtype = torch.float32,
    temperature: float = 1.0,
    seed: int = 0,
) -> Tokens:
    """Tokens of every kind the trust region decides on; the first rows are the extreme ones.

    Row 0 has two tokens of any probability, row 1 a target of probability 1, row 2 a padded Top-K, row 3 no
    advantage, row 4 a target outside the Top-K, row 5 a weight of 0, row 6 does not learn.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    logits = normal(num, vocab_size) * 3
    logits[0] = -math.inf
    logits[0, 5], logits[0, vocab_size - 1] = 1.0, 0.5
    logits[1, 7] = 60.0
    logits = logits.to(dtype)
    exact = (logits.double() / temperature).log_softmax(-1)
    noise = torch.linspace(0.05, 0.8, num)[:, None] * normal(num, vocab_size)
    rollout = (exact + noise).log_softmax(-1)
    old = (exact + noise / 2).log_softmax(-1)
    targets = torch.multinomial(rollout.exp(), 1, generator=generator)[:, 0]
    targets[0], targets[1] = 5, 7
    targets[4] = rollout[4].argmin()
    topk = rollout.topk(min(top_k, vocab_size), dim=1)
    ids, topk_rollout = topk.indices.int(), topk.values.float()
    padding = torch.full((num, top_k - ids.shape[1]), -1)
    ids = torch.cat([ids, padding], dim=1).int()
    topk_rollout = torch.cat([topk_rollout, padding.float()], dim=1)
    if top_k > 2:
        ids[2, 1 + top_k // 2 :] = -1
    weights = torch.rand(num, generator=generator)
    weights[5] = 0
    advantages = normal(num)
    advantages[3] = 0
    is_learning = torch.rand(num, generator=generator) > 0.1
    is_learning[:6], is_learning[6] = True, False
    return Tokens(
        logits=logits,
        targets=targets,
        topk_ids=ids.contiguous(),
        topk_rollout_log_probs=topk_rollout.masked_fill(ids < 0, math.nan).contiguous(),
        rollout_log_probs=rollout.gather(1, targets[:, None])[:, 0].float().clamp(max=-1e-6),
        old_log_probs=old.gather(1, targets[:, None])[:, 0].float().clamp(max=-1e-6),
        advantages=advantages,
        is_learning=is_learning,
        token_weights=weights,
        temperature=temperature,
    )


@dataclass(frozen=True, eq=False)
class Exact:
    """The loss of float64 log-probs, by `algorithms.policy_loss` and autograd."""

    log_probs: Tensor  # [N, V]
    entropy: Tensor  # [N]
    loss: PolicyLossOutput
    gradient: Tensor  # [N, V] of the summed loss


def exact_loss(tokens: Tokens, objective: Objective) -> Exact:
    """What the kernels must come close to."""
    logits = tokens.logits.double().requires_grad_()
    log_probs = (logits / tokens.temperature).log_softmax(-1)
    masses = log_probs.exp()
    entropy = -(masses * log_probs.masked_fill(masses == 0, 0)).sum(-1)
    at_targets = log_probs.gather(1, tokens.targets[:, None])[:, 0]
    at_topk = log_probs.gather(1, tokens.topk_ids.long().clamp(min=0)).detach()
    record = each_token(tokens.record(), lambda x, _: x.double() if x.is_floating_point() else x)
    inputs = PolicyLossInputs.of(
        record, at_targets, topk_log_probs=at_topk, entropy=entropy, response_lengths=None
    )
    loss = policy_loss(objective, inputs)
    loss.loss_sum.backward()
    assert logits.grad is not None
    return Exact(log_probs.detach(), entropy.detach(), loss, logits.grad)


@dataclass(frozen=True, eq=False)
class Shard:
    """A rank's columns; what pads them and the rows that do not learn is poison."""

    logits: Tensor  # [N, width]
    start: int
    num_columns: int


def shards_of(tokens: Tokens, num_shards: int, poison: float) -> list[Shard]:
    """Equally wide columns in multiples of 8, as padded vocabularies are split."""
    num, vocab_size = tokens.logits.shape
    width = 8 * math.ceil(vocab_size / (8 * num_shards))
    if width * num_shards == vocab_size:
        width += 8
    whole = torch.full((num, width * num_shards), poison, dtype=tokens.logits.dtype)
    whole[:, :vocab_size] = tokens.logits
    whole[~tokens.is_learning] = math.nan
    shards = []
    for start in range(0, width * num_shards, width):
        num_columns = max(0, min(width, vocab_size - start))
        shards.append(Shard(whole[:, start : start + width].contiguous(), start, num_columns))
    return shards


@dataclass(frozen=True, eq=False)
class Result:
    """What the kernels made of some tokens."""

    rows: dict[str, Tensor]  # [N] each
    planes: Tensor  # [11, N], the same
    topk_log_probs: Tensor | None  # [N, K]
    gradient: Tensor  # [N, V]
    padding: Tensor  # [N, ...]: gradient of the columns that are no tokens
    shards: list[Shard]


def statistics_of(library: KernelLibrary, tokens: Tokens, shards: list[Shard], with_entropy: bool) -> Tensor:
    """[shards, N, 4 + K]: what the all-gather yields."""
    parts = [
        library.row_statistics(
            shard.logits,
            tokens.targets,
            tokens.topk_ids if tokens.topk_ids.shape[1] > 0 else None,
            tokens.is_learning,
            LogitColumns(shard.start, shard.num_columns, tokens.temperature, with_entropy),
        )
        for shard in shards
    ]
    return torch.stack(parts)


def combined(
    library: KernelLibrary, tokens: Tokens, statistics: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """`KernelLibrary.combine`, with NaN in all rows that do not learn."""
    return library.combine(statistics, objective, tokens.record())


def gradient_of(
    library: KernelLibrary,
    tokens: Tokens,
    shard: Shard,
    planes: Tensor,
    *,
    out: Tensor,
    with_entropy: bool = True,
    upstream: Tensor | None = None,
    sources: Tensor | None = None,
) -> Tensor:
    """`KernelLibrary.logits_gradient` of one shard; returns `out`."""
    columns = LogitColumns(shard.start, shard.num_columns, tokens.temperature, with_entropy)
    library.logits_gradient(
        shard.logits, planes, tokens.targets, columns, upstream=upstream, sources=sources, out=out
    )
    return out


def run(
    library: KernelLibrary,
    tokens: Tokens,
    objective: Objective,
    *,
    num_shards: int = 1,
    poison: float = math.nan,
) -> Result:
    """All three kernels, over shards with poison in their padding; gradients in place."""
    shards = shards_of(tokens, num_shards, poison)
    with_bonus = objective.entropy_coef != 0
    statistics = statistics_of(library, tokens, shards, with_entropy=True)
    planes, topk_log_probs = combined(library, tokens, statistics, objective)
    gradients = [
        gradient_of(
            library,
            tokens,
            replace(shard, logits=(own := shard.logits.clone())),
            planes,
            out=own,
            with_entropy=with_bonus,
        )
        for shard in shards
    ]
    return Result(
        rows=dict(zip(ROWS, planes, strict=True)),
        planes=planes,
        topk_log_probs=topk_log_probs,
        gradient=torch.cat([g[:, : s.num_columns] for g, s in zip(gradients, shards, strict=True)], dim=1),
        padding=torch.cat([g[:, s.num_columns :] for g, s in zip(gradients, shards, strict=True)], dim=1),
        shards=shards,
    )
