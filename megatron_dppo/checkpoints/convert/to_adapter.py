"""Exports LoRA adapters of a Megatron checkpoint under Hugging Face names, as a folder that peft reads."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.registry import read_hf_config
from megatron_dppo.checkpoints.checkpoint_folder import is_megatron_checkpoint
from megatron_dppo.checkpoints.convert.sources import trained_from
from megatron_dppo.checkpoints.hf_folder import whole_folder
from megatron_dppo.checkpoints.megatron_folder import load_weights, stored_dtype, stored_lora
from megatron_dppo.checkpoints.megatron_weights import all_gather_rows, gather_stages
from megatron_dppo.config.schema import LoraConfig
from megatron_dppo.errors import ConfigError, ConversionError, Problem
from megatron_dppo.mcore import cpu, fixes
from megatron_dppo.mcore.groups import initialize_groups, megatron_sizes
from megatron_dppo.models.build import build_model, transformer_config
from megatron_dppo.models.lora import Adapter, adapters, add_lora
from megatron_dppo.runtime.files import save_tensors

logger = logging.getLogger(__name__)


def write_peft_adapter(megatron: Path, out: Path, base: str) -> None:
    """Build the complete model in this process, load weights and adapters, and write the adapters.

    Args:
        megatron: A checkpoint of a LoRA run.
        out: Folder to write.
        base: Name or folder of the base model, for the adapter's config. "" means the run's `model.load`.
    """
    dtype, hf = stored_dtype(megatron), read_hf_config(megatron)
    options = stored_lora(megatron)
    if options is None:
        raise ConversionError(f"{megatron} holds no LoRA adapters. Use to-hf for its weights.")
    named = _base_name(megatron, base)
    cpu.install()
    fixes.apply()
    layout = Layout(world_size=1)
    initialize_groups(layout, seed=0)
    model = build_model(hf, transformer_config(hf, dtype, megatron_sizes(layout), {}))
    add_lora(model, hf, options, seed=0)
    logger.info("reading %s", megatron)
    load_weights(model, megatron, hf)
    write_adapter(adapter_tensors(model), options, out, named)


def _base_name(megatron: Path, base: str) -> str:
    named = base or str(trained_from(megatron) or "")
    if not named:
        logger.warning("%s is in no run's folder; --base would name the base model in the adapter", megatron)
    elif is_megatron_checkpoint(Path(named)):
        found = f"{named}, a Megatron checkpoint" + ("" if base else ", as the run's model.load")
        expected = "the name or folder of a Hugging Face model, which peft loads below the adapter"
        action = "Give the folder that it was converted from, or one that convert to-hf writes, as --base."
        raise ConfigError(Problem("--base", found, expected, action))
    return named


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


def write_adapter(tensors: dict[str, Tensor], options: LoraConfig, out: Path, base: str) -> None:
    """Write an adapter folder that peft loads; it appears completely or not at all.

    `base` names the base model for the reader of the adapter.
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
