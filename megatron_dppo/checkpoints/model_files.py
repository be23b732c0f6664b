"""Copies the files next to a model's weights, and sets the weights' dtype in config.json."""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.architectures.family import FURTHER_LAYERS
from megatron_dppo.architectures.published_names import stays_float32
from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.architectures.sizes import architecture_of

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
    prediction are removed from config.json, because the weights leave them out.

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
    if isinstance(content, dict) and (without := _without_further_layers(content)) != content:
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
    """Return the dtype of most elements, ignoring tensors that always stay float32.

    Args:
        num_elements: Name, dtype and number of elements of each tensor; at least one tensor.
    """
    found: Counter[torch.dtype] = Counter()
    for name, dtype, number in num_elements:
        found[dtype] += 0 if stays_float32(name) else number
    return found.most_common(1)[0][0]
