"""Advantages within groups of responses to one prompt, and the weight of each token's loss in a mini-batch."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType

import torch
from jaxtyping import Float, Float64, Integer, Num
from torch import Tensor

from megatron_dppo.errors import ConfigError, Problem, RewardError, did_you_mean

STD_FLOOR = 1e-6  # added to a group's standard deviation, as verl does
TOLERANCE = 2.0**-21  # of rewards that are one sum in another order: four units in float32's last place
SUM_TO_ZERO = 1e-14  # the same, if terms of a size around 1 cancel, in float64
LARGEST_REWARD = 1e18  # its square is finite in float32


def have_equal_rewards(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of one group are equal up to rounding, so that no token learns.

    This is so if and only if `group_advantages` gives each of them 0. One reward, or none, counts as equal.

    Args:
        rewards: Rewards of one group.

    Raises:
        RewardError: A reward that `group_advantages` refuses.
    """
    values = torch.tensor(rewards, dtype=torch.float64)
    return not bool(group_advantages(values, torch.zeros(len(values), dtype=torch.long)).any())


def group_advantages(
    rewards: Num[Tensor, " N"],
    group_ids: Integer[Tensor, " N"] | Sequence[Hashable],
    normalize_std: bool = False,
) -> Float[Tensor, " N"]:
    """Return the advantages A = R - mean of the group; float64 for float64 rewards, else float32.

    A group gets exactly 0 if it has one reward, or only equal rewards. The paper does not divide by the
    standard deviation; `normalize_std` does, by the unbiased one (n - 1) plus 1e-6.

    Rewards that differ only by rounding (0.1 + 0.2 and 0.3) are equal: their spread is at most `TOLERANCE`
    times the largest |R| of the group, or at most `SUM_TO_ZERO`. A reward also gets exactly 0 if it differs
    from the mean by at most `TOLERANCE` times the spread: rounding must not decide the sign of an advantage.

    Args:
        rewards: [N], of any numeric type.
        group_ids: [N] integers, or any hashable values: equal ids form a group, in any order.
        normalize_std: Whether to divide by the standard deviation.

    Raises:
        ConfigError: `rewards` is not one-dimensional, or not one id was given for each.
        RewardError: A reward is not a finite number, or larger than 1e18.
    """
    ids = group_ids if isinstance(group_ids, Tensor) else _numbered(group_ids)
    if rewards.dim() != 1 or ids.shape != rewards.shape:
        found = f"{list(rewards.shape)} rewards and {list(ids.shape)} ids"
        raise ConfigError(Problem("group_advantages", found, "[N] of both", "Pass one group id per reward."))
    exact = rewards.double()
    if not bool((is_usable := exact.abs() <= LARGEST_REWARD).all()):
        first = int((~is_usable).nonzero()[0, 0])
        expected = f"expected a finite number of at most {LARGEST_REWARD:g} in magnitude. Drop that sample"
        raise RewardError(f"reward {first}: found {rewards[first].item()}; {expected}.")
    # A group's number is its first id's position among all sorted ids; other positions are empty groups.
    ids = ids.to(rewards.device)
    groups = torch.searchsorted(ids.sort().values, ids)

    def group_sums(values: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add(0, groups, values)

    def group_maxima(values: Tensor) -> Tensor:
        return torch.zeros_like(values).scatter_reduce(0, groups, values, "amax", include_self=False)[groups]

    # From the group's smallest reward upwards, equal rewards are exact zeros and so are their advantages.
    above_smallest = exact + group_maxima(-exact)
    spread = group_maxima(above_smallest)
    sizes = group_sums(torch.ones_like(exact))
    advantages = above_smallest - (group_sums(above_smallest) / sizes)[groups]
    is_rounding = spread <= (TOLERANCE * group_maxima(exact.abs())).clamp(min=SUM_TO_ZERO)
    advantages = advantages.masked_fill(is_rounding | (advantages.abs() <= TOLERANCE * spread), 0.0)
    if normalize_std:
        std = (group_sums(advantages.square()) / (sizes - 1).clamp(min=1)).sqrt()
        advantages = advantages / (std[groups] + STD_FLOOR)
    return advantages.to(rewards.dtype if rewards.dtype == torch.float64 else torch.float32)


def _numbered(group_ids: Sequence[Hashable]) -> Tensor:
    """Number arbitrary ids as 0, 1, 2, ..."""
    numbers = {group_id: number for number, group_id in enumerate(dict.fromkeys(group_ids))}
    return torch.tensor([numbers[group_id] for group_id in group_ids], dtype=torch.long)


def token_weights(
    mode: str, lengths: Integer[Tensor, " B"] | Sequence[int], response_length: int | None = None
) -> Float64[Tensor, " T"]:
    """Return token weights w, T = sum(lengths): (w * per_token_loss).sum() is the mini-batch's loss.

    The paper does not state its aggregation; Eq. 11 sums tokens, as `seq_mean_token_sum`. Its authors' script
    runs and recommends `seq_mean_token_sum_norm`, and so do our examples of the paper's experiments.
    `token_mean` is our default, because it needs no response length. Means over sequences count only sequences
    with a learning token. Call this on the complete mini-batch, before it is split over ranks or micro-batches.
    If the loss is divided by the global token count later, multiply the weights by that count first
    (`token_mean` is then 1 for each token).

    Args:
        mode: A name in AGGREGATIONS.
        lengths: [B] learning tokens of each sequence; 0 is allowed.
        response_length: The constant that seq_mean_token_sum_norm divides by; the other modes ignore it.

    Raises:
        ConfigError: The mode is unknown, a length is negative, or response_length is missing.
    """
    counts = _counts(lengths)
    return sequence_weights(mode, counts, response_length).repeat_interleave(counts)


def sequence_weights(
    mode: str, lengths: Integer[Tensor, " B"] | Sequence[int], response_length: int | None = None
) -> Float64[Tensor, " B"]:
    """Return the weight that all tokens of each sequence share; see `token_weights`.

    The weight of a sequence without a learning token is not finite and must not be used.
    """
    if mode not in AGGREGATIONS:
        action = did_you_mean(mode, AGGREGATIONS, "Choose one of these.")
        options = "one of " + ", ".join(AGGREGATIONS)
        raise ConfigError(Problem("algorithm.aggregation", repr(mode), options, action))
    counts = _counts(lengths)
    if counts.dim() != 1 or counts.is_floating_point() or bool((counts < 0).any()):
        action = "Count each sequence's learning tokens."
        raise ConfigError(Problem("lengths", str(lengths), "[B] integers >= 0", action))
    if mode == "seq_mean_token_sum_norm" and (response_length is None or response_length <= 0):
        action = "Pass rollout.max_response_tokens."
        raise ConfigError(Problem("response_length", repr(response_length), f"> 0 for {mode}", action))
    return AGGREGATIONS[mode](counts.double(), (counts > 0).sum(), response_length or 0)


def _token_mean(lengths: Tensor, num_sequences: Tensor, response_length: int) -> Tensor:
    return torch.ones_like(lengths) / lengths.sum()


def _seq_mean_token_sum(lengths: Tensor, num_sequences: Tensor, response_length: int) -> Tensor:
    return torch.ones_like(lengths) / num_sequences


def _seq_mean_token_mean(lengths: Tensor, num_sequences: Tensor, response_length: int) -> Tensor:
    return 1 / (lengths * num_sequences)


def _seq_mean_token_sum_norm(lengths: Tensor, num_sequences: Tensor, response_length: int) -> Tensor:
    return torch.ones_like(lengths) / (num_sequences * response_length)


AGGREGATIONS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = MappingProxyType(
    {
        "token_mean": _token_mean,
        "seq_mean_token_sum": _seq_mean_token_sum,
        "seq_mean_token_mean": _seq_mean_token_mean,
        "seq_mean_token_sum_norm": _seq_mean_token_sum_norm,
    }
)


def _counts(lengths: Tensor | Sequence[int]) -> Tensor:
    return lengths if isinstance(lengths, Tensor) else torch.tensor(lengths or (), dtype=torch.long)
