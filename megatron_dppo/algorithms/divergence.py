"""Divergences between the policy and its anchor, over a partition of the vocabulary.

A divergence takes log-masses of the policy and the anchor (both <= 0) and returns one number per token.
Binary ones see {sampled token, everything else} and take [T]; Top-K ones see mu's K most probable tokens, the
sampled token and everything else, and take [T, outcomes] from `topk_partition`. Coarser partitions give smaller
numbers: binary <= Top-K <= full vocabulary (App. C of arXiv 2602.04879, the paper cited in this package).

The mass of everything else, a tail, is known only to within roundoff; see `_resolved_tails`. In floating
point, binary <= Top-K is exact for KL. The other inequalities hold to within the roundoff of two tails: for TV
2 ROUNDOFF_EPSILONS machine epsilons, for KL q log(1 + roundoff / p) with mu's tail q and pi's tail p.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, TypeVar

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from megatron_dppo.errors import ConfigError, Problem

SampledToken = Literal["union", "replace"]


# A tail of at most this many machine epsilons is indistinguishable from zero: 1 - sum(p) over up to 64 columns
# has an error of 4 epsilons after log_softmax, and of 18 if a log-sum-exp near 30 was subtracted.
ROUNDOFF_EPSILONS = 32


# If the rollout's tail is at least this large and the policy's is 0, the KL exceeds .05 despite any roundoff.
SURELY_POSITIVE_TAIL = 0.01


@dataclass(frozen=True, eq=False)
class TopKLogProbs:
    """The rollout policy's K' most probable tokens at each position, and both policies' log-probs of them."""

    ids: Integer[Tensor, "T K"]  # columns by rollout probability, highest first; -1 pads
    rollout_log_probs: Float[Tensor, "T K"]  # log mu, as the rollout engine sent it
    log_probs: Float[Tensor, "T K"]  # log pi of the same ids; never differentiated


@dataclass(frozen=True)
class Divergence:
    """A registered divergence, and the partition it is defined on."""

    function: Callable[[Tensor, Tensor], Float[Tensor, " T"]]  # of log_probs, anchor_log_probs
    id: int  # its number in DppoDivergence of kernels/csrc/capi.h, or one that neither that nor another has
    over: Literal["sampled", "topk"]
    needs_other: bool = False  # undefined if the outcomes do not sum to 1
    at_most: float = math.inf  # upper bound of the divergence


class Identified(Protocol):
    """An entry of a registry, with an explicit id."""

    @property
    def id(self) -> int:
        """The number, which no other entry of the registry has."""
        ...


Entry = TypeVar("Entry", bound=Identified)


def registry(name: str, entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """Return the entries, read-only, after a check that each id is unique. Their order does not matter.

    Args:
        name: Name of the registry in messages.
        entries: Entry per name that an objective can use.
    """
    holders: defaultdict[int, list[str]] = defaultdict(list)
    for entry_name, entry in entries.items():
        holders[entry.id].append(entry_name)
    action = f"Give one of them another: {max(holders, default=-1) + 1} is free."
    problems = [
        Problem(name, f"id {id} of {' and '.join(names)}", "a unique id for each", action)
        for id, names in holders.items()
        if len(names) > 1
    ]
    if problems:
        raise ConfigError(problems)
    return MappingProxyType(dict(entries))


def log1mexp(log_probs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """log(1 - p) from log p <= 0, accurate at both ends: -inf at p = 1, 0 at p = 0."""
    near_one = torch.log(-torch.expm1(log_probs))
    near_zero = torch.log1p(-torch.exp(log_probs))
    return torch.where(log_probs > -math.log(2.0), near_one, near_zero)


def binary_tv(log_probs: Float[Tensor, " T"], anchor_log_probs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """|mu(a) - pi(a)| (Eq. 13): total variation of {a, not a}."""
    return (log_probs.exp() - anchor_log_probs.exp()).abs()


def binary_kl(log_probs: Float[Tensor, " T"], anchor_log_probs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """KL(mu || pi) of {a, not a} (Eq. 14), in log space.

    The tails 1 - pi and 1 - mu go through `_resolved_tails`. If log pi rounds to 0, float32 cannot resolve
    1 - pi. The KL is then a lower bound, or +inf if 1 - mu is certainly positive.
    """
    sampled = _kl_term(log_probs, anchor_log_probs)
    other = _kl_term(*_resolved_tails(log1mexp(log_probs), log1mexp(anchor_log_probs)))
    return (sampled + other).clamp(min=0)


def topk_tv(
    log_masses: Float[Tensor, "T outcomes"], anchor_log_masses: Float[Tensor, "T outcomes"]
) -> Float[Tensor, " T"]:
    """Half the sum of |mu - pi| over the outcomes (Eq. 15).

    It can be below the binary TV by at most half of the change that `_resolved_tails` makes to the tails.
    """
    return (log_masses.exp() - anchor_log_masses.exp()).abs().sum(1) / 2


def topk_kl(
    log_masses: Float[Tensor, "T outcomes"], anchor_log_masses: Float[Tensor, "T outcomes"]
) -> Float[Tensor, " T"]:
    """KL(mu || pi) over the outcomes (Eq. 16); they must include 'other'.

    The result is at least the binary KL of the last outcome but one, which is the sampled token in a Top-K
    partition. Both are lower bounds of the full vocabulary's KL, and so is the larger of the two. The sum over
    the outcomes can be below the binary KL: if pi's mass of 'other' is below roundoff, roundoff is used in its
    place, which is larger, although the sampled token's own tail is known.
    """
    kl = _kl_term(log_masses, anchor_log_masses).sum(1).clamp(min=0)
    return torch.maximum(kl, binary_kl(log_masses[:, -2], anchor_log_masses[:, -2]))


def _kl_term(log_masses: Tensor, anchor_log_masses: Tensor) -> Tensor:
    """Return each outcome's q log(q / p): 0 if q = 0, +inf if only p = 0."""
    anchor_masses = anchor_log_masses.exp()
    return torch.where(anchor_masses > 0, anchor_masses * (anchor_log_masses - log_masses), 0.0)


DIVERGENCES: Mapping[str, Divergence] = registry(
    "DIVERGENCES",
    {
        "binary_tv": Divergence(binary_tv, id=0, over="sampled", at_most=1.0),
        "binary_kl": Divergence(binary_kl, id=1, over="sampled"),
        "topk_tv": Divergence(topk_tv, id=2, over="topk", at_most=1.0),
        "topk_kl": Divergence(topk_kl, id=3, over="topk", needs_other=True),
    },
)


def topk_partition(
    topk: TopKLogProbs,
    targets: Integer[Tensor, " T"],
    log_probs: Float[Tensor, " T"],
    rollout_log_probs: Float[Tensor, " T"],
    *,
    top_k: int,
    sampled_token: SampledToken = "union",
    include_other: bool = True,
) -> tuple[Float[Tensor, "T outcomes"], Float[Tensor, "T outcomes"]]:
    """Return log-masses (policy, rollout) of the Top-K outcomes; -inf for absent outcomes.

    The outcomes are A' = the first `top_k` ids of mu and the sampled token (section 4.4). The sampled token's
    mass always comes from `log_probs` and `rollout_log_probs`. If it is not among these ids, "union" adds it
    (up to K+1 outcomes), and "replace" puts it in place of the last id (the authors' code: always K).
    `include_other` adds the rest of the vocabulary as one more outcome, as in the partition of App. C and the
    sum of Eq. 16. Eq. 15 as printed leaves it out. The sampled token has the last column, or the last before
    'other'.

    Args:
        topk: Columns of mu; all are used if there are fewer than `top_k`.
        targets: [T] sampled token ids, none negative.
        log_probs: [T] log pi of the sampled tokens.
        rollout_log_probs: [T] log mu of the sampled tokens.
        top_k: K.
        sampled_token: How the sampled token joins the K.
        include_other: Whether the outcomes cover the vocabulary.
    """
    ids = topk.ids[:, :top_k]
    is_valid = ids >= 0
    is_sampled = ids == targets[:, None]
    is_outcome = is_valid & ~is_sampled
    if sampled_token == "replace":
        num_valid_from_here = is_valid.flip(1).cumsum(1).flip(1)
        is_last = is_valid & (num_valid_from_here == 1)
        is_outcome = is_outcome & (is_sampled.any(1, keepdim=True) | ~is_last)

    def outcomes(columns: Tensor, sampled: Tensor) -> Tensor:
        return torch.cat([torch.where(is_outcome, columns[:, :top_k], -math.inf), sampled[:, None]], dim=1)

    policy = outcomes(topk.log_probs, log_probs)
    rollout = outcomes(topk.rollout_log_probs, rollout_log_probs)
    if not include_other:
        return policy, rollout
    other, rollout_other = _resolved_tails(_log_tail(policy), _log_tail(rollout))
    return torch.cat([policy, other[:, None]], dim=1), torch.cat([rollout, rollout_other[:, None]], dim=1)


def _log_tail(log_masses: Tensor) -> Tensor:
    """Log(1 - sum of masses), [T, outcomes] -> [T]; the largest through expm1, so that 1 - 1e-9 leaves 1e-9."""
    largest, column = log_masses.max(dim=1, keepdim=True)
    others = log_masses.exp().scatter(1, column, 0.0).sum(1)
    return (-torch.expm1(largest[:, 0]) - others).clamp(min=0).log()


def _resolved_tails(log_tail: Tensor, rollout_log_tail: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logs of both tails without the noise of 1 - sum, such as 1e-7 against 0: a false KL of +inf.

    The true value of a tail below roundoff is unknown. If both tails are below roundoff, both count as 0: the
    outcomes cover the vocabulary. If only the policy's is, it counts as roundoff, and the KL is a lower bound.
    But if the rollout's tail is certainly positive, the policy's counts as 0, and the KL is +inf. This does not
    concern a token of probability 0: its log-prob is -inf.
    """
    log_roundoff = math.log(ROUNDOFF_EPSILONS * torch.finfo(log_tail.dtype).eps)
    is_unresolved = log_tail <= log_roundoff
    is_covered = is_unresolved & (rollout_log_tail <= log_roundoff)
    is_zero = is_covered | (is_unresolved & (rollout_log_tail >= math.log(SURELY_POSITIVE_TAIL)))
    log_tail = torch.where(is_zero, -math.inf, log_tail.clamp(min=log_roundoff))
    return log_tail, torch.where(is_covered, -math.inf, rollout_log_tail)
