"""Defines data-parallel groups of ranks, and encodes complete samples in parcels that ranks send peer to peer.

A parcel contains several samples: the length of a JSON header (int64), the header, and the bytes of the tensors
in the header's order. Each part is padded to 8 bytes, so that tensors can be read in place.
`safetensors.torch.save` and `load` are not used: they copy every tensor twice more, which made writing 150 MB
4 times and reading it 60 times as slow, and they reject samples that share a tensor.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_dppo.data.batches.balance import SampleCost
from megatron_dppo.data.batches.batch_file import record_of, tensors_of
from megatron_dppo.errors import DataError
from megatron_dppo.types import Sample, WeightVersionSpan

T = TypeVar("T")

_ALIGNMENT = 8
OF_RESPONSES = ("prompt_tokens", "episode", "branches")
"""Fields that a sample has only until its group is scored: parcels lack them."""
_PLAIN = (
    "id",
    "branch",
    "group_id",
    "prompt_length",
    "finish_reason",
    "num_retractions",
    "num_moves",
    "num_cached_tokens",
    "routes_fault",
    "reward",
    "advantage",
)


class Peers(Protocol):
    """The communication that the exchange needs; a `Runtime` implements it."""

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        ...

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order."""
        ...

    def exchange(self, parcels: list[Tensor]) -> list[Tensor]:
        """Send `parcels[r]`, [n] uint8, to rank r, and return the parcels received. Empties `parcels`."""
        ...


@dataclass(frozen=True)
class DataParallel:
    """Data-parallel groups. The ranks of one group split a model, so they need the same micro-batches."""

    group_of_rank: tuple[int, ...]  # group of every rank of the job, from 0; groups have equal sizes
    peers: Peers
    cost: SampleCost = field(default_factory=SampleCost)  # cost that is balanced over groups

    def __post_init__(self) -> None:
        sizes = [self.group_of_rank.count(group) for group in range(self.num_groups)]
        assert len(set(sizes)) == 1, f"groups of equal size, counted from 0, not {self.group_of_rank}"

    @property
    def num_groups(self) -> int:
        """Number of groups, each with a complete model."""
        return max(self.group_of_rank) + 1

    @property
    def group(self) -> int:
        """This rank's group."""
        return self.group_of_rank[self.peers.rank]

    def ranks_of(self, group: int) -> list[int]:
        """Return the ranks of a group."""
        return [rank for rank, own in enumerate(self.group_of_rank) if own == group]


def encode_departing(departing: Sequence[list[Sample]], data_parallel: DataParallel) -> list[Tensor]:
    """Encode the samples for each rank. Free the samples that this rank's group does not train on.

    Args:
        departing: Samples for each group. The lists of other groups are emptied.
        data_parallel: Data-parallel groups of ranks.

    Returns:
        A parcel for each rank, empty for this one. The ranks of a group share one tensor.
    """
    rank, nothing = data_parallel.peers.rank, torch.empty(0, dtype=torch.uint8)
    parcels = [nothing] * len(data_parallel.group_of_rank)
    for group, samples in enumerate(departing):
        others = [other for other in data_parallel.ranks_of(group) if other != rank]
        if samples and others:
            parcel = encode(samples)
            for other in others:
                parcels[other] = parcel
        if group != data_parallel.group:
            samples.clear()
    return parcels


def encode(samples: Sequence[Sample]) -> Tensor:
    """Encode the samples as one parcel, [n] uint8 on the CPU."""
    entries: list[dict[str, Any]] = []
    parts: list[Tensor] = []
    for sample in samples:
        tensors = tensors_of(sample)
        entries.append(_describe(sample) | {"tensors": [_described(*item) for item in tensors.items()]})
        parts += [part for tensor in tensors.values() for part in _padded(_as_bytes(tensor))]
    header = bytearray(json.dumps(entries, separators=(",", ":")).encode())
    length = torch.tensor([len(header)]).view(torch.uint8)
    return torch.cat([length, *_padded(torch.frombuffer(header, dtype=torch.uint8)), *parts])


def decode(parcel: Tensor) -> list[Sample]:
    """Decode the samples of a parcel. Their tensors share the parcel's memory."""
    if not parcel.numel():
        return []
    try:
        start = _ALIGNMENT
        end = start + int(parcel[:start].view(torch.int64))
        entries: list[dict[str, Any]] = json.loads(bytes(parcel[start:end].numpy()))
        start, samples = _aligned(end), list[Sample]()
        for entry in entries:
            tensors: dict[str, Tensor] = {}
            for name, dtype_name, shape in entry.pop("tensors"):
                dtype: torch.dtype = getattr(torch, dtype_name)
                end = start + dtype.itemsize * torch.Size(shape).numel()
                tensors[name] = parcel[start:end].view(dtype).view(shape)
                start = _aligned(end)
            samples.append(_sample(entry, tensors))
    except (RuntimeError, ValueError, KeyError) as error:
        raise DataError(
            f"a parcel of {parcel.numel()} bytes: found {type(error).__name__}: {error}; expected samples, as "
            "another rank sent them. Start every rank from the same version of the package."
        ) from error
    return samples


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _as_bytes(tensor: Tensor) -> Tensor:
    one = tensor.cpu().contiguous().flatten()
    return one.as_strided(one.shape, (1,)).view(torch.uint8)  # a single number may have any stride


def _padded(part: Tensor) -> Iterator[Tensor]:
    yield part
    yield part.new_zeros(_aligned(part.numel()) - part.numel())


def _described(name: str, tensor: Tensor) -> tuple[str, str, list[int]]:
    return name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _describe(sample: Sample) -> dict[str, Any]:
    """Return a sample's fields except tensors. JSON preserves every bit of a float, and NaN."""
    entry = {name: getattr(sample, name) for name in _PLAIN}
    entry["reward_info"] = dict(sample.reward_info)
    entry["weight_versions"] = [astuple(span) for span in sample.weight_versions]
    if sample.routed_experts is not None:
        entry["layer_numbers"] = sample.routed_experts.layer_numbers
        entry["num_experts"] = sample.routed_experts.num_experts
    return entry


def _sample(entry: dict[str, Any], tensors: dict[str, Tensor]) -> Sample:
    plain = {name: entry[name] for name in (*_PLAIN, "reward_info")}
    plain["weight_versions"] = tuple(WeightVersionSpan(*span) for span in entry["weight_versions"])
    return record_of(Sample, plain, tensors, entry.get("layer_numbers"), entry.get("num_experts"))
