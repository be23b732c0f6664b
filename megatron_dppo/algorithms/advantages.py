"""Advantages within groups of responses to one prompt."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from megatron_dppo.errors import ConfigError, Problem, RewardError

STD_FLOOR = 1e-6  # added to a group's standard deviation, as verl does


def group_advantages(
    rewards: Tensor, group_ids: Tensor | Sequence[Hashable], normalize_std: bool = False
) -> Tensor:
    """A = R - mean of its group, [N] -> [N]; float64 in, float64 out, and float32 otherwise.

    A group whose rewards are all equal, or of one, gets exactly 0. The paper does not divide by the standard
    deviation; `normalize_std` does, by the unbiased one (n - 1) plus 1e-6.

    Args:
        rewards: [N], of any numeric type.
        group_ids: [N] integers, or any hashable values: equal ids form a group, in any order.
        normalize_std: Whether to divide.

    Raises:
        ConfigError: `rewards` is not one-dimensional, or not one id was given for each.
        RewardError: A reward is no finite number.
    """
    ids = group_ids if isinstance(group_ids, Tensor) else _numbered(group_ids)
    if rewards.dim() != 1 or ids.shape != rewards.shape:
        found = f"{list(rewards.shape)} rewards and {list(ids.shape)} ids"
        raise ConfigError(Problem("group_advantages", found, "[N] of both", "Pass one group id per reward."))
    if not bool(rewards.isfinite().all()):
        first = int((~rewards.isfinite()).nonzero()[0, 0])
        found = rewards[first].item()
        raise RewardError(f"reward {first}: found {found}; expected a finite number. Drop that sample.")
    exact = rewards.double()
    # A group goes by the place of its first id among all ids sorted; places in between are groups of nobody.
    ids = ids.to(rewards.device)
    groups = torch.searchsorted(ids.sort().values, ids)

    def group_sums(values: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add(0, groups, values)

    # From the group's smallest reward upwards, equal rewards are exact zeros and so are their advantages.
    smallest = torch.zeros_like(exact).scatter_reduce(0, groups, exact, "amin", include_self=False)
    above_smallest = exact - smallest[groups]
    sizes = group_sums(torch.ones_like(exact))
    advantages = above_smallest - (group_sums(above_smallest) / sizes)[groups]
    if normalize_std:
        std = (group_sums(advantages.square()) / (sizes - 1).clamp(min=1)).sqrt()
        advantages = advantages / (std[groups] + STD_FLOOR)
    return advantages.to(rewards.dtype if rewards.dtype == torch.float64 else torch.float32)


def _numbered(group_ids: Sequence[Hashable]) -> Tensor:
    """Number arbitrary ids as 0, 1, 2, ..."""
    numbers = {group_id: number for number, group_id in enumerate(dict.fromkeys(group_ids))}
    return torch.tensor([numbers[group_id] for group_id in group_ids], dtype=torch.long)
