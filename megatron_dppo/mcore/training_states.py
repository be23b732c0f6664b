"""Saves and restores what Megatron trains with: the distributed optimizer's states, and random-number states.

Megatron's `fully_reshardable` format stores the states of whole parameters, so that every layout can load
them. Megatron writes and reads it with the states of all parameters on each data-parallel rank: 12 bytes of
host memory for each parameter of the model-parallel rank, however many data-parallel ranks share them.

After `install`, the rank whose shard holds the middle of a parameter owns the parameter. The owner alone writes
the parameter and its states, and the owner alone reads the states. It exchanges the pieces of other shards
with the ranks that hold them. A rank owns at most its shard's size plus one parameter. The files are in
Megatron's format.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

STATES = ("param", "exp_avg", "exp_avg_sq")
"""Names of a parameter's float32 states."""


@dataclass(frozen=True)
class Spread:
    """How the elements of a parameter lie in the shards of data-parallel ranks."""

    index: int  # of the parameter among all of the optimizer's, on every rank the same
    parameter: Tensor
    pieces: Mapping[int, slice]  # of the flat parameter, by the data-parallel rank that holds the piece
    owner: int


def install() -> None:
    """Replace Megatron's functions that save and load the format; does nothing when called again."""
    optimizer: Any = distrib_optimizer.DistributedOptimizer
    optimizer.sharded_param_state_fully_reshardable = owned_states
    optimizer.load_parameter_state_from_fully_reshardable = load_owned_states


@torch.no_grad()
def owned_states(
    self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, Any]]:
    """Return sharded tensors of the states of the parameters that this rank owns, by the parameter's index.

    Every data-parallel rank calls this together. When saving, the owner also becomes the rank that writes the
    parameter itself.
    """
    rank = self.data_parallel_group.rank()
    sharded = {each.data: each for each in nested_values(_sharded_tensors(model_sharded_state_dict))}
    found: dict[int, dict[str, Any]] = {}
    for spread in spreads(self):
        of_model = sharded[spread.parameter]
        replica: Any = (*of_model.replica_id[:-1], (rank - spread.owner) % self.data_parallel_group.size())
        if not is_loading:
            of_model.replica_id = replica
        if is_loading:  # nobody sends: the owner needs room for what it reads
            states = {
                name: torch.empty(spread.parameter.numel(), dtype=torch.float32)
                for name in STATES
                if rank == spread.owner
            }
        else:
            states = _gather(self, spread)
        if rank == spread.owner:
            found[spread.index] = {name: _like(of_model, name, states[name], replica) for name in STATES}
    return found


@torch.no_grad()
def load_owned_states(self: Any, state_dict: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Set this rank's shards from the loaded states of owned parameters; every rank calls this together."""
    group, rank = self.data_parallel_group, self.data_parallel_group.rank()
    for spread in spreads(self):
        own = spread.pieces.get(rank)
        whole = {name: state_dict[spread.index][name].flatten() for name in STATES if rank == spread.owner}
        if rank == spread.owner:
            for other, piece in spread.pieces.items():
                if other != rank:
                    packed = torch.stack([whole[name][piece] for name in STATES]).to(spread.parameter.device)
                    dist.send(packed, group=group, group_dst=other)
            loaded = {name: whole[name][own] for name in STATES}
        elif own is not None:
            packed = _empty(own, spread.parameter)
            dist.recv(packed, group=group, group_src=spread.owner)
            loaded = dict(zip(STATES, packed, strict=True))
        else:
            continue
        self._set_main_param_and_optimizer_states(spread.parameter, loaded)


def spreads(optimizer: Any) -> Iterator[Spread]:
    """Yield how each parameter of a distributed optimizer is spread over its data-parallel ranks."""
    size, index = optimizer.data_parallel_group.size(), 0
    for buffer in optimizer.buffers:
        for parameter, (start, end, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            shard = bucket.grad_data.numel() // size
            pieces: dict[int, slice] = {}
            first = (start - bucket.offset) // shard
            for rank in range(first, size):
                begin = bucket.offset + rank * shard
                if begin >= end:
                    break
                pieces[rank] = slice(max(begin, start) - start, min(begin + shard, end) - start)
            middle = (start + end) // 2 - bucket.offset
            yield Spread(index, parameter, pieces, middle // shard)
            index += 1


def _gather(optimizer: Any, spread: Spread) -> dict[str, Tensor]:
    """Return the flat states on the owner: views if the shard holds them whole, else new tensors on the CPU."""
    group, rank = optimizer.data_parallel_group, optimizer.data_parallel_group.rank()
    if rank not in spread.pieces:
        return {}
    held = optimizer._get_main_param_and_optimizer_states(spread.parameter)
    own = {name: held[name].detach() for name in STATES}
    if len(spread.pieces) == 1:
        return own
    if rank != spread.owner:
        dist.send(torch.stack([own[name].float() for name in STATES]), group=group, group_dst=spread.owner)
        return {}
    whole = {name: torch.empty(spread.parameter.numel(), dtype=torch.float32) for name in STATES}
    for other, piece in spread.pieces.items():
        packed = [own[name] for name in STATES]
        if other != rank:
            received = _empty(piece, spread.parameter)
            dist.recv(received, group=group, group_src=other)
            packed = list(received)
        for name, values in zip(STATES, packed, strict=True):
            whole[name][piece].copy_(values)
    return whole


def _empty(piece: slice, parameter: Tensor) -> Tensor:
    return torch.empty(len(STATES), piece.stop - piece.start, dtype=torch.float32, device=parameter.device)


def _sharded_tensors(state: Any) -> Any:
    return extract_sharded_tensors_and_factories(state)[0]


def _like(of_model: Any, name: str, values: Tensor, replica: Any) -> Any:
    """Return a state as Megatron shards the parameter."""
    changes: dict[str, Any] = {
        "key": f"optimizer.state.{name}.{of_model.key}",
        "data": values.reshape(of_model.data.shape),
        "replica_id": replica,
    }
    if not isinstance(of_model, ShardedTensorFactory):
        changes["dtype"] = values.dtype
    made: Any = replace(of_model, **changes)
    made.validate_metadata_integrity()
    return made


def random_states() -> dict[str, torch.Tensor]:
    """Return copies of this rank's random-number states by name."""
    trackers = {f"megatron.{name}": state.clone() for name, state in _tracker().get_states().items()}
    return {"torch": torch.get_rng_state(), **trackers}


def restore_random_states(states: dict[str, torch.Tensor]) -> None:
    """Restore what `random_states` returned."""
    torch.set_rng_state(states.pop("torch"))
    _tracker().set_states({name.removeprefix("megatron."): state for name, state in states.items()})


def _tracker() -> Any:
    """Return Megatron's random-number tracker, created by `initialize_groups`."""
    return get_cuda_rng_tracker()
