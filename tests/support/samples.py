"""Hand-made samples for tests of packing, batches and routes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards import Reward, RewardFault, RewardRequest, RewardResult, call_reward
from megatron_dppo.types import (
    ModelRouting,
    Prompt,
    RolloutTopK,
    RoutedExperts,
    Sample,
    SampleGroup,
    WeightVersionSpan,
)

ROUTING = ModelRouting(layer_numbers=(0, 2), num_experts=8, top_k=2)


def make_sample(
    tokens: list[int],
    prompt_length: int,
    *,
    mask: list[bool] | None = None,
    reward: float = 0.0,
    group: str = "g",
) -> Sample:
    """A sample whose every per-token value tells its place: token j has log-prob -j, routes and top-K of j."""
    num_response, num_rows = len(tokens) - prompt_length, len(tokens) - 1
    places = torch.arange(num_response)
    first = torch.arange(num_rows) % 7
    routes = torch.stack([first, first + 1], dim=-1)[:, None].expand(-1, 2, -1).to(torch.uint8)
    return Sample(
        id=f"{group}/{tokens}",
        group_id=group,
        tokens=torch.tensor(tokens),
        prompt_length=prompt_length,
        loss_mask=torch.tensor(mask if mask is not None else [True] * num_response),
        rollout_log_probs=-places.float() - 1,
        finish_reason="stop",
        topk=RolloutTopK(
            places[:, None].int() + torch.tensor([0, 50]).int(), -places[:, None].float().expand(-1, 2)
        ),
        routed_experts=RoutedExperts(routes, ROUTING.layer_numbers, ROUTING.num_experts),
        weight_versions=(WeightVersionSpan(0, 1, 6), WeightVersionSpan(1, num_response, 7)),
        reward=reward,
        advantage=reward - 0.5,
    )


def make_group(index: int, samples: list[Sample]) -> SampleGroup:
    """Group the samples as the responses to prompt number `index`."""
    return SampleGroup(Prompt(str(index), "", "test", text="?"), tuple(samples), index)


def assert_same(a: Any, b: Any) -> None:
    """Equal bit for bit, NaN included, in tensors, dataclasses, sequences and mappings."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()
    elif hasattr(a, "__dataclass_fields__"):
        for field in fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, dict):
        assert_same(list(a.items()), list(b.items()))
    else:
        assert a == b or (math.isnan(a) and math.isnan(b))


@dataclass(frozen=True)
class InProcessScorer:
    """Replaces a `RewardPool` by a function of the test; the pool has separate tests."""

    reward: Reward

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
        return [self._scored(request) for request in requests]

    async def score_one(self, request: RewardRequest) -> RewardResult | RewardFault:
        return self._scored(request)

    async def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
        return [await self.score_one(request) for request in requests]

    def _scored(self, request: RewardRequest) -> RewardResult | RewardFault:
        try:
            return call_reward(self.reward, request)
        except RewardError as error:
            return RewardFault("reward_failed", str(error))
