"""The factors of a model's LoRA adapters, gathered from all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_dppo.checkpoints.megatron_weights import all_gather_rows, gather_stages
from megatron_dppo.models.lora import Adapter, adapters


@torch.no_grad()
def adapter_tensors(
    chunks: Sequence[GPTModel], value: Callable[[Tensor], Tensor] = Tensor.detach
) -> dict[str, Tensor]:
    """Return every unsplit factor on each rank's CPU, as "model.layers.0.self_attn.q_proj.lora_A.weight".

    All ranks must call this together.

    Args:
        chunks: This rank's part of the model, with adapters.
        value: Function that returns the tensor to export for a factor, of the same shape, such as its gradient.
    """
    own: dict[str, Tensor] = {}
    for adapter in adapters(chunks):
        for index, name in enumerate(linear.split(".")[-2] for linear in adapter.entry.rule.hf):
            for factor in ("lora_A", "lora_B") if name in adapter.pairs else ():
                whole = _gather(adapter, factor, value(getattr(adapter.pairs[name], factor)))
                for expert, tensor in enumerate(whole if adapter.entry.rule.is_expert else [whole]):
                    module = adapter.entry.hf_names(expert)[index].removesuffix(".weight")
                    own[f"{module}.{factor}.weight"] = tensor.contiguous().cpu()
    return {name: tensor for stage in gather_stages(own) for name, tensor in stage.items()}


def _gather(adapter: Adapter, factor: str, tensor: Tensor) -> Tensor:
    """Gather a factor of all experts and of all tensor-parallel ranks."""
    dim, is_expert = adapter.split_dim(factor), adapter.entry.rule.is_expert
    if dim is not None and is_expert:
        tensor = _join(tensor, 1 + dim, parallel_state.get_expert_tensor_parallel_group())
    elif dim is not None:
        tensor = _join(tensor, dim, parallel_state.get_tensor_model_parallel_group())
    return _join(tensor, 0, parallel_state.get_expert_model_parallel_group()) if is_expert else tensor


def _join(tensor: Tensor, dim: int, group: Any) -> Tensor:
    return torch.cat(all_gather_rows(tensor, group).chunk(group.size()), dim)
