"""Counts which tokens a trust region masks, by sign of the advantage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

ACTIVE = "active"  # name of the training objective, used instead of its preset's name
TOP = 50  # tokens listed for each preset and sign, as in the paper's App. E
MEANS = ("mu", "pi", "entropy", "tv")  # quantities summed for each token, after its count

Sums = list[float]  # a count, and the sum of each of MEANS
State = dict[tuple[str, str], dict[int, Sums]]  # by preset and sign ("+" or "-"), by token id


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
