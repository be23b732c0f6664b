"""From scored groups to the gradient steps of one rollout."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.algorithms import group_advantages, token_weights
from megatron_dppo.config.schema import Config
from megatron_dppo.data.packing import WeightedSample, pack, placeholder
from megatron_dppo.types import Microbatch, ModelRouting, Sample, SampleGroup, TrainBatch

AllGather = Callable[[Any], list[Any]]


def with_advantages(groups: Sequence[SampleGroup], normalize_std: bool) -> list[SampleGroup]:
    """The groups with each sample's advantage: its reward against its group's mean."""
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return list(groups)
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    group_ids = torch.tensor([i for i, group in enumerate(groups) for _ in group.samples])
    values = _floats(group_advantages(rewards, group_ids, normalize_std))
    advantages = iter(values)
    return [
        replace(group, samples=tuple(replace(sample, advantage=next(advantages)) for sample in group.samples))
        for group in groups
    ]


def _floats(values: Tensor) -> list[float]:
    return [float(value) for value in values]


def gradient_steps(
    groups: Sequence[SampleGroup],
    rollout: int,
    config: Config,
    *,
    routing: ModelRouting | None,
    rank: int,
    all_gather: AllGather,
) -> list[TrainBatch]:
    """This rank's micro-batches of each gradient step on one rollout, with weights and counts over all ranks.

    A mini-batch without a learning token on any rank makes no step.

    Args:
        groups: This rank's, with advantages.
        rollout: Index of the rollout; with `run.seed` it fixes the order of prompts in later epochs.
        config: The run's.
        routing: The model's, where samples carry routes.
        rank: This rank's place among those that `all_gather` gathers.
        all_gather: Every data-parallel rank's value, in rank order; ranks exchange only lengths.
    """
    shape = BatchShape(
        aggregation=config.algorithm.aggregation,
        response_length=config.rollout.max_response_tokens,
        max_tokens=config.parallel.max_tokens_per_microbatch,
        topk_columns=config.rollout.num_topk_log_probs,
        routing=routing,
    )
    num_prompts, num_minibatches = config.rollout.prompts_per_rollout, config.algorithm.minibatches_per_rollout
    minibatches: list[list[Sample]] = []
    for epoch in range(config.algorithm.epochs_per_rollout):
        step_of = minibatch_of_prompts(num_prompts, num_minibatches, (config.run.seed, rollout, epoch))
        for step in range(num_minibatches):
            own = [group for group in groups if step_of[group.index] == step]
            minibatches.append([sample for group in own for sample in group.samples])
    steps = train_batches(minibatches, shape, rank, all_gather)
    return [step for step in steps if step.num_loss_tokens]


def minibatch_of_prompts(num_prompts: int, num_minibatches: int, key: tuple[int, int, int]) -> list[int]:
    """Which of an epoch's mini-batches each prompt of a rollout belongs to, whichever rank samples it.

    The first epoch takes prompts as they come: the stream is shuffled already, and ranks then hold equal parts
    of each mini-batch. Later ones reorder them by `key`, (seed, rollout, epoch).
    """
    order = torch.arange(num_prompts)
    if key[2] > 0:
        digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=7).digest()
        order = torch.randperm(
            num_prompts, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        )
    step_of = [0] * num_prompts
    for step, chunk in enumerate(torch.tensor_split(order, num_minibatches)):
        for index in chunk:
            step_of[int(index)] = step
    return step_of


@dataclass(frozen=True)
class BatchShape:
    """How micro-batches are made; the same on every rank."""

    aggregation: str  # how token losses become one number
    response_length: int  # the L of seq_mean_token_sum_norm
    max_tokens: int  # of one micro-batch
    topk_columns: int = 0  # K of the rollout's top-K; 0 without
    routing: ModelRouting | None = None  # the model's, where samples carry routes


def train_batches(
    minibatches: Sequence[Sequence[Sample]], shape: BatchShape, rank: int, all_gather: AllGather
) -> list[TrainBatch]:
    """This rank's micro-batches of each gradient step, with weights and counts over all ranks.

    Ranks exchange only lengths. A rank with fewer micro-batches than another gets placeholders.

    Args:
        minibatches: This rank's samples of each gradient step.
        shape: How to pack and weigh.
        rank: This rank's place among those that `all_gather` gathers.
        all_gather: Every data-parallel rank's value, in rank order.
    """
    lengths = [[int(sample.loss_mask.sum()) for sample in minibatch] for minibatch in minibatches]
    lengths_by_rank: list[list[list[int]]] = all_gather(lengths)
    packed: list[list[Microbatch]] = []
    for step, minibatch in enumerate(minibatches):
        weighted = _weigh(minibatch, [ranks[step] for ranks in lengths_by_rank], rank, shape)
        packed.append(pack(weighted, shape.max_tokens))
    counts_by_rank: list[list[int]] = all_gather([len(microbatches) for microbatches in packed])
    batches: list[TrainBatch] = []
    for step, microbatches in enumerate(packed):
        num_missing = max(counts[step] for counts in counts_by_rank) - len(microbatches)
        filler = placeholder(shape.topk_columns, shape.routing)
        all_lengths = [length for ranks in lengths_by_rank for length in ranks[step]]
        batches.append(TrainBatch((*microbatches, *[filler] * num_missing), sum(all_lengths), len(all_lengths)))
    return batches


def _weigh(
    samples: Sequence[Sample], lengths_by_rank: Sequence[Sequence[int]], rank: int, shape: BatchShape
) -> list[WeightedSample]:
    """Weights such that the loss divided by the global number of learning tokens is the aggregated loss."""
    lengths = torch.tensor([length for ranks in lengths_by_rank for length in ranks], dtype=torch.int64)
    weights = token_weights(shape.aggregation, lengths, shape.response_length).double() * lengths.sum()
    before = sum(sum(ranks) for ranks in lengths_by_rank[:rank])
    weighted: list[WeightedSample] = []
    for sample, length in zip(samples, lengths_by_rank[rank], strict=True):
        own = weights[before : before + length].float()
        before += length
        per_token = torch.zeros(sample.response_length).masked_scatter(sample.loss_mask, own)
        weighted.append(WeightedSample(sample, per_token))
    return weighted
