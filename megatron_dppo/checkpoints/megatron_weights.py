"""Converts weights between a Hugging Face checkpoint and a Megatron model, through the one weight table.

Import slices this rank's part of each tensor. Export gathers each parameter over the tensor- and
expert-parallel ranks of a pipeline stage and sends it to the other stages. Conversion tools, `model.load` and
weight sync all use these two functions.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_dppo.architectures.parameters import experts_at_once
from megatron_dppo.architectures.registry import family_of
from megatron_dppo.architectures.sizes import HFConfig
from megatron_dppo.architectures.weight_map import (
    EMBEDDING,
    OUTPUT,
    WeightEntry,
    WeightRule,
    is_adapter,
    is_weight_buffer,
)
from megatron_dppo.architectures.weight_table import WeightTable
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.errors import ConversionError
from megatron_dppo.models.lora import Adapter, Read, itself

logger = logging.getLogger(__name__)
T = TypeVar("T")


@torch.no_grad()
def load_hf_weights(chunks: Sequence[GPTModel], weights: HFWeights, hf: HFConfig) -> None:
    """Load this rank's parameters, cast to each parameter's dtype."""
    family, shapes = family_of(hf), weights.shapes()
    table = family.weight_table(hf)
    if family.sizes_of(hf).is_tied:
        shapes.pop(OUTPUT.hf[0], None)
    family.require_shapes(hf, shapes, weights.folder, weights.file_of)
    if weights.left_out and dist.get_rank() == 0:
        names = len(weights.left_out), min(weights.left_out)
        logger.info("left out: %d tensors, of vision or of further tokens' layers (first: %s)", *names)
    for parameter in _parameters(chunks, table):
        entry = table.entry(parameter.name)
        if entry.rule.is_expert:
            experts = parameter.experts()
            first = parallel_state.get_expert_model_parallel_rank() * len(experts)
            for local, target in enumerate(experts):
                _fill(target, parameter.name, entry, first + local, table, weights)
        else:
            _fill(parameter.tensors[0].detach(), parameter.name, entry, None, table, weights)


@dataclass(frozen=True, eq=False)
class _Parameter:
    name: str  # in our layer spec
    tensors: tuple[Tensor, ...]  # one tensor; if each expert is a parameter, all of this rank's experts
    is_apart: bool = False

    @property
    def shape(self) -> torch.Size:
        """Shape of `whole`."""
        own = self.tensors[0].shape
        return torch.Size((len(self.tensors), *own)) if self.is_apart else own

    def experts(self) -> list[Tensor]:
        """Return a view of each expert of this rank."""
        return [t.detach() for t in (self.tensors if self.is_apart else self.tensors[0].unbind())]

    def whole(self, read: Read) -> Tensor:
        """Return the tensor in our layer spec's shape, with LoRA's update; a copy if experts are separate."""
        if self.is_apart:
            return torch.stack([read(t.detach()) for t in self.tensors])
        (weight,) = self.tensors
        adapter: Adapter | None = getattr(weight, "adapter", None)
        base = read(weight.detach())
        return base if adapter is None else adapter.merge(base, read)


def _parameters(
    chunks: Sequence[GPTModel], table: WeightTable, tensors: Sequence[Tensor] | None = None
) -> list[_Parameter]:
    """Return this rank's parameters without LoRA's, or `tensors` in their place, with the names of one process.

    Without `tensors`, the result includes the buffers that checkpoints contain. With Transformer Engine's
    spec, names and positions of experts are converted to the names and positions of our spec.
    """
    values = iter(tensors) if tensors is not None else None
    found: dict[str, _Parameter] = {}
    for chunk in chunks:
        decoder: Any = chunk.decoder
        layers: list[int] = [layer.layer_number - 1 for layer in decoder.layers]
        named: list[tuple[str, Tensor]] = [pair for pair in chunk.named_parameters() if not is_adapter(pair[0])]
        for name, tensor in [*named, *(weight_buffers(chunk) if values is None else ())]:
            value = tensor if values is None else next(values)
            prefix, *rest = name.split(".", 3)
            if prefix == "decoder" and rest[0] == "layers":
                name = f"decoder.layers.{layers[int(rest[1])]}.{rest[2]}"
            if name == OUTPUT.megatron and table.sizes.is_tied:
                name = EMBEDDING.megatron  # the last stage's copy
            entry = table.entry(name)
            before = found[entry.name].tensors if entry.name in found else ()
            assert entry.is_one_expert or not before, f"{name} is there twice"
            found[entry.name] = _Parameter(entry.name, (*before, value), entry.is_one_expert)
    return list(found.values())


def weight_buffers(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that checkpoints contain, with their names; float32 whatever the model's dtype is."""
    yield from (pair for pair in chunk.named_buffers() if is_weight_buffer(pair[0]))


def gather_stages(value: T) -> list[T]:
    """Gather every pipeline stage's value, first stage first. Only for small picklable objects."""
    gathered: list[Any] = [None] * parallel_state.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(gathered, value, group=parallel_state.get_pipeline_model_parallel_group())
    return gathered


def _fill(
    target: Tensor, name: str, entry: WeightEntry, expert: int | None, table: WeightTable, weights: HFWeights
) -> None:
    hf_names = entry.hf_names(expert)
    rank, size = _tensor_parallel_group(entry.rule).rank(), _num_shards(entry.rule)
    parts = [
        table.part(entry.rule, index, weights.tensor(hf_name), rank, size)
        for index, hf_name in enumerate(hf_names)
    ]
    if entry.rule.is_interleaved:
        parts, places = [table.fuse(entry.rule, parts, size)], [target]
    else:
        places = table.unfuse(entry.rule, target)  # views: no byte is copied twice
    for part, place in zip(parts, places, strict=True):
        assert part.shape == place.shape, f"{name}: {tuple(place.shape)}, from a part of {tuple(part.shape)}"
        place.copy_(part)


def _tensor_parallel_group(rule: WeightRule) -> dist.ProcessGroup:
    """Return the ranks over which a parameter is split, or would be split if it had a parallel dimension."""
    if rule.is_expert:
        group: Any = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    return group


def _num_shards(rule: WeightRule) -> int:
    return 1 if rule.tensor_parallel_dim is None else _tensor_parallel_group(rule).size()


@torch.no_grad()
def export_hf_weights(
    chunks: Sequence[GPTModel],
    table: WeightTable,
    tensors: Sequence[Tensor] | None = None,
    *,
    of_own_stage: bool = False,
    max_bytes: int | None = None,
    read: Read = itself,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the model under its Hugging Face name, on every rank, in the same order.

    All ranks must call it, then iterate together: parameters are gathered one at a time. The tensors may be
    views of live parameters, so copy the tensors that you keep.

    Args:
        chunks: This rank's part of the model: one per virtual pipeline stage.
        table: The model's weight table.
        tensors: Tensors to export instead of the parameters (without LoRA's), in their order, such as their
            gradients. None exports the weights, with LoRA's updates and with buffers.
        of_own_stage: Export only this pipeline stage's tensors. Then only the ranks of one stage iterate
            together.
        max_bytes: Most bytes of a layer's experts that are gathered at a time; at least one expert of each rank
            is gathered. The order of experts depends on it.
        read: Function that returns the values of a parameter if its memory is elsewhere.
    """
    own = {parameter.name: parameter for parameter in _parameters(chunks, table, tensors)}
    places = _places(own.values())
    device = next(iter(own.values())).tensors[0].device
    stages: Any = parallel_state.get_pipeline_model_parallel_group()
    group = None if of_own_stage else stages

    @torch.no_grad()
    def export() -> Iterator[tuple[str, Tensor]]:
        for name in sorted(places, key=table.order.__getitem__):
            if of_own_stage and places[name].stage != stages.rank():
                continue
            entry = table.entry(name)
            part = own[name].whole(read) if name in own else None
            for expert, shards in _gather(part, places[name], entry.rule, group, device, max_bytes):
                pieces = zip(*(table.unfuse(entry.rule, shard) for shard in shards), strict=True)
                for index, (hf_name, of_ranks) in enumerate(zip(entry.hf_names(expert), pieces, strict=True)):
                    yield hf_name, table.join(entry.rule, index, of_ranks)

    return export()


def describe_hf_weights(
    chunks: Sequence[GPTModel], table: WeightTable, *, of_own_stage: bool = False
) -> dict[str, Tensor]:
    """Return the tensors of `export_hf_weights` without data; all ranks must call it."""
    found = dict[str, Tensor]()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    experts: Any = parallel_state.get_expert_model_parallel_group()
    for name, place in _places(_parameters(chunks, table)).items():
        if of_own_stage and place.stage != stage:
            continue
        entry = table.entry(name)
        rule, count = entry.rule, place.shape[0] * experts.size() if entry.rule.is_expert else 1
        shard = torch.empty(
            place.shape[1:] if rule.is_expert else place.shape, dtype=place.dtype, device="meta"
        )
        pieces = [
            table.join(rule, index, [part] * _num_shards(rule))
            for index, part in enumerate(table.unfuse(rule, shard))
        ]
        for expert in range(count):
            for hf_name, piece in zip(entry.hf_names(expert if rule.is_expert else None), pieces, strict=True):
                if hf_name in found:
                    raise ConversionError(
                        f"{hf_name}: two parameters hold it. Correct architectures/weight_map.py."
                    )
                found[hf_name] = piece
    return found


@dataclass(frozen=True)
class _Place:
    """Location of a parameter: its first pipeline stage, and shape and dtype on each rank."""

    stage: int
    shape: torch.Size
    dtype: torch.dtype


def _places(parameters: Iterable[_Parameter]) -> dict[str, _Place]:
    """Return the location of every parameter of the model; the first stage's location for tied layers."""
    own = {p.name: (p.shape, p.tensors[0].dtype) for p in parameters}
    places: dict[str, _Place] = {}
    for stage, described in enumerate(gather_stages(own)):
        for name, (shape, dtype) in described.items():
            places.setdefault(name, _Place(stage, shape, dtype))
    return places


def _gather(
    own: Tensor | None,
    place: _Place,
    rule: WeightRule,
    stages: Any,
    device: torch.device,
    max_bytes: int | None,
) -> Iterator[tuple[int | None, Tensor]]:
    """Yield each expert with its parts [tensor-parallel ranks, ...]; yield other parameters as one part."""
    experts: Any = parallel_state.get_expert_model_parallel_group()
    num_holders = experts.size() if rule.is_expert else 1
    local = place.shape if rule.is_expert else torch.Size((1, *place.shape))
    of_ranks = place.dtype.itemsize * local[1:].numel() * num_holders * _num_shards(rule)
    step = experts_at_once(local[0], of_ranks, max_bytes)
    for start in range(0, local[0], step):
        count = min(step, local[0] - start)
        piece = own.view(local)[start : start + count] if own is not None else None
        shape = torch.Size((count, *local[1:]))
        parts = _gather_piece(piece, _Place(place.stage, shape, place.dtype), rule, stages, device)
        for index, shards in enumerate(parts):
            holder, place_there = divmod(index, count)
            yield (holder * local[0] + start + place_there if rule.is_expert else None), shards


def _gather_piece(
    own: Tensor | None, place: _Place, rule: WeightRule, stages: Any, device: torch.device
) -> Tensor:
    """Gather the parts of some experts of each rank: [experts, tensor-parallel ranks, ...]."""
    num_shards = _num_shards(rule)
    experts: Any = parallel_state.get_expert_model_parallel_group()
    num_holders = experts.size() if rule.is_expert else 1
    if stages is None or stages.rank() == place.stage:
        assert own is not None
        parts = own[None]
        if num_shards > 1:
            parts = all_gather_rows(parts, _tensor_parallel_group(rule))
        parts = parts.transpose(0, 1)
        if num_holders > 1:
            parts = all_gather_rows(parts, experts)
    else:
        shape = (place.shape[0] * num_holders, num_shards, *place.shape[1:])
        parts = torch.empty(shape, dtype=place.dtype, device=device)
    if stages is not None and stages.size() > 1:
        parts = parts.contiguous()
        dist.broadcast(parts, src=dist.get_global_rank(stages, place.stage), group=stages)
    return parts


def all_gather_rows(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [n, ...] of each rank -> [ranks * n, ...] in rank order."""
    gathered = own.new_empty(group.size() * own.shape[0], *own.shape[1:])
    dist.all_gather_into_tensor(gathered, own.contiguous(), group=group)
    return gathered
