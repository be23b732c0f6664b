"""Converts LoRA adapters of a Megatron checkpoint to a folder in peft's format."""

import logging
from pathlib import Path

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.registry import read_hf_config
from megatron_dppo.checkpoints.checkpoint_folder import is_megatron_checkpoint
from megatron_dppo.checkpoints.convert.sources import trained_from
from megatron_dppo.checkpoints.lora_files import adapter_tensors, write_adapter
from megatron_dppo.checkpoints.megatron_folder import load_weights, stored_dtype, stored_lora
from megatron_dppo.errors import ConfigError, ConversionError, Problem
from megatron_dppo.mcore import cpu, fixes
from megatron_dppo.mcore.groups import initialize_groups, megatron_sizes
from megatron_dppo.models.build import build_model, transformer_config
from megatron_dppo.models.lora import add_lora

logger = logging.getLogger(__name__)


def write_peft_adapter(megatron: Path, out: Path, base: str) -> None:
    """Build the complete model in this process, load weights and adapters, and write the adapters.

    Args:
        megatron: A checkpoint of a LoRA run.
        out: Folder to write.
        base: Name or folder of the base model, for the adapter's config. "" means the run's `model.load`.

    Raises:
        ConversionError: The checkpoint contains no adapters.
        ConfigError: The base model is a Megatron checkpoint, which peft cannot load.
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
