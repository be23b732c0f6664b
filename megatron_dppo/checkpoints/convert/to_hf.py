"""Converts any source to a Hugging Face folder that transformers and SGLang read, file by file."""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_dppo.checkpoints.checkpoint_folder import STATE
from megatron_dppo.checkpoints.convert.output import (
    UnfinishedOutput,
    WriteOptions,
    disk_errors,
    fingerprint,
    run_jobs,
)
from megatron_dppo.checkpoints.convert.sources import WeightSource, as_published, float32_parts
from megatron_dppo.checkpoints.model_files import INDEX, main_dtype, name_dtype, write_description
from megatron_dppo.runtime.files import save_tensors
from megatron_dppo.runtime.process import Runtime

_HEAD = """---
library_name: transformers
tags:
- reinforcement-learning
- megatron_dppo
---

# {name}

{base}, trained by reinforcement learning with megatron_dppo. `megatron-dppo convert to-hf` made this page.

| | |
|---|---|
"""


@dataclass
class Shard:
    """Contents of one file: groups of names that are read together, in order."""

    groups: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    num_bytes: int = 0


def write_hf(
    source: WeightSource,
    template: Path,
    out: Path,
    options: WriteOptions,
    runtime: Runtime,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write a Hugging Face folder, completely or not at all; every process calls this together.

    An interrupted earlier start is resumed if source, options and texts are the same. A process holds one
    file's tensors per writer. Config, tokenizer and licence are copied from `template`.

    Args:
        source: Tensors to write.
        template: Folder with config, tokenizer and licence.
        out: Folder to write.
        options: Options of writing.
        runtime: This process's runtime.
        texts: Contents of text files by name, which replace the template's.
    """
    source = as_published(source, template)
    if options.rounding.base is not None:
        options.rounding.base = as_published(options.rounding.base, template)
    parts = float32_parts(source, template)
    runtime.on_main(lambda: options.log_rounded(parts))
    outline = source.outline().items()
    sizes = {name: tensor.numel() * options.dtype_of(name, tensor).itemsize for name, tensor in outline}
    written = [(name, options.dtype_of(name, tensor), tensor.numel()) for name, tensor in outline]
    shards = plan_shards(source.groups(), sizes, options.file_bytes)
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    plan = {
        "from": fingerprint(source.files),
        "dtype": str(options.dtype),
        "files": [[name for group in shard.groups for name in group] for shard in shards],
        "texts": dict(texts or {}),
    }
    output = runtime.on_main(lambda: UnfinishedOutput(out, plan, sum(sizes.values())))
    jobs = list(zip(files, shards, strict=True))[runtime.rank :: runtime.world_size]
    run_jobs(runtime, jobs, partial(_write_shard, source, output, options), options.num_writers)

    def publish() -> None:
        file_of = {
            name: file
            for file, shard in zip(files, shards, strict=True)
            for group in shard.groups
            for name in group
        }
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(file_of.items()))}
        output.write(INDEX, lambda path: path.write_text(json.dumps(index, indent=1)))
        with disk_errors(output.folder):
            write_description(template, output.folder)
            for name, text in (texts or {}).items():
                output.file(name).write_text(text, encoding="utf-8")
            name_dtype(output.file("config.json"), main_dtype(written))
            output.publish()

    runtime.on_main(publish)


def model_card(checkpoint: Path, name: str) -> dict[str, str]:
    """Return the README of a model from a run's checkpoint, by its name; empty if no run wrote the checkpoint.

    It has the base model, the training in numbers and a hash of all settings; names of files, and no paths.

    Args:
        checkpoint: Folder in a run's `checkpoints/`.
        name: Name of the model.
    """
    try:
        kept: Mapping[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        of_run = checkpoint.resolve().parents[1] / "config.toml"
        state, settings = kept["state"], kept["config"] or of_run.read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    config = tomllib.loads(settings)
    model, data, algorithm = config["model"], config["data"], dict(config["algorithm"])
    base, lora = Path(model["load"]).name, config["lora"]["rank"]
    rows = {
        "base model": f"`{base}`",
        "trained": f"{state['rollout']} rollouts, {state['step']} gradient steps"
        + (f"; adapters of rank {lora} (LoRA), merged" if lora else ""),
        "algorithm": f"`{algorithm.pop('preset')}`",
        "prompts": ", ".join(f"`{Path(path).name}`" for path in _paths(data["prompts"])),
        "reward": f"`{json.dumps(data['reward'])}`",
        "[algorithm]": ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in algorithm.items()),
        "settings": f"`{hashlib.sha256(settings.encode()).hexdigest()}`, SHA-256 of the checkpoint's config",
    }
    table = "".join(f"| {title} | {text.replace('|', chr(92) + '|')} |\n" for title, text in rows.items())
    return {"README.md": _HEAD.format(name=name, base=f"`{base}`") + table}


def _paths(files: Any) -> list[str]:
    """Return the paths of `data.prompts` as a config has it: a path, a list of paths, or tables."""
    listed: list[Any] = files if isinstance(files, list) else [files]
    return [each["path"] if isinstance(each, dict) else each for each in listed]


def plan_shards(groups: Sequence[tuple[str, ...]], sizes: Mapping[str, int], file_bytes: int) -> list[Shard]:
    """Assign names to files: a group is divided only if it is larger than a file."""
    shards = [Shard()]
    for group in groups:
        whole = sum(sizes[name] for name in group)
        parts = [group] if whole <= file_bytes else list(_divide(group, sizes, file_bytes))
        for part in parts:
            size = sum(sizes[name] for name in part)
            if shards[-1].groups and shards[-1].num_bytes + size > file_bytes:
                shards.append(Shard())
            shards[-1].groups.append(part)
            shards[-1].num_bytes += size
    return shards


def _divide(group: tuple[str, ...], sizes: Mapping[str, int], file_bytes: int) -> Iterator[tuple[str, ...]]:
    part: list[str] = []
    for name in group:
        if part and sum(sizes[other] for other in part) + sizes[name] > file_bytes:
            yield tuple(part)
            part = []
        part.append(name)
    yield tuple(part)


def _write_shard(
    source: WeightSource, output: UnfinishedOutput, options: WriteOptions, job: tuple[str, Shard]
) -> None:
    """Read a file's tensors, then write them, unless an earlier start has written the file."""
    file, shard = job
    if output.file(file).is_file():
        options.on_bytes(shard.num_bytes)
        return
    tensors: dict[str, Tensor] = {}
    for group in shard.groups:
        base = options.rounding.base_tensors(group, options.dtype is not None)
        for name, tensor in source.read(group):
            own = options.rounding.cast(tensor, options.dtype_of(name, tensor), base.get(name))
            tensors[name] = (own.clone() if own is tensor else own).contiguous()
            options.on_bytes(own.nbytes)
    output.write(file, lambda path: save_tensors(tensors, path, metadata={"format": "pt"}))
