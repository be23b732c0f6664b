"""Builds the gradient steps of one rollout from its scored groups."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dppo.algorithms import group_advantages, sequence_weights
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.balance import Plan, plan_minibatch
from megatron_dppo.data.batches.exchange import DataParallel, exchange_samples
from megatron_dppo.data.batches.memory import bytes_of_routes_and_topk
from megatron_dppo.data.batches.packing import pack, placeholder
from megatron_dppo.types import ModelRouting, Sample, SampleGroup, TrainBatch


def with_advantages(groups: Sequence[SampleGroup], normalize_std: bool) -> list[SampleGroup]:
    """Return the groups with each sample's advantage: its reward relative to its group's mean."""
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


@dataclass(frozen=True)
class BatchReport:
    """Balance and memory of a rollout's training, over all ranks but for the fields of this rank."""

    imbalance: float  # work of each gradient step's busiest group over the groups' mean; 1 is perfect
    num_samples: int  # trained on; once for each epoch
    num_moved: int  # of those, by another group than the one whose rank sampled them
    num_tokens: int  # in this rank's micro-batches
    num_padding_tokens: int  # of those, of no sample
    max_bytes: int  # most bytes of routes and top-K that this rank held at once


def gradient_steps(
    groups: list[SampleGroup],
    rollout: int,
    config: Config,
    data_parallel: DataParallel,
    *,
    routing: ModelRouting | None,
) -> tuple[list[TrainBatch], BatchReport]:
    """Build this rank's micro-batches of each gradient step on one rollout, with global weights and counts.

    A mini-batch without a learning token on any rank makes no step. Every rank calls this together.

    Args:
        groups: Those that this rank sampled, with advantages. Emptied: samples are freed as they are packed or
            sent away, where nobody else holds them.
        rollout: Index of the rollout; with `run.seed` it fixes the order of prompts in later epochs.
        config: The run's.
        data_parallel: Which ranks train together.
        routing: The model's, where samples carry routes.

    Raises:
        DataError: A sample, of whatever rank, is longer than a micro-batch may be.
    """
    shape = BatchShape(
        aggregation=config.algorithm.aggregation,
        response_length=config.rollout.max_response_tokens,
        max_tokens=config.parallel.max_tokens_per_microbatch,
        topk_columns=config.rollout.num_topk_log_probs,
        routing=routing,
        measured_share=config.tracking.mismatch_share,
    )
    num_prompts, num_minibatches = config.rollout.prompts_per_rollout, config.algorithm.minibatches_per_rollout
    minibatches: list[list[Sample]] = []
    for epoch in range(config.algorithm.epochs_per_rollout):
        step_of = minibatch_of_prompts(num_prompts, num_minibatches, (config.run.seed, rollout, epoch))
        for step in range(num_minibatches):
            minibatches.append(
                [sample for group in groups if step_of[group.index] == step for sample in group.samples]
            )
    groups.clear()
    steps, report = train_batches(minibatches, shape, data_parallel)
    return [step for step in steps if step.num_loss_tokens], report


def minibatch_of_prompts(num_prompts: int, num_minibatches: int, key: tuple[int, int, int]) -> list[int]:
    """Assign each prompt of a rollout to one of an epoch's mini-batches, the same on every rank.

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
    """Settings that shape micro-batches; the same on every rank."""

    aggregation: str  # how token losses become one number
    response_length: int  # the L of seq_mean_token_sum_norm
    max_tokens: int  # of one micro-batch
    topk_columns: int = 0  # K of the rollout's top-K; 0 without
    routing: ModelRouting | None = None  # the model's, where samples carry routes
    measured_share: float = 1.0  # of the samples: those whose mismatch is told apart


def train_batches(
    minibatches: list[list[Sample]], shape: BatchShape, data_parallel: DataParallel
) -> tuple[list[TrainBatch], BatchReport]:
    """Build this rank's micro-batches of each gradient step, with weights and counts over all ranks.

    Ranks exchange lengths; then whole samples move, one mini-batch at a time. All ranks of a group get the same
    micro-batches, and every group as many: one that has fewer gets placeholders. The order in which a rank
    holds its samples changes nothing. Every rank calls this together.

    Args:
        minibatches: This rank's samples of each gradient step; emptied, so that samples can be freed.
        shape: How to pack and weigh.
        data_parallel: Which ranks train together.

    Raises:
        DataError: A sample, of whatever rank, is longer than a micro-batch may be.
    """
    for minibatch in minibatches:
        minibatch.sort(key=lambda sample: sample.id)
    sizes_by_rank = data_parallel.peers.all_gather([[_Size.of(s) for s in own] for own in minibatches])
    steps, plans, max_bytes = list[TrainBatch](), list[Plan](), 0
    held = [0] * data_parallel.num_groups
    for of_ranks in zip(*sizes_by_rank, strict=True):
        owners = [rank for rank, own in enumerate(of_ranks) for _ in own]
        sizes = [size for own in of_ranks for size in own]
        plan = plan_minibatch(
            [size.num_tokens for size in sizes],
            [data_parallel.group_of_rank[owner] for owner in owners],
            held,
            max_tokens=shape.max_tokens,
            cost=data_parallel.cost,
        )
        samples = exchange_samples(minibatches.pop(0), owners, plan.group_of_sample, data_parallel)
        steps.append(_train_batch(samples, sizes, plan.microbatches[data_parallel.group], shape))
        plans.append(plan)
        held = [before + added for before, added in zip(held, plan.tokens, strict=True)]
        max_bytes = max(max_bytes, _bytes_held([samples.values(), *minibatches], steps))
        del samples  # not beside the next mini-batch
    return steps, _report(steps, plans, data_parallel.group, max_bytes)


class _Size(NamedTuple):
    """Sizes of a sample that every rank needs."""

    num_tokens: int
    num_loss_tokens: int

    @classmethod
    def of(cls, sample: Sample) -> "_Size":
        return cls(sample.tokens.numel(), int(sample.loss_mask.sum()))


def _train_batch(
    samples: Mapping[int, Sample],
    sizes: Sequence[_Size],
    microbatches: Sequence[Sequence[int]],
    shape: BatchShape,
) -> TrainBatch:
    """Build one gradient step, weighted so that the loss over its learning tokens is the aggregated loss.

    Args:
        samples: This group's, by their place in `sizes`.
        sizes: Of all groups' samples.
        microbatches: This group's samples, by place.
        shape: How to pack and weigh.
    """
    lengths = torch.tensor([size.num_loss_tokens for size in sizes], dtype=torch.int64)
    num_loss_tokens = int(lengths.sum())
    weights = sequence_weights(shape.aggregation, lengths, shape.response_length) * num_loss_tokens

    def weighted(place: int) -> Sample:
        sample = samples[place]
        return replace(sample, token_weights=torch.where(sample.loss_mask, weights[place].float(), 0.0))

    filler = placeholder(shape.topk_columns, shape.routing)
    share = shape.measured_share
    packed = [pack([weighted(i) for i in chosen], share) if chosen else filler for chosen in microbatches]
    return TrainBatch(tuple(packed), num_loss_tokens, len(sizes))


def _bytes_held(samples: Sequence[Iterable[Sample]], steps: Sequence[TrainBatch]) -> int:
    """Return the bytes of routes and top-K; a sample that several epochs wait for counts once."""
    distinct = {id(sample): sample for several in samples for sample in several}
    microbatches = [microbatch for step in steps for microbatch in step.microbatches]
    return sum(map(bytes_of_routes_and_topk, (*distinct.values(), *microbatches)))


def _report(steps: Sequence[TrainBatch], plans: Sequence[Plan], group: int, max_bytes: int) -> BatchReport:
    mean = sum(sum(plan.work) / len(plan.work) for plan in plans)
    num_tokens = sum(microbatch.tokens.numel() for step in steps for microbatch in step.microbatches)
    return BatchReport(
        imbalance=sum(max(plan.work) for plan in plans) / mean if mean else 1.0,
        num_samples=sum(len(plan.group_of_sample) for plan in plans),
        num_moved=sum(plan.num_moved for plan in plans),
        num_tokens=num_tokens,
        num_padding_tokens=num_tokens - sum(plan.tokens[group] for plan in plans),
        max_bytes=max_bytes,
    )
