"""Collects the masked tokens with the largest divergence, each with the text around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.metrics.clipped_tokens import ClippedTokens
from megatron_dppo.metrics.clipped_tokens import State as ClippedState
from megatron_dppo.types import Microbatch

FARTHEST = 20  # tokens listed for each gradient step and sign
TOKENS_BEFORE, TOKENS_AFTER = 48, 16  # maximum tokens of context

SIGNS = {"+": 1, "-": -1}


@dataclass(frozen=True)
class MaskedToken:
    """A token that the mask dropped, with its response."""

    sign: str  # of its advantage, "+" or "-"
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
            mask: [T] bool, False where a token is dropped.
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
        """Add the others to this one and return it; gathered states include one's own, so start empty."""
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

    def state(self) -> tuple[ClippedState, list[MaskedToken]]:
        """All of it, for `all_gather_object`."""
        return self.clipped.state(), self.masked.state()

    def merge(self, others: Sequence[tuple[ClippedState, list[MaskedToken]]]) -> TokenLists:
        """Add the others to this one and return it; gathered states include one's own, so start empty."""
        self.clipped.merge(clipped for clipped, _ in others)
        self.masked.merge(masked for _, masked in others)
        return self
