"""Converts Hugging Face tensors to a Megatron checkpoint that any parallel layout loads."""

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.architectures.published_names import stays_float32
from megatron_dppo.architectures.registry import family_of
from megatron_dppo.architectures.sizes import HFConfig
from megatron_dppo.architectures.weight_map import EMBEDDING, OUTPUT
from megatron_dppo.checkpoints.checkpoint_folder import WEIGHTS
from megatron_dppo.checkpoints.convert.output import (
    UnfinishedOutput,
    WriteOptions,
    disk_errors,
    fingerprint,
    run_jobs,
)
from megatron_dppo.checkpoints.convert.sources import WeightSource, float32_parts
from megatron_dppo.checkpoints.convert.stored_tensors import pieces_of
from megatron_dppo.checkpoints.megatron_folder import HF
from megatron_dppo.checkpoints.megatron_save import Block, Places, StreamedFile, StreamedSave
from megatron_dppo.checkpoints.model_files import write_description
from megatron_dppo.errors import ConversionError
from megatron_dppo.mcore import cpu, fixes
from megatron_dppo.runtime.process import Runtime

_BLOCK_ELEMENTS = 1 << 25
"""Most elements of a block of stacked experts. Small blocks let a rank load few experts of other ranks; large
blocks keep planning fast."""
_PARTS = "parts"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def require_fit(source: WeightSource, hf: HFConfig) -> dict[str, Tensor]:
    """Return the outline of a source, which must contain exactly the tensors that config.json implies."""
    found, family = source.outline(), family_of(hf)
    if family.sizes_of(hf).is_tied and OUTPUT.hf[0] in found:
        _require_tied(source)
        del found[OUTPUT.hf[0]]
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    family.require_shapes(hf, shapes, source.folder, lambda name: _place(source, name))
    for name, tensor in found.items():
        if tensor.dtype not in _FLOATS:
            raise ConversionError(
                f"{_place(source, name)}: {name!r} is {tensor.dtype}; expected one of "
                f"{', '.join(map(str, _FLOATS))}. Download the weights again, or in another format."
            )
    return found


def _place(source: WeightSource, name: str) -> Path:
    weights: Any = getattr(source, "weights", None)
    return source.folder if weights is None else weights.file_of(name)


def _require_tied(source: WeightSource) -> None:
    pair = [dict(source.read((name,)))[name] for name in (OUTPUT.hf[0], EMBEDDING.hf[0])]
    if not torch.equal(*pair):
        raise ConversionError(
            f"{source.folder}: {OUTPUT.hf[0]!r} differs from {EMBEDDING.hf[0]!r}, while config.json "
            "sets tie_word_embeddings. Correct config.json, or remove the wrong tensor."
        )


def one_dtype(outline: Mapping[str, Tensor], folder: Path, kept: Collection[str]) -> torch.dtype:
    """Return the common dtype of all tensors, ignoring tensors that always stay float32, and `kept`."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, tensor in outline.items():
        if not stays_float32(name) and name not in kept:
            by_dtype.setdefault(tensor.dtype, []).append(name)
    if len(by_dtype) != 1:
        found = ", ".join(f"{len(names)} x {dtype} ({names[0]}, …)" for dtype, names in by_dtype.items())
        raise ConversionError(f"{folder}: tensors of {found}. Expected one type; --dtype makes them one.")
    return next(iter(by_dtype))


def write_megatron(
    source: WeightSource, hf: HFConfig, out: Path, options: WriteOptions, runtime: Runtime
) -> None:
    """Write a Megatron checkpoint, completely or not at all; every process calls this together.

    An interrupted earlier start is resumed if source and options are the same.
    """
    cpu.install()
    fixes.apply()
    outline = require_fit(source, hf)
    parts = float32_parts(source, source.folder)
    kept = set[str]() if options.dtype is not None else {name for names in parts.values() for name in names}
    dtype = options.dtype or one_dtype(outline, source.folder, kept)
    runtime.on_main(lambda: options.log_rounded(parts))
    pieces = {(piece.key, piece.offset): piece for piece in pieces_of(hf, _BLOCK_ELEMENTS)}
    dtype_of = {
        key: torch.float32 if piece.rule.is_buffer or kept.issuperset(piece.hf) else dtype
        for key, piece in pieces.items()
    }
    total = sum(piece.num_elements * dtype_of[key].itemsize for key, piece in pieces.items())
    plan = {
        "from": fingerprint(source.files),
        "config": dict(hf),
        "dtype": str(dtype),
        "file_bytes": options.file_bytes,
        "processes": runtime.world_size,
    }
    output = runtime.on_main(lambda: _begin(out, plan, total))
    blocks = [Block(p.key, p.whole, p.offset, p.shape, dtype_of[key]) for key, p in pieces.items()]
    save = StreamedSave(_share(blocks, runtime), output.file(WEIGHTS), runtime.rank, options.file_bytes)
    table = family_of(hf).weight_table(hf)

    def tensor_of(block: Block) -> Tensor:
        piece = pieces[block.key, block.offset]
        cast = options.rounding.cast
        tensors = [cast(tensor, block.dtype) for name in piece.hf for _, tensor in source.read((name,))]
        fused = piece.fuse(tensors, table)
        options.on_bytes(block.num_bytes)
        return fused

    def write_file(file: StreamedFile) -> None:
        """Write a file, and a second file with its items' places, unless an earlier start has."""
        if output.file(f"{_PARTS}/{file.name}.json").is_file():
            options.on_bytes(file.num_bytes)
            return
        places: Places = []
        output.write(f"{_PARTS}/{file.name}", lambda path: places.extend(save.write(file, path, tensor_of)))
        output.write(f"{_PARTS}/{file.name}.json", lambda path: path.write_text(json.dumps(places)))

    run_jobs(runtime, save.files, write_file, options.num_writers)
    runtime.on_main(lambda: _gather_parts(output))
    save.finish({file.name: _read_places(output, file) for file in save.files})
    runtime.on_main(lambda: _publish(output, source.folder, dtype))


def _begin(out: Path, plan: dict[str, Any], total: int) -> UnfinishedOutput:
    output = UnfinishedOutput(out, plan, total)
    with disk_errors(output.folder):
        _scatter_parts(output)
        output.file(WEIGHTS).mkdir()
        output.file(_PARTS).mkdir(exist_ok=True)
    return output


def _share(blocks: list[Block], runtime: Runtime) -> list[Block]:
    """Return this process's consecutive blocks, balanced by bytes."""
    total, before, own = sum(block.num_bytes for block in blocks), 0, list[Block]()
    for block in blocks:
        if before * runtime.world_size // total == runtime.rank:
            own.append(block)
        before += block.num_bytes
    return own


def _read_places(output: UnfinishedOutput, file: StreamedFile) -> Places:
    """Return the places of the items of a written file."""
    written = output.file(f"{_PARTS}/{file.name}.json")
    return [(offset, length) for offset, length in json.loads(written.read_text())]


def _gather_parts(output: UnfinishedOutput) -> None:
    for file in output.file(_PARTS).glob("*.distcp"):
        file.rename(output.file(WEIGHTS) / file.name)


def _scatter_parts(output: UnfinishedOutput) -> None:
    """Undo `_gather_parts` if an earlier start was interrupted after it."""
    for file in output.file(WEIGHTS).glob("*.distcp"):
        file.rename(output.file(_PARTS) / file.name)
    shutil.rmtree(output.file(WEIGHTS), ignore_errors=True)


def _publish(output: UnfinishedOutput, template: Path, dtype: torch.dtype) -> None:
    with disk_errors(output.folder):
        write_description(template, output.file(HF), dtype)
        shutil.rmtree(output.file(_PARTS))
        output.publish()
