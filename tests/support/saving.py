"""Writes Megatron checkpoints of weights or of any sharded state, from a single process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.models.gpt import GPTModel

from megatron_dppo.checkpoints.checkpoint_folder import WEIGHTS
from megatron_dppo.checkpoints.hf_folder import whole_folder
from megatron_dppo.checkpoints.megatron_folder import HF, model_states
from megatron_dppo.checkpoints.megatron_save import PendingSave
from megatron_dppo.checkpoints.model_files import copy_model_files


def save_weights(chunks: Sequence[GPTModel], out: Path, template: Path) -> None:
    """Write a Megatron checkpoint of only weights, completely or not at all, from one process.

    Config and tokenizer are copied from `template`, a Hugging Face folder, into `hf/`.
    """
    with whole_folder(out) as unfinished:
        (unfinished / WEIGHTS).mkdir()
        copy_model_files(template, unfinished / HF)
        save_sharded(model_states(chunks), unfinished / WEIGHTS)


def save_sharded(state: dict[str, Any], folder: Path) -> None:
    """Save into an existing empty folder from a single process; return when the bytes are on disk."""
    save = PendingSave(state, folder, is_copied=False)
    save.write()
    save.finish()
