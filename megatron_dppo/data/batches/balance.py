"""Balances work: assigns the samples of a mini-batch to data-parallel groups and micro-batches.

The functions are pure and deterministic: every rank computes the same plan from the same lengths, without
communication.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dppo.architectures.parameters import ModelShape
from megatron_dppo.errors import DataError

ROWS_PER_TOKEN = 8
"""Most rows of a micro-batch for each token of its budget. A shared prefix is computed once, but each sequence
has rows of it in attention, with its keys and values."""
NEAR_EVEN = 1.02  # no more samples move if the busiest group is within 2 % of the lower bound


@dataclass(frozen=True)
class SampleCost:
    """Cost of training on a sample: a linear and a quadratic term in its tokens. Only ratios matter."""

    linear: float = 1.0
    quadratic: float = 0.0

    @classmethod
    def of_model(cls, shape: ModelShape) -> "SampleCost":
        """Return the cost of forward and backward in floating-point operations.

        A token costs 6 operations for each weight that it is multiplied with (the input embedding is only
        looked up), plus attention. With causal attention a token attends on average to half of the sample's
        tokens, with two products for each: one with its key and one with its value.
        """
        sizes, num_linear = shape.sizes, len(shape.sizes.linear_layers)
        width = sizes.num_attention_heads * (sizes.head_dim + sizes.value_head_dim)
        weights: float = shape.num_multiplied_parameters
        if sizes.linear is not None:
            weights += num_linear * sizes.linear.multiplications
        return cls(linear=6.0 * weights, quadratic=3.0 * (sizes.num_layers - num_linear) * width)

    def of(self, num_tokens: int) -> float:
        """Return the cost of a sample of `num_tokens` tokens."""
        return (self.linear + self.quadratic * num_tokens) * num_tokens


@dataclass(frozen=True)
class _Bundle:
    """Samples that stay together: their prefixes are computed once."""

    samples: range
    num_tokens: int  # of the samples
    num_distinct: int  # tokens that are computed
    work: float  # cost of these

    @property
    def size(self) -> int:
        """Its part of a micro-batch's budget: the tokens that are computed, or more if it has many rows."""
        return max(self.num_distinct, -(-self.num_tokens // ROWS_PER_TOKEN))


@dataclass(frozen=True)
class Plan:
    """Assignment of samples to data-parallel groups and micro-batches in one gradient step."""

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    """[group][micro-batch]: ascending sample indices. All groups have the same number of micro-batches, with
    empty ones last. Micro-batches of a group have about equal work and are sorted by it, largest first, so that
    the n-th micro-batch costs each group about the same."""
    group_of_sample: tuple[int, ...]
    num_moved: int  # samples assigned to another group than their home
    tokens: tuple[int, ...]  # [group]
    work: tuple[float, ...]  # [group]


def plan_minibatch(
    lengths: Sequence[int],
    homes: Sequence[int],
    held: Sequence[int],
    *,
    max_tokens: int,
    cost: SampleCost,
    shared: Sequence[int] | None = None,
) -> Plan:
    """Assign a mini-batch's samples to groups and micro-batches.

    Groups get near-equal work. Each group's tokens, which determine the memory of routes and top-K, stay within
    an equal share plus one sample, counted over this and earlier mini-batches. Samples leave their home group
    only as needed to bring the busiest group's work within 2 % of the lower bound.

    Samples that share a prefix stay together, so that it is computed once: in bundles of consecutive samples
    that fill a micro-batch at most, or of fewer samples if the busiest group then has less work. A bundle is
    cut at the least shared place.

    Args:
        lengths: Number of tokens of each sample.
        homes: Group of the rank that sampled each sample.
        held: [group] tokens assigned by earlier mini-batches of the rollout.
        max_tokens: Maximum number of tokens in a micro-batch; a prefix that is computed once counts once. With
            it counted in each sample, there are at most `ROWS_PER_TOKEN` times as many.
        cost: Cost of training on a sample.
        shared: Number of tokens that each sample has in common with the one before it, which has the same home,
            or None if each sample is computed alone.
    """
    _require_fit(lengths, max_tokens)
    best, least = None, 0.0
    for bundles in _bundlings(lengths, shared or [0] * len(lengths), len(held), max_tokens, cost):
        plan = _plan_bundles(bundles, homes, held, max_tokens)
        least = least or sum(plan.work) / len(held)  # of the largest bundles: smaller ones share less
        if best is None or max(plan.work) < max(best.work):
            best = plan
        if max(best.work) <= NEAR_EVEN * least:
            break
    assert best is not None, "there is always a way"
    return best


def _plan_bundles(
    bundles: Sequence[_Bundle], homes: Sequence[int], held: Sequence[int], max_tokens: int
) -> Plan:
    lengths, work = [bundle.num_tokens for bundle in bundles], [bundle.work for bundle in bundles]
    groups = _assign(lengths, work, [homes[bundle.samples[0]] for bundle in bundles], held)
    group_of_sample = [0] * len(homes)
    for group, items in enumerate(groups):
        for item in items:
            for sample in bundles[item].samples:
                group_of_sample[sample] = group
    sizes = [bundle.size for bundle in bundles]
    microbatches = tuple(
        tuple(tuple(sample for item in chosen for sample in bundles[item].samples) for chosen in of_group)
        for of_group in _split(groups, sizes, work, max_tokens)
    )
    return Plan(
        microbatches=microbatches,
        group_of_sample=tuple(group_of_sample),
        num_moved=sum(group != home for group, home in zip(group_of_sample, homes, strict=True)),
        tokens=tuple(sum(lengths[item] for item in items) for items in groups),
        work=tuple(sum(work[item] for item in items) for items in groups),
    )


def _bundlings(
    lengths: Sequence[int], shared: Sequence[int], num_groups: int, max_tokens: int, cost: SampleCost
) -> Iterator[list[_Bundle]]:
    """Yield ways to bundle samples, each with less work in a bundle than the one before."""

    def bundle(samples: range) -> _Bundle:
        common = [0, *(shared[sample] for sample in samples[1:])]
        num_tokens = sum(lengths[sample] for sample in samples)
        work = sum(cost.of(lengths[s]) - cost.of(num) for s, num in zip(samples, common, strict=True))
        return _Bundle(samples, num_tokens, num_tokens - sum(common), work)

    starts = [sample for sample, num in enumerate(shared) if not num]
    ends = [*starts[1:], len(lengths)] if starts else []
    bundles = [bundle(range(*each)) for each in zip(starts, ends, strict=True)]
    most_work, num_before = 2 * sum(each.work for each in bundles) / num_groups, -1
    while True:
        waiting, bundles = bundles[::-1], list[_Bundle]()
        while waiting:
            each = waiting.pop()
            is_small = each.work <= most_work and each.size <= max_tokens
            if is_small or len(each.samples) == 1:
                bundles.append(each)
            else:
                cut = _cheapest_cut(each.samples, shared)
                waiting += [bundle(range(cut, each.samples.stop)), bundle(range(each.samples.start, cut))]
        if len(bundles) != num_before:
            yield bundles
        if len(bundles) == len(lengths):
            return
        most_work, num_before = 0.75 * most_work, len(bundles)


def _cheapest_cut(samples: range, shared: Sequence[int]) -> int:
    """Return the sample to begin another bundle with: the one that shares least, close to the middle."""
    middle = (samples.start + samples.stop) / 2
    return min(samples[1:], key=lambda sample: (shared[sample], abs(sample - middle)))


def least_work(work: Sequence[float], num_groups: int) -> float:
    """Return a lower bound on the work of the busiest group, however samples are assigned.

    One bound is the mean. If there are more samples than groups, some must share a group: among the
    k * groups + 1 largest samples, k + 1 are in the same group.
    """
    largest = sorted(work, reverse=True)
    shared = [largest[i] * (i // num_groups + 1) for i in range(0, len(largest), num_groups)]
    return max([sum(largest) / num_groups, *shared])


def _require_fit(lengths: Sequence[int], max_tokens: int) -> None:
    too_long = [length for length in lengths if length > max_tokens]
    if too_long:
        raise DataError(
            f"{len(too_long)} sequences exceed the budget of {max_tokens} tokens per micro-batch (longest: "
            f"{max(too_long)}). Raise parallel.max_tokens_per_microbatch or lower rollout.max_response_tokens."
        )


class _Bins:
    """Bins with a token capacity, filled one item at a time. Finds the bin with the least work."""

    def __init__(self, used: Sequence[int], capacity: float) -> None:
        self.items: list[list[int]] = [[] for _ in used]
        self.work = [0.0] * len(used)
        self._used, self._capacity = list(used), capacity
        self._heap = [(0.0, tokens, index) for index, tokens in enumerate(used)]
        heapq.heapify(self._heap)

    def has_room(self, index: int, num_tokens: int) -> bool:
        return self._used[index] + num_tokens <= self._capacity

    def least_busy(self, num_tokens: int) -> int | None:
        """Return the bin with the least work, then the fewest tokens, that has room, or `None` if none has."""
        full: list[tuple[float, int, int]] = []
        found = None
        while self._heap and found is None:
            work, used, index = self._heap[0]
            if (work, used) != (self.work[index], self._used[index]):
                heapq.heappop(self._heap)  # outdated: the bin has more items now
            elif self.has_room(index, num_tokens):
                found = index
            else:
                full.append(heapq.heappop(self._heap))
        for entry in full:
            heapq.heappush(self._heap, entry)
        return found

    def put(self, index: int, item: int, num_tokens: int, work: float) -> None:
        self.items[index].append(item)
        self.work[index] += work
        self._used[index] += num_tokens
        heapq.heappush(self._heap, (self.work[index], self._used[index], index))


def _longest_first(items: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(items, key=lambda item: (-lengths[item], item))


def _assign(
    lengths: Sequence[int], work: Sequence[float], homes: Sequence[int], held: Sequence[int]
) -> list[list[int]]:
    """Return the samples of each group."""
    if not lengths:
        return [[] for _ in held]
    share = (sum(held) + sum(lengths)) / len(held) + max(lengths)
    least = least_work(work, len(held))

    def filled(stay_below: float) -> _Bins:
        """Assign samples, longest first: home if that stays below the limit, else the least busy group."""
        bins = _Bins(held, share)
        for item in _longest_first(range(len(lengths)), lengths):
            chosen, home = bins.least_busy(lengths[item]), homes[item]
            assert chosen is not None, "some group is at or below the mean, so it has room for one more"
            if bins.has_room(home, lengths[item]):
                is_within = bins.work[home] + work[item] <= stay_below
                chosen = home if is_within or bins.work[home] <= bins.work[chosen] else chosen
            bins.put(chosen, item, lengths[item], work[item])
        return bins

    staying = filled(stay_below=least)
    if max(staying.work) <= NEAR_EVEN * least:
        return staying.items
    moving = filled(stay_below=0.0)
    return min(staying, moving, key=lambda bins: max(bins.work)).items


def _split(
    groups: Sequence[Sequence[int]], lengths: Sequence[int], work: Sequence[float], max_tokens: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Split samples into [group][micro-batch], with the smallest common number of micro-batches per group."""
    fewest = [_fewest_bins(items, lengths, work, max_tokens) for items in groups]
    num_microbatches = max(len(bins) for bins in fewest)
    split: list[tuple[tuple[int, ...], ...]] = []
    for items, bins in zip(groups, fewest, strict=True):
        even = _even_bins(items, lengths, work, max_tokens, num_microbatches) or bins
        padded = [*even, *[[]] * (num_microbatches - len(even))]
        by_work = sorted(padded, key=lambda chosen: -sum(work[item] for item in sorted(chosen)))
        split.append(tuple(tuple(sorted(chosen)) for chosen in by_work))
    return tuple(split)


def _fewest_bins(
    items: Sequence[int], lengths: Sequence[int], work: Sequence[float], max_tokens: int
) -> list[list[int]]:
    """Return even bins if they need no more bins than tight packing, else the tightly packed bins."""
    tight = first_fit_decreasing([lengths[item] for item in items], max_tokens)
    at_least = -(-sum(lengths[item] for item in items) // max_tokens)
    for num_bins in range(at_least, len(tight) + 1):
        even = _even_bins(items, lengths, work, max_tokens, num_bins)
        if even is not None:
            return even
    return [[items[place] for place in chosen] for chosen in tight]


def _even_bins(
    items: Sequence[int], lengths: Sequence[int], work: Sequence[float], max_tokens: int, num_bins: int
) -> list[list[int]] | None:
    """Put items, longest first, into the least busy bin with room. Return `None` if an item does not fit."""
    bins = _Bins([0] * num_bins, max_tokens)
    for item in _longest_first(items, lengths):
        chosen = bins.least_busy(lengths[item])
        if chosen is None:
            return None
        bins.put(chosen, item, lengths[item], work[item])
    return bins.items


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into bins of `capacity`, longest first, each into the first bin with room. Return indices."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in _longest_first(range(len(lengths)), lengths):
        target = next((b for b, free in enumerate(room) if free >= lengths[item]), len(bins))
        if target == len(bins):
            bins.append([])
            room.append(capacity)
        bins[target].append(item)
        room[target] -= lengths[item]
    return bins
