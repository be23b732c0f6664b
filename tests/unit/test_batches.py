"""Gradient steps: weights and counts over all ranks, and mini-batches that no rank count changes."""

import gc
import random
import weakref
from dataclasses import dataclass, field, replace

import pytest
import torch

from megatron_dppo.algorithms import AGGREGATIONS, sequence_weights, token_weights
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.exchange import DataParallel
from megatron_dppo.data.batches.gradient_steps import (
    BatchShape,
    gradient_steps,
    minibatch_of_prompts,
    train_batches,
    with_advantages,
)
from megatron_dppo.data.batches.prefixes import num_distinct_tokens
from megatron_dppo.errors import DataError
from megatron_dppo.types import Sample, SampleGroup, TrainBatch
from tests.support.ranks_on_threads import Peer, alone, on_ranks
from tests.support.samples import ROUTING, assert_same, make_group, make_sample

SAMPLES = [
    make_sample(list(range(3 + n)), 2, mask=[(i + n) % 3 != 0 for i in range(1 + n)], reward=float(n % 2))
    for n in range(7)
]


LAYOUTS = [(0,), (0, 1), (0, 0), (0, 1, 2), (0, 0, 1, 1), (0, 1, 0, 1)]


def steps_of(minibatch: list[Sample], shape: BatchShape, group_of_rank: tuple[int, ...]) -> list[TrainBatch]:
    """The gradient step of one mini-batch on every rank, each of which sampled every n-th sample."""
    world_size = len(group_of_rank)

    def work(data_parallel: DataParallel) -> TrainBatch:
        (step,), _ = train_batches([minibatch[data_parallel.peers.rank :: world_size]], shape, data_parallel)
        return step

    return on_ranks(work, group_of_rank)


def one_of_each_group(ranks: list[TrainBatch], group_of_rank: tuple[int, ...]) -> list[TrainBatch]:
    return [ranks[group_of_rank.index(group)] for group in range(max(group_of_rank) + 1)]


@pytest.mark.parametrize("group_of_rank", LAYOUTS, ids=str)
@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_weighted_losses_over_the_token_count_are_the_aggregated_loss(
    mode: str, group_of_rank: tuple[int, ...]
) -> None:
    shape = BatchShape(mode, response_length=16, max_tokens=20)
    groups = one_of_each_group(steps_of(SAMPLES, shape, group_of_rank), group_of_rank)
    loss_of = {float(t): 0.3 * i + 1 for i, t in enumerate(-torch.arange(1.0, 9.0))}  # by rollout log-prob
    total = 0.0
    for batch in groups:
        for m in batch.microbatches:
            losses = torch.tensor([loss_of.get(float(x), 0.0) for x in m.rollout_log_probs])
            total += float((m.token_weights * losses)[m.loss_mask].sum())
    lengths = [int(s.loss_mask.sum()) for s in SAMPLES]
    per_token = torch.tensor([loss_of[float(x)] for s in SAMPLES for x in s.rollout_log_probs[s.loss_mask]])
    expected = float((token_weights(mode, lengths, 16) * per_token).sum())
    assert {batch.num_loss_tokens for batch in groups} == {sum(lengths)}
    assert {batch.num_samples for batch in groups} == {len(SAMPLES)}
    assert total / sum(lengths) == pytest.approx(expected, rel=1e-6)


def branched(sample: Sample, number: int) -> Sample:
    """A further sample of an episode, a token longer."""
    longer = make_sample([*sample.tokens.tolist(), 90 + number], sample.prompt_length, reward=9.0)
    return replace(longer, id=f"{sample.id}#{number}", branch=number, reward=sample.reward)


@pytest.mark.parametrize("group_of_rank", LAYOUTS, ids=str)
@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_means_over_sequences_weigh_an_episode_once(mode: str, group_of_rank: tuple[int, ...]) -> None:
    samples = [*SAMPLES, *(branched(SAMPLES[n], k) for n, k in ((2, 1), (2, 2), (5, 1)))]
    groups = one_of_each_group(
        steps_of(samples, BatchShape(mode, 16, max_tokens=30), group_of_rank), group_of_rank
    )
    lengths = {sample.id: 0 for sample in SAMPLES}
    for sample in samples:
        lengths[sample.rollout_id] += int(sample.loss_mask.sum())
    expected = dict(zip(lengths, sequence_weights(mode, list(lengths.values()), 16), strict=True))
    seen = list[str]()
    for batch in groups:
        assert batch.num_loss_tokens == sum(lengths.values())
        for m in batch.microbatches:
            for name, start, stop in zip(m.sample_ids, m.cu_seqlens[:-1], m.cu_seqlens[1:], strict=False):
                learns = m.loss_mask[start:stop]
                found = m.token_weights[start:stop][learns] / batch.num_loss_tokens
                assert torch.allclose(found.double(), expected[name.partition("#")[0]].expand(len(found)))
                seen.append(name)
    assert sorted(seen) == sorted(sample.id for sample in samples)


def test_an_episode_counts_once_among_its_group_s_rewards() -> None:
    rollouts = [make_sample([1, 2, 3 + n], 2, reward=reward) for n, reward in enumerate((1.0, 0.0, 0.25))]
    (alone_,) = with_advantages([make_group(0, rollouts)], normalize_std=True)
    further = [branched(rollouts[1], 1), branched(rollouts[1], 2)]
    mixed = make_group(0, [rollouts[0], further[0], rollouts[1], further[1], rollouts[2]])
    (found,) = with_advantages([mixed], normalize_std=True)
    assert_same(found.rollouts, alone_.samples)
    assert {sample.advantage for sample in found.samples if sample.branch} == {alone_.samples[1].advantage}


def test_token_mean_weighs_every_token_one() -> None:
    (batch,), _ = train_batches([list(SAMPLES)], BatchShape("token_mean", 16, 100), alone())
    for m in batch.microbatches:
        assert torch.allclose(m.token_weights[m.loss_mask], torch.ones(m.num_loss_tokens))


def contents(batch: TrainBatch) -> list[list[list[int]]]:
    """The tokens of each sequence of each micro-batch."""
    return [[t.tolist() for t in m.tokens.tensor_split(m.cu_seqlens[1:-1].long())] for m in batch.microbatches]


@pytest.mark.parametrize("group_of_rank", LAYOUTS, ids=str)
def test_micro_batches_are_full_of_distinct_tokens_if_prefixes_are_shared(
    group_of_rank: tuple[int, ...],
) -> None:
    samples = [
        make_sample([1, 2, *rest], 2, group=g) for g in "ab" for rest in ([3], [3, 4], [3, 5], [6, 7, 8])
    ]
    shape = BatchShape("token_mean", 16, max_tokens=9, routing=ROUTING, shares_prefixes=True)
    ranks = steps_of(samples, shape, group_of_rank)
    assert_same(ranks, steps_of(samples, shape, group_of_rank))
    groups = one_of_each_group(ranks, group_of_rank)
    microbatches = [m for step in groups for m in step.microbatches]
    trained = sorted(name for m in microbatches for name in m.sample_ids)
    assert trained == sorted(sample.id for sample in samples)
    assert max(num_distinct_tokens(m) for m in microbatches) <= 9
    if len(group_of_rank) == 1:
        assert max(m.tokens.numel() for m in microbatches) > 9, "tokens that are counted once"


@pytest.mark.parametrize("group_of_rank", LAYOUTS, ids=str)
def test_ranks_of_a_group_train_on_the_same_and_groups_share_all(group_of_rank: tuple[int, ...]) -> None:
    shape = BatchShape("token_mean", 16, max_tokens=11, topk_columns=2, routing=ROUTING)
    ranks = steps_of(SAMPLES, shape, group_of_rank)
    assert len({len(step.microbatches) for step in ranks}) == 1, "as many micro-batches on every rank"
    for rank, group in enumerate(group_of_rank):
        assert_same(ranks[rank], ranks[group_of_rank.index(group)])
    groups = one_of_each_group(ranks, group_of_rank)
    trained = [tokens for step in groups for several in contents(step) for tokens in several]
    sampled = sorted(sample.tokens.tolist() for sample in SAMPLES)
    assert sorted(tokens for tokens in trained if tokens != [0, 0]) == sampled, "each sample once"
    assert all(m.tokens.numel() <= 11 for step in ranks for m in step.microbatches)


def test_a_group_without_samples_keeps_in_step_with_placeholders() -> None:
    shape = BatchShape("token_mean", 16, max_tokens=9, topk_columns=2, routing=ROUTING)
    ranks = steps_of(SAMPLES[-1:], shape, (0, 1, 2))
    assert [len(step.microbatches) for step in ranks] == [1, 1, 1]
    assert sorted(step.microbatches[0].num_loss_tokens for step in ranks) == [0, 0, SAMPLES[-1].loss_mask.sum()]


@pytest.mark.parametrize("shares_prefixes", [False, True])
@pytest.mark.parametrize("group_of_rank", [(0,), (0, 0), (0, 1, 0, 1)], ids=str)
def test_the_order_of_samples_changes_nothing(group_of_rank: tuple[int, ...], shares_prefixes: bool) -> None:
    shape = BatchShape("seq_mean_token_mean", 16, max_tokens=11, shares_prefixes=shares_prefixes)
    size = len(group_of_rank)

    def work(data_parallel: DataParallel, seed: int) -> list[TrainBatch]:
        own = SAMPLES[data_parallel.peers.rank :: size]
        random.Random(seed).shuffle(own)
        return train_batches([own], shape, data_parallel)[0]

    for seed in range(1, 4):
        assert_same(
            on_ranks(lambda data_parallel: work(data_parallel, 0), group_of_rank),
            on_ranks(lambda data_parallel, seed=seed: work(data_parallel, seed), group_of_rank),
        )


def test_a_sample_above_the_budget_is_refused_on_every_rank() -> None:
    shape = BatchShape("token_mean", 16, max_tokens=8)

    def work(data_parallel: DataParallel) -> str:
        own = SAMPLES[-1:] if data_parallel.peers.rank == 0 else SAMPLES[:1]
        with pytest.raises(DataError) as caught:
            train_batches([own], shape, data_parallel)
        return str(caught.value)

    first, second = on_ranks(work, (0, 1))
    assert first == second
    assert "1 sequences exceed the budget of 8 tokens per micro-batch (longest: 9)" in first


def test_a_group_s_share_is_counted_over_the_rollout() -> None:
    """Of 6 + 4 + 4 tokens one group always gets 8; over ten steps that would be 80 of 140, and is not."""
    lengths = (6, 4, 4)

    def work(data_parallel: DataParallel) -> int:
        is_first = data_parallel.peers.rank == 0
        own = [[make_sample([1] * length, 1) for length in lengths * is_first] for _ in range(10)]
        steps, _ = train_batches(own, BatchShape("token_mean", 16, 8), data_parallel)
        return sum(m.tokens.numel() for step in steps for m in step.microbatches if m.num_loss_tokens)

    tokens = on_ranks(work, (0, 1))
    assert sum(tokens) == 140
    assert max(tokens) <= 140 / 2 + 6


@dataclass(frozen=True)
class Watched(Peer):
    """Notes how many of the given samples still exist each time that samples travel."""

    tokens: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    num_alive: list[int] = field(default_factory=list)

    def exchange(self, parcels: list[torch.Tensor]) -> list[torch.Tensor]:
        self.num_alive.append(num_alive(self.tokens))
        return super().exchange(parcels)


def num_alive(references: list[weakref.ref[torch.Tensor]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize(("epochs", "expected"), [(1, [5, 3, 1]), (2, [6, 6, 6])])
def test_samples_are_freed_once_they_are_packed_or_sent_away(epochs: int, expected: list[int]) -> None:
    """Rank 0 samples two responses to each of three prompts, one a step, and sends one of each away."""
    config = Config.model_validate(
        {
            "rollout": {"prompts_per_rollout": 3},
            "algorithm": {"minibatches_per_rollout": 3, "epochs_per_rollout": epochs},
        }
    )
    groups = [make_group(i, [make_sample([1, 2, 3, n, i], 2) for n in (4, 5)]) for i in range(3)]
    tokens = [weakref.ref(sample.tokens) for group in groups for sample in group.samples]
    seen: list[int] = []

    def work(data_parallel: DataParallel) -> tuple[int, int]:
        peer, own = data_parallel.peers, list[SampleGroup]()
        assert isinstance(peer, Peer)
        if peer.rank == 0:
            own, peer = groups, Watched(peer.rank, peer.meeting, tokens, seen)
        steps, report = gradient_steps(
            own, 0, config, replace(data_parallel, peers=peer), routing=ROUTING, shares_prefixes=False
        )
        return len(steps), report.num_moved

    assert on_ranks(work, (0, 1)) == [(3 * epochs, 3 * epochs)] * 2
    assert seen[:3] == expected
    assert num_alive(tokens) == 0


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

    def work(data_parallel: DataParallel) -> list[TrainBatch]:
        own = groups[data_parallel.peers.rank :: world_size]
        return gradient_steps(own, 3, config, data_parallel, routing=None, shares_prefixes=False)[0]

    ranks = on_ranks(work, tuple(range(world_size)))
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
    steps, _ = gradient_steps(groups, 0, config, alone(), routing=None, shares_prefixes=False)
    assert [step.num_loss_tokens for step in steps] == [1]


def test_advantages_stay_within_groups() -> None:
    groups = [
        make_group(i, [make_sample([1, 2, n], 2, reward=r, group=str(i)) for n, r in enumerate(rewards)])
        for i, rewards in enumerate([(0.0, 1.0), (3.0, 3.0)])
    ]
    scored = with_advantages(groups, normalize_std=False)
    assert [[s.advantage for s in g.samples] for g in scored] == [[-0.5, 0.5], [0.0, 0.0]]
    assert with_advantages([], normalize_std=False) == []


def test_groups_that_lost_every_sample_and_steps_without_one_are_no_fault() -> None:
    groups = [make_group(0, [])]
    assert with_advantages(groups, normalize_std=False) == groups
    shape = BatchShape("seq_mean_token_mean", 8, 64)
    (batch,), report = train_batches([[]], shape, alone())
    assert batch == TrainBatch((), 0, 0)
    assert (report.imbalance, report.num_moved, report.num_padding_tokens) == (1.0, 0, 0)
