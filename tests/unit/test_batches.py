"""Gradient steps: weights and counts over all ranks, and mini-batches that no rank count changes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from samples import ROUTING, make_group, make_sample

from megatron_dppo.algorithms import AGGREGATIONS, token_weights
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches import (
    BatchShape,
    gradient_steps,
    minibatch_of_prompts,
    train_batches,
    with_advantages,
)
from megatron_dppo.types import Sample, TrainBatch


def on_ranks(world_size: int, work: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """Run `work(rank, all_gather)` on threads that stand for ranks."""
    barrier, slots = Barrier(world_size), [None] * world_size

    def run(rank: int) -> Any:
        def all_gather(value: Any) -> list[Any]:
            slots[rank] = value
            barrier.wait()
            gathered = list(slots)
            barrier.wait()
            return gathered

        return work(rank, all_gather)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


SAMPLES = [
    make_sample(list(range(3 + n)), 2, mask=[(i + n) % 3 != 0 for i in range(1 + n)], reward=float(n % 2))
    for n in range(7)
]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_weighted_losses_over_the_token_count_are_the_aggregated_loss(mode: str, world_size: int) -> None:
    shape = BatchShape(mode, response_length=16, max_tokens=20)
    ranks: list[list[TrainBatch]] = on_ranks(
        world_size, lambda rank, gather: train_batches([SAMPLES[rank::world_size]], shape, rank, gather)
    )
    loss_of = {float(t): 0.3 * i + 1 for i, t in enumerate(-torch.arange(1.0, 9.0))}  # by rollout log-prob
    total = 0.0
    for (batch,) in ranks:
        for m in batch.microbatches:
            losses = torch.tensor([loss_of.get(float(x), 0.0) for x in m.rollout_log_probs])
            total += float((m.token_weights * losses)[m.loss_mask].sum())
    lengths = [int(s.loss_mask.sum()) for s in SAMPLES]
    per_token = torch.tensor([loss_of[float(x)] for s in SAMPLES for x in s.rollout_log_probs[s.loss_mask]])
    expected = float((token_weights(mode, lengths, 16) * per_token).sum())
    assert ranks[0][0].num_loss_tokens == sum(lengths)
    assert ranks[0][0].num_samples == len(SAMPLES)
    assert total / sum(lengths) == pytest.approx(expected, rel=1e-6)


def test_token_mean_weighs_every_token_one() -> None:
    (batch,) = train_batches([SAMPLES], BatchShape("token_mean", 16, 100), 0, lambda value: [value])
    for m in batch.microbatches:
        assert torch.allclose(m.token_weights[m.loss_mask], torch.ones(m.num_loss_tokens))


def test_ranks_keep_in_step_with_placeholders() -> None:
    shape = BatchShape("token_mean", 16, max_tokens=9, topk_columns=2, routing=ROUTING)
    shares: list[list[Sample]] = [SAMPLES, [], SAMPLES[:1]]
    ranks = on_ranks(3, lambda rank, gather: train_batches([shares[rank]], shape, rank, gather))
    counts = {len(batch.microbatches) for (batch,) in ranks}
    assert len(counts) == 1 and counts.pop() > 1
    assert sum(m.num_loss_tokens for m in ranks[1][0].microbatches) == 0


def test_minibatches_depend_on_the_key_alone_and_split_evenly() -> None:
    first = minibatch_of_prompts(12, 4, (0, 5, 0))
    assert first == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    later = minibatch_of_prompts(12, 4, (0, 5, 1))
    assert sorted(later) == first
    assert later == minibatch_of_prompts(12, 4, (0, 5, 1))
    assert (
        len({tuple(minibatch_of_prompts(12, 4, key)) for key in [(0, 5, 1), (1, 5, 1), (0, 6, 1), (0, 5, 2)]})
        == 4
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_prompt_trains_in_the_same_step_on_any_number_of_ranks(world_size: int) -> None:
    config = Config.model_validate(
        {
            "rollout": {"prompts_per_rollout": 8},
            "algorithm": {"minibatches_per_rollout": 2, "epochs_per_rollout": 2},
        }
    )
    groups = with_advantages(
        [make_group(i, [make_sample([1, 2, 30 + i], 2, reward=r) for r in (0.0, 1.0)]) for i in range(8)], False
    )
    ranks = on_ranks(
        world_size,
        lambda rank, gather: gradient_steps(
            groups[rank::world_size], 3, config, routing=None, rank=rank, all_gather=gather
        ),
    )
    steps = []
    for step in zip(*ranks, strict=True):
        last = [m.tokens[m.cu_seqlens[1:].long() - 1].tolist() for batch in step for m in batch.microbatches]
        steps.append(sorted({token for tokens in last for token in tokens if token >= 30}))
    assert len(steps) == 4
    assert steps[0] == [30, 31, 32, 33] and steps[1] == [34, 35, 36, 37]
    later = minibatch_of_prompts(8, 2, (0, 3, 1))
    assert steps[2] == [30 + i for i in range(8) if later[i] == 0]


def test_a_minibatch_without_learning_tokens_makes_no_step() -> None:
    config = Config.model_validate(
        {"rollout": {"prompts_per_rollout": 2}, "algorithm": {"minibatches_per_rollout": 2}}
    )
    dead = make_sample([1, 2, 3], 2, mask=[False])
    groups = [make_group(0, [dead]), make_group(1, [make_sample([1, 2, 3], 2)])]
    steps = gradient_steps(groups, 0, config, routing=None, rank=0, all_gather=lambda value: [value])
    assert [step.num_loss_tokens for step in steps] == [1]


def test_advantages_stay_within_groups() -> None:
    groups = [make_group(i, [make_sample([1, 2, 3], 2, reward=r) for r in rewards]) for i, rewards in enumerate(
        [(0.0, 1.0), (3.0, 3.0)]
    )]  # fmt: skip
    scored = with_advantages(groups, normalize_std=False)
    assert [[s.advantage for s in g.samples] for g in scored] == [[-0.5, 0.5], [0.0, 0.0]]
    assert with_advantages([], normalize_std=False) == []


def test_groups_that_lost_every_sample_and_steps_without_one_are_no_fault() -> None:
    groups = [make_group(0, [])]
    assert with_advantages(groups, normalize_std=False) == groups
    shape = BatchShape("seq_mean_token_mean", 8, 64)
    (batch,) = on_ranks(1, lambda rank, gather: train_batches([[]], shape, rank, gather))[0]
    assert batch == TrainBatch((), 0, 0)
