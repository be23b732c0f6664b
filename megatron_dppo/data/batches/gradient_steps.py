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
from megatron_dppo.data.batches.exchange import DataParallel, decode, encode_departing
from megatron_dppo.data.batches.memory import bytes_of_routes_and_topk
from megatron_dppo.data.batches.packing import pack, placeholder
from megatron_dppo.data.batches.prefixes import Path, branches, num_distinct_tokens
from megatron_dppo.types import ModelRouting, Sample, SampleGroup, TrainBatch


def with_advantages(groups: Sequence[SampleGroup], normalize_std: bool) -> list[SampleGroup]:
    """Return the groups with each sample's advantage: its reward relative to its group's mean.

    An episode counts once in the mean, and all its samples get its advantage.
    """
    rollouts = [sample for group in groups for sample in group.rollouts]
    if not rollouts:
        return list(groups)
    rewards = torch.tensor([sample.reward for sample in rollouts], dtype=torch.float64)
    group_ids = torch.tensor([i for i, group in enumerate(groups) for _ in group.rollouts])
    values = _floats(group_advantages(rewards, group_ids, normalize_std))
    advantages = {sample.id: value for sample, value in zip(rollouts, values, strict=True)}

    def with_advantage(sample: Sample) -> Sample:
        return replace(sample, advantage=advantages[sample.rollout_id])

    return [replace(group, samples=tuple(map(with_advantage, group.samples))) for group in groups]


def _floats(values: Tensor) -> list[float]:
    return [float(value) for value in values]


@dataclass(frozen=True)
class BatchReport:
    """Balance and memory of a rollout's training. Counts cover all ranks, unless the field names this rank."""

    imbalance: float  # work of the busiest group divided by the mean work of a group; 1 is perfect
    num_samples: int  # samples trained on, counted once per epoch
    num_moved: int  # samples trained on by another group than the group that sampled them
    num_tokens: int  # tokens in this rank's micro-batches
    num_padding_tokens: int  # tokens in this rank's micro-batches that belong to no sample
    num_forwarded_tokens: int  # tokens in this rank's micro-batches, each shared prefix counted once
    max_bytes: int  # peak bytes of routes and top-K on this rank


def gradient_steps(
    groups: list[SampleGroup],
    rollout: int,
    config: Config,
    data_parallel: DataParallel,
    *,
    routing: ModelRouting | None,
    shares_prefixes: bool,
) -> tuple[list[TrainBatch], BatchReport]:
    """Build this rank's micro-batches of each gradient step on one rollout, with global weights and counts.

    A mini-batch without a learning token on any rank makes no step. All ranks must call this function.

    Args:
        groups: Groups that this rank sampled, with advantages. The list is emptied, so that samples without
            other references are freed as soon as they are packed or sent.
        rollout: Index of the rollout. Together with `run.seed` it determines the prompt order of later epochs.
        config: Config of the run.
        data_parallel: Data-parallel groups of ranks.
        routing: Routing of the model if samples carry routes, else `None`.
        shares_prefixes: Whether the trainer forwards a prefix of several samples in a micro-batch once.
    """
    shape = BatchShape(
        aggregation=config.algorithm.aggregation,
        response_length=config.rollout.max_response_tokens,
        max_tokens=config.parallel.max_tokens_per_microbatch,
        topk_columns=config.rollout.num_topk_log_probs,
        routing=routing,
        measured_share=config.tracking.mismatch_share,
        shares_prefixes=shares_prefixes,
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
    """Assign each prompt of a rollout to one of an epoch's mini-batches, in the same way on every rank.

    The first epoch keeps the order of the prompts: the stream is already shuffled, and ranks then have equal
    parts of each mini-batch. Later epochs shuffle the prompts by `key`, (seed, rollout, epoch).
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
    """Settings for building micro-batches, the same on every rank."""

    aggregation: str  # aggregation of token losses into one number
    response_length: int  # the L of seq_mean_token_sum_norm
    max_tokens: int  # maximum tokens that a micro-batch forwards
    topk_columns: int = 0  # K of the rollout's top-K; 0 without top-K
    routing: ModelRouting | None = None  # routing of the model; None if samples carry no routes
    measured_share: float = 1.0  # share of the samples that mismatch metrics are computed on
    shares_prefixes: bool = False  # a prefix of several samples in a micro-batch is forwarded once


def train_batches(
    minibatches: list[list[Sample]], shape: BatchShape, data_parallel: DataParallel
) -> tuple[list[TrainBatch], BatchReport]:
    """Build this rank's micro-batches of each gradient step, with weights and counts over all ranks.

    Ranks exchange lengths, then complete samples, one mini-batch at a time. All ranks of a group get the same
    micro-batches. All groups get the same number of micro-batches: a group with fewer gets placeholders. The
    order of a rank's samples does not matter. All ranks must call this function.

    Args:
        minibatches: This rank's samples of each gradient step. The list is emptied to free samples early.
        shape: Settings for packing and weighting.
        data_parallel: Data-parallel groups of ranks.
    """
    for minibatch in minibatches:
        minibatch.sort(key=lambda sample: sample.id)
    own_sizes = [_sizes(minibatch, shape.shares_prefixes) for minibatch in minibatches]
    sizes_by_rank = data_parallel.peers.all_gather(own_sizes)
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
            shared=[size.num_shared_tokens for size in sizes],
        )
        samples = exchange_samples(minibatches.pop(0), owners, plan.group_of_sample, data_parallel)
        steps.append(_train_batch(samples, sizes, plan.microbatches[data_parallel.group], shape))
        plans.append(plan)
        held = [before + added for before, added in zip(held, plan.tokens, strict=True)]
        max_bytes = max(max_bytes, _bytes_held([samples.values(), *minibatches], steps))
        del samples  # free them before the next mini-batch
    return steps, _report(steps, plans, data_parallel.group, max_bytes, shape.shares_prefixes)


def exchange_samples(
    own: list[Sample], owners: Sequence[int], group_of_sample: Sequence[int], data_parallel: DataParallel
) -> dict[int, Sample]:
    """Send samples to the groups that train on them. Return the samples of this rank's group by global index.

    All ranks must call this function. All ranks of a group get the same samples. A sample that stays is the
    same object. A sample that moves has the same bits.

    Args:
        own: This rank's samples. The list is emptied, so that samples that leave can be freed.
        owners: Rank that sampled each sample, ascending. A rank's samples keep the order of that rank's `own`.
        group_of_sample: Group that trains on each sample.
        data_parallel: Data-parallel groups of ranks.
    """
    rank, group = data_parallel.peers.rank, data_parallel.group
    targets = [group_of_sample[place] for place, owner in enumerate(owners) if owner == rank]
    departing = [
        [sample for sample, target in zip(own, targets, strict=True) if target == destination]
        for destination in range(data_parallel.num_groups)
    ]
    own.clear()
    staying = departing[group]
    received: list[Tensor] = []
    journeys = set(zip(owners, group_of_sample, strict=True))
    if any(data_parallel.ranks_of(target) != [owner] for owner, target in journeys):
        received = data_parallel.peers.exchange(encode_departing(departing, data_parallel))
    samples = [s for sender, parcel in enumerate(received) if sender < rank for s in decode(parcel)]
    samples += staying
    samples += [s for sender, parcel in enumerate(received) if sender > rank for s in decode(parcel)]
    places = [place for place, target in enumerate(group_of_sample) if target == group]
    return dict(zip(places, samples, strict=True))


class _Size(NamedTuple):
    """Sizes of a sample that every rank needs."""

    num_tokens: int
    num_loss_tokens: int
    num_shared_tokens: int  # in common with the sample before it
    rollout_id: str  # in its response or episode


def _sizes(samples: list[Sample], shares_prefixes: bool) -> list[_Size]:
    """Return the sizes of a rank's samples, after putting samples of a group with a common prefix together."""
    shared = [0] * len(samples)
    if shares_prefixes:
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group_id, []).append(sample)
        found = [(group, branches([Path.of(sample) for sample in group])) for group in groups.values()]
        pairs = [(group[each.sequence], each.num_shared) for group, tree in found for each in tree]
        samples[:], shared = [sample for sample, _ in pairs], [num for _, num in pairs]
    return [
        _Size(sample.tokens.numel(), int(sample.loss_mask.sum()), num, sample.rollout_id)
        for sample, num in zip(samples, shared, strict=True)
    ]


def _train_batch(
    samples: Mapping[int, Sample],
    sizes: Sequence[_Size],
    microbatches: Sequence[Sequence[int]],
    shape: BatchShape,
) -> TrainBatch:
    """Build one gradient step, weighted so that the loss over its learning tokens is the aggregated loss.

    Args:
        samples: This group's samples by their index in `sizes`.
        sizes: Sizes of all groups' samples.
        microbatches: Indices of this group's samples in each micro-batch.
        shape: Settings for packing and weighting.
    """
    rollouts = {name: number for number, name in enumerate(dict.fromkeys(size.rollout_id for size in sizes))}
    number_of = torch.tensor([rollouts[size.rollout_id] for size in sizes], dtype=torch.int64)
    of_samples = torch.tensor([size.num_loss_tokens for size in sizes], dtype=torch.int64)
    lengths = of_samples.new_zeros(len(rollouts)).index_add(0, number_of, of_samples)
    num_loss_tokens = int(lengths.sum())
    weights = sequence_weights(shape.aggregation, lengths, shape.response_length)[number_of] * num_loss_tokens

    def weighted(place: int) -> Sample:
        sample = samples[place]
        return replace(sample, token_weights=torch.where(sample.loss_mask, weights[place].float(), 0.0))

    filler = placeholder(shape.topk_columns, shape.routing)
    share = shape.measured_share
    packed = [pack([weighted(i) for i in chosen], share) if chosen else filler for chosen in microbatches]
    return TrainBatch(tuple(packed), num_loss_tokens, len(sizes))


def _bytes_held(samples: Sequence[Iterable[Sample]], steps: Sequence[TrainBatch]) -> int:
    """Return the bytes of routes and top-K. A sample that several epochs still need counts once."""
    distinct = {id(sample): sample for several in samples for sample in several}
    microbatches = [microbatch for step in steps for microbatch in step.microbatches]
    return sum(map(bytes_of_routes_and_topk, (*distinct.values(), *microbatches)))


def _report(
    steps: Sequence[TrainBatch], plans: Sequence[Plan], group: int, max_bytes: int, shares_prefixes: bool
) -> BatchReport:
    mean = sum(sum(plan.work) / len(plan.work) for plan in plans)
    microbatches = [microbatch for step in steps for microbatch in step.microbatches]
    num_tokens = num_forwarded = sum(microbatch.tokens.numel() for microbatch in microbatches)
    if shares_prefixes:
        num_forwarded = sum(map(num_distinct_tokens, microbatches))
    return BatchReport(
        imbalance=sum(max(plan.work) for plan in plans) / mean if mean else 1.0,
        num_samples=sum(len(plan.group_of_sample) for plan in plans),
        num_moved=sum(plan.num_moved for plan in plans),
        num_tokens=num_tokens,
        num_padding_tokens=num_tokens - sum(plan.tokens[group] for plan in plans),
        num_forwarded_tokens=num_forwarded,
        max_bytes=max_bytes,
    )
