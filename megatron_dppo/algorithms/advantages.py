"""Advantages within groups of responses to one prompt."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from megatron_dppo.errors import ConfigError, Problem, RewardError

STD_FLOOR = 1e-6  # added to a group's standard deviation, as verl does
TOLERANCE = 2.0**-21  # of rewards that are one sum in another order: four units in float32's last place
SUM_TO_ZERO = 1e-14  # the same, if terms of a size around 1 cancel, in float64
LARGEST_REWARD = 1e18  # its square is finite in float32


def have_equal_rewards(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of one group are equal up to rounding, so that none of its tokens learns.

    This is so if and only if `group_advantages` gives each of them 0. One reward, or none, counts as equal.

    Args:
        rewards: Rewards of one group.

    Raises:
        RewardError: A reward that `group_advantages` refuses.
    """
    values = torch.tensor(rewards, dtype=torch.float64)
    return not bool(group_advantages(values, torch.zeros(len(values), dtype=torch.long)).any())


def group_advantages(
    rewards: Tensor, group_ids: Tensor | Sequence[Hashable], normalize_std: bool = False
) -> Tensor:
    """Return the advantages A = R - mean of the group, [N] -> [N]; float64 for float64 rewards, else float32.

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
    # A group's number is the position of its first id among all sorted ids; other positions are empty groups.
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
