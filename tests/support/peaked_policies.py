"""Policies so certain that float32 does not know how certain, and how wrong their divergences may be."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_dppo.algorithms import TopKLogProbs
from megatron_dppo.algorithms.divergence import ROUNDOFF_EPSILONS, SURELY_POSITIVE_TAIL

EPS = torch.finfo(torch.float32).eps
ROUNDOFF = ROUNDOFF_EPSILONS * EPS
# Noise of 1 - sum(p) after log-softmax in float32: twice the bound in divergence.py for 64 columns.
TAIL_NOISE = 8 * EPS
# +inf replaces a KL above this; see SURELY_POSITIVE_TAIL.
SURELY_EXCEEDED = 0.05
SAMPLED_TOKENS = ("replace", "union")


@dataclass(frozen=True, eq=False)
class PeakedPolicies:
    """Two policies of N tokens; the logits are float64 numbers that float32 holds exactly."""

    logits: Tensor  # [N, V] of the policy
    rollout_logits: Tensor  # [N, V]
    targets: Tensor  # [N]: half are sampled from the rollout policy, half uniformly

    @classmethod
    def draw(
        cls, seed: int, vocab_size: int, *, num_tokens: int = 96, noise: float = 0.2, peak: float = 24.0
    ) -> "PeakedPolicies":
        """One token of each row stands out by 0 to `peak`; the logits of both policies differ by `noise`.

        At a peak of 17 the rest of a small vocabulary has a mass of float32's epsilon.
        """
        generator = torch.Generator().manual_seed(seed)
        shape = (num_tokens, vocab_size)

        def normal() -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        def uniform() -> Tensor:
            return torch.rand(num_tokens, 1, generator=generator, dtype=torch.float64)

        peaks = torch.randint(vocab_size, (num_tokens, 1), generator=generator)
        rollout_logits = (2 * normal()).scatter_add(1, peaks, peak * uniform())
        logits = (rollout_logits + noise * normal()).scatter_add(1, peaks, 5 * noise * uniform())
        sampled = torch.multinomial(rollout_logits.softmax(1), 1, generator=generator)[:, 0]
        any_token = torch.randint(vocab_size, (num_tokens,), generator=generator)
        targets = torch.where(torch.arange(num_tokens) % 2 == 0, sampled, any_token)
        return cls(logits.float().double(), rollout_logits.float().double(), targets)

    def log_probs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Log-probs [N, V] of both policies, by log-softmax in that type."""
        return self.logits.to(dtype).log_softmax(1), self.rollout_logits.to(dtype).log_softmax(1)

    def sampled(self, log_probs: Tensor) -> Tensor:
        """The sampled tokens' of [N, V]."""
        return log_probs.gather(1, self.targets[:, None])[:, 0]

    def topk(self, top_k: int, dtype: torch.dtype) -> TopKLogProbs:
        """The rollout policy's Top-K with both policies' log-probs."""
        log_probs, rollout_log_probs = self.log_probs(dtype)
        ids = self._topk_ids(top_k)
        return TopKLogProbs(ids, rollout_log_probs.gather(1, ids), log_probs.gather(1, ids))

    def tails(self, top_k: int, sampled_token: str) -> tuple[Tensor, Tensor]:
        """The exact mass outside the outcomes of a Top-K partition, [N] of both policies."""
        ids = self._topk_ids(top_k)
        is_among = (ids == self.targets[:, None]).any(1)
        if sampled_token == "replace":
            ids[:, -1] = torch.where(is_among, ids[:, -1], self.targets)
        outcomes = torch.cat([ids, self.targets[:, None]], dim=1)
        policy, rollout = self.log_probs(torch.float64)
        return tuple(x.exp().scatter(1, outcomes, 0.0).sum(1) for x in (policy, rollout))  # type: ignore[return-value]

    def binary_tails(self) -> tuple[Tensor, Tensor]:
        """The exact mass of all but the sampled token, [N] of both policies."""
        policy, rollout = (-torch.expm1(self.sampled(x)) for x in self.log_probs(torch.float64))
        return policy, rollout

    def full(self) -> tuple[Tensor, Tensor]:
        """TV and KL of the whole vocabulary in float64, [N] each."""
        policy, rollout = self.log_probs(torch.float64)
        masses = rollout.exp()
        return (policy.exp() - masses).abs().sum(1) / 2, (masses * (rollout - policy)).sum(1)

    def _topk_ids(self, top_k: int) -> Tensor:
        rollout = self.rollout_logits.float().log_softmax(1)
        return rollout.topk(min(top_k, rollout.shape[1]), dim=1).indices


def assert_ordered_tvs(p: PeakedPolicies, binary: Tensor, replace: Tensor, union: Tensor) -> None:
    """Asserts binary <= Top-K (replace) <= Top-K (union) <= full vocabulary of float32 TVs [N].

    Each may be wrong by ROUNDOFF: resolving moves the difference of two tails by no more, of which half counts,
    and the other half is more than log-softmax puts in. Of a step between two, both may be.
    """
    steps = (binary.double(), replace.double(), union.double(), p.full()[0])
    for coarse, fine in pairwise(steps):
        assert (coarse <= fine + 2 * ROUNDOFF).all()


def noise_of_kls(p: PeakedPolicies, top_k: int) -> Tensor:
    """How wrong a KL may be, [N]: its tail's q log(q / p) by q log(1 + noise / p), in any of the partitions."""
    tails = [p.binary_tails(), *(p.tails(top_k, sampled_token) for sampled_token in SAMPLED_TOKENS)]
    return torch.stack([q * torch.log1p(TAIL_NOISE / t.clamp(min=ROUNDOFF)) for t, q in tails]).amax(0)


def assert_ordered_kls(p: PeakedPolicies, top_k: int, binary: Tensor, replace: Tensor, union: Tensor) -> None:
    """Asserts binary <= Top-K (replace) <= Top-K (union) <= full vocabulary of float32 KLs [N].

    The first step is exact. A tail whose p counts as roundoff makes the KL too small, at most by
    q log(1 + ROUNDOFF / p) against the partition that has it in one outcome with the token that "replace" took
    out. See `noise_of_kls` for a tail that float32 knows. The noise of q, times log(q / p) of at most
    log(1 / ROUNDOFF), and the other outcomes' roundoff make the rest.

    A +inf means that the KL surely exceeds SURELY_EXCEEDED. It needs SURELY_POSITIVE_TAIL of mu outside the
    sampled token.
    """
    binary, replace, union = (x.double() for x in (binary, replace, union))
    full = p.full()[1]
    assert ((binary <= replace) & (binary <= union)).all()
    rest = TAIL_NOISE * (1 - math.log(ROUNDOFF)) * (1 + full)
    tail, rollout_tail = p.tails(top_k, "replace")
    floored = rollout_tail * torch.log1p((ROUNDOFF + TAIL_NOISE) / tail.clamp(min=ROUNDOFF))
    noisy = noise_of_kls(p, top_k)
    for coarse, fine, tolerance in ((replace, union, floored + rest), (union, full, noisy + rest)):
        is_infinite = coarse.isinf()
        assert (coarse <= fine + tolerance)[~is_infinite].all()
        assert (fine > SURELY_EXCEEDED)[is_infinite].all()
    is_finite_at_least = p.binary_tails()[1] < SURELY_POSITIVE_TAIL * (1 - 1e-4)
    for kl in (binary, replace, union):
        assert kl[is_finite_at_least].isfinite().all()
        assert not (kl.isnan() | (kl < 0)).any()
