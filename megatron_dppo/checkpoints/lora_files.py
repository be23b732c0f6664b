"""Exports LoRA adapters under Hugging Face names, and as a folder that peft reads."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_dppo.checkpoints.hf_folder import whole_folder
from megatron_dppo.config.schema import LoraConfig
from megatron_dppo.models.lora import Adapter, adapters
from megatron_dppo.runtime.files import save_tensors


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
                whole = _gathered(adapter, factor, value(getattr(adapter.pairs[name], factor)))
                for expert, tensor in enumerate(whole if adapter.entry.rule.is_expert else [whole]):
                    module = adapter.entry.hf_names(expert)[index].removesuffix(".weight")
                    own[f"{module}.{factor}.weight"] = tensor.contiguous().cpu()
    stages: list[Any] = [None] * parallel_state.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(stages, own, group=parallel_state.get_pipeline_model_parallel_group())
    return {name: tensor for stage in stages for name, tensor in stage.items()}


def _gathered(adapter: Adapter, factor: str, tensor: Tensor) -> Tensor:
    """Gather a factor of all experts and of all tensor-parallel ranks."""
    dim, is_expert = adapter.split_dim(factor), adapter.entry.rule.is_expert
    if dim is not None and is_expert:
        tensor = _joined(tensor, 1 + dim, parallel_state.get_expert_tensor_parallel_group())
    elif dim is not None:
        tensor = _joined(tensor, dim, parallel_state.get_tensor_model_parallel_group())
    return _joined(tensor, 0, parallel_state.get_expert_model_parallel_group()) if is_expert else tensor


def _joined(tensor: Tensor, dim: int, group: Any) -> Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim)


def write_adapter(tensors: dict[str, Tensor], options: LoraConfig, out: Path, base: str) -> None:
    """Write an adapter folder that peft loads; it appears completely or not at all.

    Args:
        tensors: Result of `adapter_tensors`.
        options: `[lora]` of the training run.
        out: Folder to create.
        base: Folder or name of the adapter's base model, as information for the reader.

    Raises:
        ConversionError: `out` exists already.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "target_modules": list(options.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    with whole_folder(out) as unfinished:
        (unfinished / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
        save_tensors(named, unfinished / "adapter_model.safetensors", metadata={"format": "pt"})
