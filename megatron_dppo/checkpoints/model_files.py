"""The files of a Hugging Face folder: chooses the files with the weights, and copies the files next to them.

Two sets of weights are refused. config.json gets the dtype and the layers of the weights that are written.
"""

import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.architectures.family import FURTHER_LAYERS
from megatron_dppo.architectures.published_names import SCALES, stays_float32
from megatron_dppo.architectures.registry import (
    FAMILIES,
    QUANTIZED,
    family_of,
    of_dequantized,
    read_hf_config,
)
from megatron_dppo.architectures.sizes import architecture_of, config_file, text_model
from megatron_dppo.checkpoints.checkpoint_folder import is_megatron_checkpoint
from megatron_dppo.errors import ConversionError, Problem

logger = logging.getLogger(__name__)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ADAPTER = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin")
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")


class WeightFilesError(ConversionError):
    """The files of a folder are not one complete set of weights; `problem` describes why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True)
class WeightFiles:
    """Files of a Hugging Face folder.

    Attributes:
        read: Names of the files that hold the weights.
        ignored: Names of files with weights that are not read: pickles, and files that the index does not name.
    """

    read: tuple[str, ...]
    ignored: tuple[str, ...]


def weight_files(folder: Path, named: Iterable[str] | None) -> WeightFiles:
    """Choose the files that contain a folder's weights, only by their names.

    Without an index, `named` is None.
    """
    there = sorted(file.name for file in folder.glob("*.safetensors") if file.is_file())
    adapter = [name for name in _ADAPTER if (folder / name).is_file()]
    if adapter:
        expected = "a model's weights alone: an adapter is not applied when a model is read"
        action = "Move the adapter to another folder, or add it with megatron-dppo convert merge-adapter."
        raise WeightFilesError(Problem(str(folder), f"{_list(adapter)}, an adapter,", expected, action))
    found = _without_index(folder, there) if named is None else _of_index(folder, there, sorted(set(named)))
    if isinstance(found, Problem):
        raise WeightFilesError(found)
    others = [name for name in there if name not in found]
    pickles = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    return WeightFiles(tuple(found), (*others, *pickles))


def _of_index(folder: Path, there: Sequence[str], named: Sequence[str]) -> Sequence[str] | Problem:
    missing = [name for name in named if name not in there]
    others = [files for files in _sets(name for name in there if name not in named) if not _lacking(files)]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        found = f"{INDEX}, which names {_list(missing)}: {len(missing)} of {len(named)} files {are} not there"
        action = "Download the missing files."
        if others:
            found += f", and {_list(others[0])} is, which it does not name"
            action = (
                f"Remove {INDEX} if {_list(others[0])} has the model. Otherwise download the missing files."
            )
        return Problem(str(folder), found, "the files of the index", action)
    if others:
        found = f"two sets of weights, {_date(folder, others[0])} and {_date(folder, named)}"
        expected = "one, because programs differ in the set that they read"
        action = f"Remove {_list(others[0])}, or remove {INDEX} and the files that it names."
        return Problem(str(folder), found, expected, action)
    return named


def _without_index(folder: Path, there: Sequence[str]) -> Sequence[str] | Problem:
    if not there and is_megatron_checkpoint(folder):
        action = f"Run megatron-dppo convert to-hf --megatron {folder} --out NEW, and name NEW."
        return Problem(str(folder), "a Megatron checkpoint", "a Hugging Face folder", action)
    if not there:
        expected = "a Hugging Face checkpoint in that format (pickled .bin files are not read)"
        return Problem(str(folder), "no *.safetensors files", expected, "Save it again with save_pretrained.")
    sets = _sets(there)
    whole = [files for files in sets if not _lacking(files)]
    if len(whole) > 1:
        found = f"{len(whole)} sets of weights and no {INDEX}: {' and '.join(_date(folder, x) for x in whole)}"
        return Problem(str(folder), found, "one set", "Remove the files of the others.")
    torn = next((files for files in sets if _lacking(files)), None)
    if torn is not None:
        action = f"Remove {_list(torn)} if {_list(whole[0])} has the model." if whole else "Download them."
        found = f"{_list(torn)} without {_list(_lacking(torn))}"
        return Problem(str(folder), found, "all files of a set", action)
    return there


def _sets(names: Iterable[str]) -> list[list[str]]:
    """Return the files that make up a checkpoint by their names: `model.safetensors`, and numbered shards."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        shard = _SHARD.fullmatch(name)
        if name == SINGLE or (shard is not None and not name.startswith("consolidated")):
            found.setdefault((shard[1], shard[3]) if shard is not None else (name, ""), []).append(name)
    return list(found.values())


def _lacking(files: Sequence[str]) -> list[str]:
    """Return the names of the shards that a set lacks."""
    shards = [match for match in map(_SHARD.fullmatch, files) if match is not None]
    if not shards:
        return []
    prefix, width, count = shards[0][1], len(shards[0][2]), shards[0][3]
    there = {int(match[2]) for match in shards}
    first = 0 if 0 in there else 1
    numbers = (number for number in range(first, first + int(count)) if number not in there)
    return [f"{prefix}-{number:0{width}d}-of-{count}.safetensors" for number in numbers]


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]} ({len(names)} files)"


def _date(folder: Path, names: Sequence[str]) -> str:
    newest = max((folder / name).stat().st_mtime for name in names)
    return f"{_list(names)} (written {datetime.fromtimestamp(newest).isoformat(' ', 'minutes')})"


_DTYPES = ("dtype", "torch_dtype")  # as transformers 5 and 4 spell it
_BESIDE_WEIGHTS = (
    *("config.json", "generation_config.json", "*processor_config.json"),
    *("tokenizer*", "tokenization*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json"),
    *("*.tiktoken", "*.model", "tekken.json", "*.jinja", "chat_template*", "additional_chat_templates/*.jinja"),
    *("license*", "licence*", "notice*", "copying*", "copyright*", "patents*", "*policy*", "third*party*"),
)
"""Patterns of the files that belong to a model whatever its weights become, in lower case."""
_WEIGHTS = (
    *("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack"),
    *("adapter_*", "quantization_record.json"),
)


def copy_model_files(source: Path, out: Path) -> list[str]:
    """Copy the files next to the weights: config, generation config, tokenizer, chat templates, licences.

    Files are copied byte for byte, with the mode of a new file, with one exception: layers for multi-token
    prediction, and vision, are removed from config.json, because the weights leave them out.

    Returns:
        Names of the files in the folder that are not copied and contain no weights.
    """
    out.mkdir(parents=True, exist_ok=True)
    there = sorted(file for file in (*source.glob("*"), *source.glob("additional_chat_templates/*")))
    names = [str(file.relative_to(source)) for file in there if file.is_file()]
    copied = [name for name in names if _matches(name, _BESIDE_WEIGHTS)]
    for name in copied:
        target = out / name
        target.parent.mkdir(exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copyfile(source / name, target)
    config = out / "config.json"
    content = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if isinstance(content, dict) and (without := _without_further_layers(text_model(content))) != content:
        config.write_text(json.dumps(without, indent=2) + "\n", encoding="utf-8")
    return [name for name in names if name not in copied and not _matches(name, (*_WEIGHTS, ".*"))]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name.lower(), pattern) for pattern in patterns)


def _without_further_layers(content: dict[str, Any]) -> dict[str, Any]:
    family = FAMILIES.get(architecture_of(content))
    completed = content if family is None else family.completed(content)
    if not completed.get(FURTHER_LAYERS):
        return content
    spellings = {} if family is None else family.spellings
    kept = {key: value for key, value in content.items() if spellings.get(key) != FURTHER_LAYERS}
    return kept | {FURTHER_LAYERS: 0}


def name_dtype(config: Path, dtype: torch.dtype) -> None:
    """Set the tensors' dtype in a config.json, under its key; a file with this dtype is not changed."""
    content = json.loads(config.read_text(encoding="utf-8"))
    named = with_dtype(content, str(dtype).removeprefix("torch."))
    if named != content:
        config.write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")


def with_dtype(content: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config.json with `dtype` or `torch_dtype`, also in its sections, set to the tensors' dtype."""
    is_older = str(content.get("transformers_version", "")).startswith("4.")
    keys = [key for key in _DTYPES if key in content] or ["torch_dtype" if is_older else "dtype"]
    parts = {
        key: with_dtype(part, dtype)
        for key, part in content.items()
        if key.endswith("_config") and isinstance(part, Mapping) and any(name in part for name in _DTYPES)
    }
    return {**content, **parts, **dict.fromkeys(keys, dtype)}


def main_dtype(num_elements: Iterable[tuple[str, torch.dtype, int]]) -> torch.dtype:
    """Return the dtype of most elements, ignoring tensors that always stay float32, and quantised ones.

    Args:
        num_elements: Name, dtype and number of elements of each tensor; at least one tensor.
    """
    found: Counter[torch.dtype] = Counter()
    for name, dtype, number in num_elements:
        is_of_model = not stays_float32(name) and dtype.itemsize > 1 and not name.endswith(SCALES)
        found[dtype] += is_of_model * number
    return found.most_common(1)[0][0]


def read_convertible_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a folder to convert, like `read_hf_config`; a family must implement it."""
    hf = read_hf_config(folder)
    family_of(hf)
    return hf


def description_of(folder: Path) -> tuple[dict[str, Any], Path]:
    """Read the config to convert with, and find the folder with config.json and tokenizer.

    Returns:
        Result of `read_convertible_config`, and the folder that contains config.json and tokenizer.
    """
    hf, path = read_convertible_config(folder), config_file(folder)
    assert path is not None, "it was read"
    return hf, path.parent


def write_description(template: Path, out: Path, dtype: torch.dtype | None = None) -> None:
    """Copy config, tokenizer and licence, and log the files that are not copied.

    config.json is copied byte for byte, unless it describes 8-bit or 4-bit weights, layers for multi-token
    prediction or another dtype.

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
        path.write_text(json.dumps(of_dequantized(content), indent=2) + "\n")
    if dtype is not None:
        name_dtype(path, dtype)
