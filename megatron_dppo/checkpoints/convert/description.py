"""Reads and writes the files beside a checkpoint's weights: config.json and tokenizer."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.architectures.published_names import BLOCK
from megatron_dppo.architectures.refusals import QUANTIZED, is_block_fp8, of_dequantized
from megatron_dppo.architectures.registry import family_of, variant_problems
from megatron_dppo.architectures.sizes import config_file, read_model_config
from megatron_dppo.checkpoints.model_files import copy_model_files, name_dtype
from megatron_dppo.errors import ConfigError, ConversionError

logger = logging.getLogger(__name__)


def read_convertible_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a folder to convert, adjusted to the converted weights.

    Block-wise 8-bit weights become bfloat16 when they are read, so the entry that describes them is left out.

    Raises:
        ConfigError: There is none, it is torn, or it describes a model that we would compute wrongly.
    """
    path, content = read_model_config(folder)
    hf = _of_dequantized(content, path)
    family_of(hf)
    problems = list(variant_problems(hf))
    if problems:
        raise ConfigError(problems)
    return hf


def description_of(folder: Path) -> tuple[dict[str, Any], Path]:
    """Read the config to convert with, and find the folder of the files beside it.

    Args:
        folder: A Hugging Face folder or a Megatron checkpoint.

    Returns:
        The config as `read_convertible_config` does, and the folder that holds config.json and tokenizer.

    Raises:
        ConfigError: As `read_convertible_config` does.
    """
    hf, path = read_convertible_config(folder), config_file(folder)
    assert path is not None, "it was read"
    return hf, path.parent


def write_description(template: Path, out: Path, dtype: torch.dtype | None = None) -> None:
    """Copy config, tokenizer and licence, and name the files that are not copied.

    config.json is copied byte for byte, unless it is of 8-bit weights, of further layers or of another dtype.

    Args:
        template: A Hugging Face folder, or a Megatron checkpoint's `hf/`.
        out: A folder, made where it is missing.
        dtype: The type of the tensors, which config.json names. None keeps the template's.
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
