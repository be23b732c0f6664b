"""Exports LoRA adapters of a Megatron checkpoint under Hugging Face names, as a folder that peft reads."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megatron_dppo.checkpoints.checkpoint_folder import is_megatron_checkpoint
from megatron_dppo.checkpoints.convert.sources import MegatronSource, trained_from
from megatron_dppo.checkpoints.hf_folder import whole_folder
from megatron_dppo.checkpoints.megatron_folder import stored_lora
from megatron_dppo.config.schema import LoraConfig
from megatron_dppo.errors import ConfigError, ConversionError, Problem
from megatron_dppo.runtime.files import save_tensors

logger = logging.getLogger(__name__)


def write_peft_adapter(megatron: Path, out: Path, base: str) -> None:
    """Read the adapters of a checkpoint, and write them.

    Args:
        megatron: A checkpoint of a LoRA run.
        out: Folder to write.
        base: Name or folder of the base model, for the adapter's config. "" means the run's `model.load`.
    """
    source, options = MegatronSource(megatron), stored_lora(megatron)
    if options is None:
        raise ConversionError(f"{megatron} holds no LoRA adapters. Use to-hf for its weights.")
    named = _base_name(megatron, base)
    logger.info("reading %s", megatron)
    tensors: dict[str, Tensor] = {}
    for name, adapter in source.adapters():
        for factor, tensor in (("lora_A", adapter.lora_a), ("lora_B", adapter.lora_b)):
            tensors[f"{name.removesuffix('.weight')}.{factor}.weight"] = tensor.contiguous()
    write_adapter(tensors, options, out, named)


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


def write_adapter(tensors: Mapping[str, Tensor], options: LoraConfig, out: Path, base: str) -> None:
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
