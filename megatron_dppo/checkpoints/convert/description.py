"""Reads and writes the files next to a checkpoint's weights: config.json and tokenizer."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.architectures.published_names import BLOCK
from megatron_dppo.architectures.registry import (
    QUANTIZED,
    family_of,
    is_block_fp8,
    of_dequantized,
    variant_problems,
)
from megatron_dppo.architectures.sizes import config_file, read_model_config
from megatron_dppo.checkpoints.model_files import copy_model_files, name_dtype
from megatron_dppo.errors import ConfigError, ConversionError

logger = logging.getLogger(__name__)


def read_convertible_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a folder to convert, adjusted to the converted weights.

    The entry for block-wise 8-bit weights is left out, because these weights become bfloat16 when they are
    read.

    Raises:
        ConfigError: There is no config.json, it is torn, or it describes a variant that is not implemented.
    """
    path, content = read_model_config(folder)
    hf = _of_dequantized(content, path)
    family_of(hf)
    problems = list(variant_problems(hf))
    if problems:
        raise ConfigError(problems)
    return hf


def description_of(folder: Path) -> tuple[dict[str, Any], Path]:
    """Read the config to convert with, and find the folder with config.json and tokenizer.

    Args:
        folder: A Hugging Face folder or a Megatron checkpoint.

    Returns:
        Result of `read_convertible_config`, and the folder that contains config.json and tokenizer.

    Raises:
        ConfigError: `read_convertible_config` refuses the config.
    """
    hf, path = read_convertible_config(folder), config_file(folder)
    assert path is not None, "it was read"
    return hf, path.parent


def write_description(template: Path, out: Path, dtype: torch.dtype | None = None) -> None:
    """Copy config, tokenizer and licence, and log the files that are not copied.

    config.json is copied byte for byte, unless it describes 8-bit weights, layers for multi-token prediction or
    another dtype.

    Args:
        template: A Hugging Face folder, or a Megatron checkpoint's `hf/`.
        out: Folder to write to; it is created if it is missing.
        dtype: Dtype of the tensors, for config.json. None keeps the template's.
    """
    others = copy_model_files(template, out)
    if others:
        logger.info("not copied: %s", ", ".join(others))
    path = out / "config.json"
    content = json.loads(path.read_text())
    if QUANTIZED in content:
        path.write_text(json.dumps(_of_dequantized(content, path), indent=2) + "\n")
    if dtype is not None:
        name_dtype(path, dtype)


def _of_dequantized(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    quantized = content.get(QUANTIZED)
    if quantized is not None and not is_block_fp8(quantized):
        table: Mapping[str, Any] = quantized if isinstance(quantized, Mapping) else {}
        found = (table.get("quant_method"), table.get("weight_block_size"))
        raise ConversionError(
            f"{path}: {QUANTIZED} with quant_method {found[0]!r} and weight_block_size {found[1]!r}. Expected "
            f"'fp8' with [{BLOCK}, {BLOCK}], or unquantised weights: convert the model's bfloat16 checkpoint."
        )
    return of_dequantized(content)
