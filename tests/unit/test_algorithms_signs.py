"""Each sign of the advantage has its own thresholds: presets with unequal numbers on both sides."""

import math

import pytest
import torch
from torch import Tensor

from megatron_dppo.algorithms import PRESETS
from tests.unit.test_algorithms_properties import RESPONSE_LENGTHS, Policies


def _pairs(name: str) -> list[str]:
    """The fields of a preset that have a number for each sign of the advantage."""
    known = PRESETS[name].numbers if name != "minpro" else {}  # its clip is one range for both signs
    return [low for low in known if low.endswith("_low") and high_of(low) in known and not known[low].around_1]


def high_of(low: str) -> str:
    return f"{low.removesuffix('_low')}_high"


@pytest.mark.parametrize(("name", "low"), [(name, low) for name in PRESETS for low in _pairs(name)])
def test_each_sign_of_the_advantage_reads_its_own_number(name: str, low: str):
    """`_low` with A < 0 and `_high` with A > 0; with equal numbers on both sides a mistake would not show."""
    policies, usual = Policies(3, 40, 2.0, 1.0), getattr(PRESETS[name], low)
    signs = torch.tensor([1.0, -1.0]).repeat(len(RESPONSE_LENGTHS))[: len(RESPONSE_LENGTHS)]
    policies.advantages = signs.repeat_interleave(RESPONSE_LENGTHS).double()  # a response has one sign
    negative = policies.advantages < 0
    bands = {"rho_low": 0.0, "rho_high": math.inf}
    without_band = {field: value for field, value in bands.items() if field in PRESETS[name].numbers}

    def weight(of_low: float, of_high: float) -> Tensor:
        return policies.run(name, **{low: of_low, high_of(low): of_high}, **without_band).weight

    for small, large in ((usual / 10, usual), (usual, 10 * usual), (0.01, 0.5), (0.1, 0.9)):
        both_small, both_large = weight(small, small), weight(large, large)
        differs = both_small != both_large
        if differs[negative].any() and differs[~negative].any():
            assert torch.equal(weight(small, large), torch.where(negative, both_small, both_large))
            assert torch.equal(weight(large, small), torch.where(negative, both_large, both_small))
            return
    raise AssertionError("no numbers make a difference")
