"""A token exactly on a threshold is kept, and one a rounding beyond it is not: Eqs. 9 and 12 say > and <."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_dppo.algorithms import Objective, PolicyLossInputs, policy_loss, preset
from megatron_dppo.kernels.library import KernelLibrary
from megatron_dppo.kernels.reference import ROWS
from tests.support.kernel_host import Tokens, combined

Masked = tuple[Tensor, Tensor, Tensor]
"""Ratio, divergence and mask of each token."""
Implementation = Callable[[Objective, Tensor, Tensor, float], Masked]


def by_pytorch(objective: Objective, log_probs: Tensor, rollout: Tensor, advantage: float) -> Masked:
    out = policy_loss(objective, PolicyLossInputs(log_probs, rollout, torch.full_like(rollout, advantage)))
    return out.ratio, out.divergence, out.mask


def by_kernels(library: KernelLibrary) -> Implementation:
    """The kernels' source, built for the host, on two-token vocabularies of which a statistic knows all."""

    def masked(objective: Objective, log_probs: Tensor, rollout: Tensor, advantage: float) -> Masked:
        pi, one, zero = log_probs.float(), torch.ones(len(rollout)), torch.zeros(len(rollout))
        tokens = Tokens.of(rollout.float(), advantages=one * advantage)
        statistics = torch.stack([zero, one, zero, pi / math.log(2)], dim=1)[None]
        planes, _ = combined(library, tokens, statistics, objective)
        return tuple(planes[ROWS.index(name)] for name in ("ratio", "divergence", "weight"))  # type: ignore[return-value]

    return masked


@pytest.fixture(params=["float64", "float32", "kernels"])
def implementation(request: pytest.FixtureRequest) -> tuple[Implementation, torch.dtype]:
    """What masks tokens, and in which precision."""
    if request.param == "kernels":
        return by_kernels(request.getfixturevalue("host_library")), torch.float32
    return by_pytorch, getattr(torch, request.param)


@pytest.mark.parametrize(
    ("name", "threshold", "advantage"),
    [
        ("grpo", "eps_low", -1.0),
        ("grpo", "eps_high", 1.0),
        ("dppo_binary_tv", "delta_low", -1.0),
        ("dppo_binary_tv", "delta_high", 1.0),
        ("dppo_binary_kl", "delta_low", -1.0),
        ("dppo_binary_kl", "delta_high", 1.0),
    ],
)
def test_on_the_threshold_a_token_is_kept(
    implementation: tuple[Implementation, torch.dtype], name: str, threshold: str, advantage: float
) -> None:
    masked, dtype = implementation
    generator = torch.Generator().manual_seed(1)
    rollout = (0.2 + 0.2 * torch.rand(12, generator=generator, dtype=torch.float64)).log().to(dtype)
    log_probs = rollout + advantage * (0.1 + 0.3 * torch.rand(12, generator=generator, dtype=dtype))
    ratios, divergences, _ = masked(preset(name), log_probs, rollout, advantage)
    for at in range(12):
        exact = float(divergences[at]) if "delta" in threshold else abs(float(ratios[at]) - 1)
        within = exact - torch.finfo(dtype).eps
        own = log_probs[at : at + 1], rollout[at : at + 1], advantage
        masks = [bool(masked(preset(name, **{threshold: value}), *own)[2]) for value in (exact, within)]
        assert masks == [True, False], (at, exact)
