"""Weights between a Hugging Face checkpoint and a Megatron model, through the one weight table.

Import slices what this rank owns; export gathers experts over the expert-parallel group, parameter by
parameter. Conversion tools, `model.load` and weight sync all use these two functions.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_dppo.actor.layout import model_sizes
from megatron_dppo.errors import ConversionError
from megatron_dppo.models.family import HFConfig, family_of
from megatron_dppo.models.hf_checkpoint import HFWeights
from megatron_dppo.models.weight_map import WeightEntry, WeightTable


@torch.no_grad()
def load_hf_weights(model: GPTModel, weights: HFWeights, hf: HFConfig) -> None:
    """Fill this rank's parameters; a cast to the parameter's dtype is the only change.

    Raises:
        ConversionError: A tensor is missing, left over, or of another shape.
    """
    table = family_of(hf).weight_table(hf)
    _require_same_names(model, weights, hf, table)
    for name, parameter in model.named_parameters():
        entry = table.entry(name)
        if entry.rule.is_expert:
            first = parallel_state.get_expert_model_parallel_rank() * parameter.shape[0]
            for local in range(parameter.shape[0]):
                _fill(parameter[local], name, entry, first + local, table, weights)
        else:
            _fill(parameter, name, entry, None, table, weights)


def _require_same_names(model: GPTModel, weights: HFWeights, hf: HFConfig, table: WeightTable) -> None:
    expected = set(table.hf_names((name for name, _ in model.named_parameters()), model_sizes(hf).num_experts))
    found = weights.names - ({"lm_head.weight"} if hf.get("tie_word_embeddings") else set())
    missing, extra = sorted(expected - found), sorted(found - expected)
    if missing or extra:
        raise ConversionError(
            f"{weights.folder}: {len(missing)} tensors are missing (first: {missing[:3]}) and {len(extra)} are "
            f"left over (first: {extra[:3]}). The weights do not belong to the config.json beside them."
        )


def _fill(
    target: Tensor, name: str, entry: WeightEntry, expert: int | None, table: WeightTable, weights: HFWeights
) -> None:
    hf_names = entry.hf_names(expert)
    value = table.fuse(entry.rule, [weights.tensor(hf_name) for hf_name in hf_names])
    if value.shape != target.shape:
        raise ConversionError(
            f"{name}: Megatron expects {tuple(target.shape)}, {' + '.join(hf_names)} give "
            f"{tuple(value.shape)}. The weights do not belong to the config.json beside them."
        )
    target.copy_(value)


@torch.no_grad()
def export_hf_weights(
    model: GPTModel, hf: HFConfig, tensors: Sequence[Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model under its Hugging Face name, on every rank, in the same order.

    All ranks must iterate together: stacked experts are gathered one parameter at a time. The tensors may be
    views of live parameters; copy what you keep.

    Args:
        model: This rank's part of the model.
        hf: The model's config.json.
        tensors: What to export in the place of the parameters and in their order, such as their gradients.
    """
    table = family_of(hf).weight_table(hf)
    names = [name for name, _ in model.named_parameters()]
    for name, tensor in zip(names, model.parameters() if tensors is None else tensors, strict=True):
        entry = table.entry(name)
        if not entry.rule.is_expert:
            yield from zip(entry.hf_names(), table.unfuse(entry.rule, tensor.detach()), strict=True)
            continue
        for expert, one in enumerate(_gather_experts(tensor.detach())):
            yield from zip(entry.hf_names(expert), table.unfuse(entry.rule, one), strict=True)


def _gather_experts(stacked: Tensor) -> Tensor:
    """[local experts, …] of this rank -> [all experts, …], over the expert-parallel group."""
    size = parallel_state.get_expert_model_parallel_world_size()
    if size == 1:
        return stacked
    gathered = stacked.new_empty(size * stacked.shape[0], *stacked.shape[1:])
    dist.all_gather_into_tensor(
        gathered, stacked.contiguous(), group=parallel_state.get_expert_model_parallel_group()
    )
    return gathered
