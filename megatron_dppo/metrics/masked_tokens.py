"""Collects the tokens that a trust region masks: the most frequent, and the farthest with their text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.types import Microbatch

ACTIVE = "active"  # name of the training objective; replaces the preset's name
TOP = 50  # tokens listed for each preset and sign, as in the paper's App. E
MEANS = ("mu", "pi", "entropy", "tv")  # quantities summed for each token, after its count

Sums = list[float]  # a count, and the sum of each of MEANS
State = dict[tuple[str, str], dict[int, Sums]]  # by preset and sign ("+" or "-"), by token id
FARTHEST = 20  # tokens listed for each gradient step and sign
TOKENS_BEFORE, TOKENS_AFTER = 48, 16  # maximum tokens of context
SIGNS = {"+": 1, "-": -1}


class ClippedTokens:
    """Sums over masked tokens by token, preset and sign. They merge over micro-batches and ranks."""

    def __init__(self) -> None:
        self._sums: State = {}

    @torch.no_grad()
    def add(
        self,
        masks: Mapping[str, Tensor],  # [T] bool each: M, by preset
        *,
        targets: Tensor,  # [T] sampled ids
        log_probs: Tensor,  # [T] log pi(y_t)
        rollout_log_probs: Tensor,  # [T] log mu(y_t)
        entropy: Tensor,  # [T] nats, of pi
        advantages: Tensor,  # [T]
        loss_mask: Tensor,  # [T] bool
    ) -> None:
        """Count the learning tokens that each mask drops."""
        pi, mu = log_probs.double().exp(), rollout_log_probs.double().exp()
        seen = torch.stack([torch.ones_like(pi), mu, pi, entropy.double(), (pi - mu).abs()], dim=1)
        signs = {"+": loss_mask & (advantages > 0), "-": loss_mask & (advantages < 0)}
        for preset, mask in masks.items():
            for sign, of_sign in signs.items():
                rows = (of_sign & ~mask).nonzero()[:, 0]
                ids, places = targets[rows].unique(return_inverse=True)
                sums = seen.new_zeros(len(ids), seen.shape[1]).index_add(0, places, seen[rows])
                self._add((preset, sign), zip(ids.tolist(), sums.tolist(), strict=True))

    def state(self) -> State:
        """Return the sums as plain numbers, for `all_gather_object`."""
        return self._sums

    def merge(self, others: Iterable[State]) -> ClippedTokens:
        """Add states to this object and return it. Gathered states include the rank's own, so start empty."""
        for other in others:
            for key, of_ids in other.items():
                self._add(key, of_ids.items())
        return self

    def to_json(self) -> list[list[Any]]:
        """Return a JSON list [preset, sign, rows of a token id and its sums] for each preset and sign."""
        return [
            [*key, [[token_id, *sums] for token_id, sums in of_ids.items()]]
            for key, of_ids in self._sums.items()
        ]

    @classmethod
    def from_json(cls, content: Iterable[Any]) -> ClippedTokens:
        """Return the sums from a value of `to_json`."""
        found = cls()
        for preset, sign, rows in content:
            found._add((preset, sign), ((int(token_id), sums) for token_id, *sums in rows))
        return found

    def rows(self, decode: Callable[[list[int]], str], top: int = TOP) -> Iterator[dict[str, Any]]:
        """Yield the most often masked tokens of each preset and sign, most frequent first.

        Each row has `preset`, `sign`, `token`, `token_id`, `count`, `share` (of the preset's masked tokens with
        that sign), and the means of mu, pi, the entropy and |pi - mu| over the token's masked occurrences.
        """
        for (preset, sign), of_ids in sorted(self._sums.items()):
            in_all = sum(sums[0] for sums in of_ids.values())
            ranked = sorted(of_ids.items(), key=lambda item: (-item[1][0], item[0]))
            for token_id, (count, *totals) in ranked[:top]:
                means = {f"mean_{name}": total / count for name, total in zip(MEANS, totals, strict=True)}
                yield {
                    "preset": preset,
                    "sign": sign,
                    "token": decode([token_id]),
                    "token_id": token_id,
                    "count": int(count),
                    "share": count / in_all,
                    **{name: mean if math.isfinite(mean) else str(mean) for name, mean in means.items()},
                }

    def _add(self, key: tuple[str, str], of_ids: Iterable[tuple[int, Sums]]) -> None:
        own = self._sums.setdefault(key, {})
        for token_id, sums in of_ids:
            before = own.get(token_id, [0.0] * len(sums))
            own[token_id] = [a + b for a, b in zip(before, sums, strict=True)]


@dataclass(frozen=True)
class MaskedToken:
    """A token that the mask dropped, with its response."""

    sign: str  # "+" or "-", the advantage's sign
    sample_id: str
    position: int  # in the sample's tokens, prompt included, from 0
    token_id: int
    mu: float
    pi: float
    divergence: float  # the objective's; may be infinite
    advantage: float
    before: tuple[int, ...] = ()  # ids
    after: tuple[int, ...] = ()

    @property
    def rank(self) -> tuple[str, float, str, int]:
        """Return a key that sorts by sign, then by descending divergence, then by position."""
        return self.sign, -self.divergence, self.sample_id, self.position


class MaskedTokens:
    """The `FARTHEST` masked tokens of each sign with the largest divergence of the training objective."""

    def __init__(self) -> None:
        self._tokens: list[MaskedToken] = []

    @torch.no_grad()
    def add(self, microbatch: Microbatch, *, mask: Tensor, divergence: Tensor, log_probs: Tensor) -> None:
        """Add a rank's tokens of a micro-batch.

        Args:
            microbatch: This rank's T tokens. `cu_seqlens` may cover the tokens of all ranks. Nothing is added
                without `sample_ids`.
            mask: [T] bool, False for dropped tokens.
            divergence: [T].
            log_probs: [T] log pi(y_t).
        """
        if not microbatch.sample_ids:
            return
        for sign, factor in SIGNS.items():
            is_dropped = microbatch.loss_mask & ~mask & (factor * microbatch.advantages > 0)
            rows = _farthest(is_dropped.nonzero()[:, 0], divergence)
            self._tokens += _tokens(sign, rows, microbatch, divergence, log_probs)
        self._keep_farthest()

    def read_around(self, microbatches: Iterable[Microbatch]) -> None:
        """Attach the surrounding text to each token, from the step's complete micro-batches."""
        starts = {
            sample_id: (m.tokens, *map(int, m.cu_seqlens[place : place + 2]))
            for m in microbatches
            for place, sample_id in enumerate(m.sample_ids)
        }
        self._tokens = [_in_context(token, *starts[token.sample_id]) for token in self._tokens]

    def state(self) -> list[MaskedToken]:
        """All of it, for `all_gather_object`."""
        return self._tokens

    def merge(self, others: Iterable[list[MaskedToken]]) -> MaskedTokens:
        """Add other lists and return this one; gathered states include this rank's, so start empty."""
        for other in others:
            self._tokens += other
        self._keep_farthest()
        return self

    def rows(self, decode: Callable[[Sequence[int]], str], rollout: int) -> Iterator[dict[str, Any]]:
        """Return the tokens with the text around them, by sign, the largest divergence first.

        Each row has `sign`, `rollout`, `sample` (its id in `samples/`), `position` (among the sample's tokens,
        prompt included, from 0), `token`, `token_id`, `before` and `after` (text), `mu`, `pi`, `divergence` (a
        string if it is not finite) and `advantage`.
        """
        for token in self._tokens:
            yield {
                "sign": token.sign,
                "rollout": rollout,
                "sample": token.sample_id,
                "position": token.position,
                "before": decode(token.before),
                "token": decode([token.token_id]),
                "after": decode(token.after),
                "token_id": token.token_id,
                "mu": token.mu,
                "pi": token.pi,
                "divergence": token.divergence if math.isfinite(token.divergence) else str(token.divergence),
                "advantage": token.advantage,
            }

    def _keep_farthest(self) -> None:
        ranked = sorted(self._tokens, key=lambda token: token.rank)
        self._tokens = [t for sign in SIGNS for t in [t for t in ranked if t.sign == sign][:FARTHEST]]


def _farthest(rows: Tensor, divergence: Tensor) -> Tensor:
    """Return the rows with the largest divergences, including all ties with the smallest one returned."""
    if rows.numel() <= FARTHEST:
        return rows
    values = divergence[rows]
    return rows[values >= values.topk(FARTHEST).values[-1]]


def _tokens(sign: str, rows: Tensor, m: Microbatch, divergence: Tensor, log_probs: Tensor) -> list[MaskedToken]:
    # A context-parallel rank holds an equal part of each sequence, one sequence after the other.
    num_parts = int(m.cu_seqlens[-1]) // m.tokens.numel()
    sequences = torch.searchsorted(m.cu_seqlens[1:].long() // num_parts, rows, right=True)
    columns = (
        [m.sample_ids[place] for place in sequences.tolist()],
        (m.position_ids[rows] + 1).tolist(),
        m.targets[rows].tolist(),
        m.rollout_log_probs[rows].double().exp().tolist(),
        log_probs[rows].double().exp().tolist(),
        divergence[rows].tolist(),
        m.advantages[rows].tolist(),
    )
    return [MaskedToken(sign, *values) for values in zip(*columns, strict=True)]


def _in_context(token: MaskedToken, tokens: Tensor, start: int, stop: int) -> MaskedToken:
    place = start + token.position
    before = tokens[max(start, place - TOKENS_BEFORE) : place].tolist()
    after = tokens[place + 1 : min(stop, place + 1 + TOKENS_AFTER)].tolist()
    return replace(token, before=tuple(before), after=tuple(after))


@dataclass(frozen=True)
class TokenLists:
    """Lists of a gradient step's masked tokens: the most frequent, and the ones with the largest divergence."""

    clipped: ClippedTokens = field(default_factory=ClippedTokens)
    masked: MaskedTokens = field(default_factory=MaskedTokens)

    def state(self) -> tuple[State, list[MaskedToken]]:
        """All of it, for `all_gather_object`."""
        return self.clipped.state(), self.masked.state()

    def merge(self, others: Sequence[tuple[State, list[MaskedToken]]]) -> TokenLists:
        """Add other lists and return this one; gathered states include this rank's, so start empty."""
        self.clipped.merge(clipped for clipped, _ in others)
        self.masked.merge(masked for _, masked in others)
        return self
