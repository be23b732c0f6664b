"""Reads and writes Hugging Face checkpoint folders: safetensors files, one index, config and tokenizer."""

import json
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_dppo.architectures.family import ModelFamily
from megatron_dppo.architectures.published_names import (
    MXFP4,
    StoredTensor,
    dequantized,
    dequantized_mxfp4,
    in_published_stacks,
    in_table_spelling,
    stays_float32,
)
from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.architectures.sizes import HFConfig, architecture_of, read_model_config
from megatron_dppo.checkpoints.model_files import INDEX as INDEX
from megatron_dppo.checkpoints.model_files import (
    WeightFiles,
    copy_model_files,
    main_dtype,
    name_dtype,
    weight_files,
)
from megatron_dppo.errors import ConversionError
from megatron_dppo.runtime.files import save_tensors

_NOT_WEIGHTS = ("rotary_emb.inv_freq",)  # buffers that old checkpoints carry


class HFWeights:
    """Reads the tensors of a Hugging Face folder by name through memory maps; threads may share it.

    Names are the names of the weight table, for stacked and separate experts. Block-wise 8-bit weights and
    MXFP4 are read as bfloat16 (`architectures/published_names.py`). If the folder has a config.json, layers for
    multi-token prediction are left out.
    """

    def __init__(self, folder: Path, num_mapped: int = 2, files: Sequence[str] | None = None) -> None:
        """Read the headers of all files; tensors are read on demand.

        Args:
            folder: Folder with one safetensors file, or with several and an index.
            num_mapped: Most files that are mapped at a time. Unmapping a file frees this process's memory of
                it.
            files: Names of the files to read. None chooses the files that hold a model's weights.
        """
        self.folder = folder
        self._num_mapped = num_mapped
        self._mapped: OrderedDict[str, safe_open] = OrderedDict()
        self._lock = threading.Lock()
        file_of = _read_index(folder) if files is None else None
        found = (
            weight_files(folder, file_of and file_of.values()) if files is None else WeightFiles((*files,), ())
        )
        self.ignored = found.ignored
        """Names of the files with weights that are not read."""
        stored = self._read_headers(found.read) if file_of is None else self._read_indexed(file_of, found.read)
        family, hf = _family(folder)
        self._stored = in_table_spelling(
            stored,
            {} if family is None else family.module_names,
            is_interleaved=family is not None and family.has_interleaved_stacks,
        )
        self.left_out: frozenset[str] = frozenset() if family is None else family.left_out(self._stored, hf)
        """Names of the tensors in the files that belong to no layer of the model."""
        self._stored = {name: own for name, own in self._stored.items() if name not in self.left_out}

    def _read_indexed(self, file_of: Mapping[str, str], files: Iterable[str]) -> dict[str, StoredTensor]:
        found = {file: self._header(file) for file in files}
        absent = sorted(name for name, file in file_of.items() if name not in found[file])
        if absent:
            raise ConversionError(
                f"{self.folder}: {len(absent)} tensors (first: {absent[:3]}) are not in the files that {INDEX} "
                "names for them. Index and files are of different checkpoints; download them again."
            )
        return {name: found[file][name] for name, file in file_of.items()}

    def _read_headers(self, files: Iterable[str]) -> dict[str, StoredTensor]:
        stored: dict[str, StoredTensor] = {}
        for file in files:
            for name, tensor in self._header(file).items():
                if name in stored:
                    raise ConversionError(
                        f"{self.folder}: {stored[name].file} and {file} both have {name!r}, and there is no "
                        f"{INDEX} to choose. Keep the files of one checkpoint only."
                    )
                stored[name] = tensor
        return stored

    def _header(self, file: str) -> dict[str, StoredTensor]:
        """Return the weights in a file."""
        mapped = self._map(file)
        slices = ((name, mapped.get_slice(name)) for name in list(mapped.keys()))
        return {
            name: StoredTensor(file, name, str(part.get_dtype()), tuple(part.get_shape()))
            for name, part in slices
            if not name.endswith(_NOT_WEIGHTS)
        }

    def _map(self, file: str) -> safe_open:
        """Return a memory-mapped file; if too many are mapped, unmap the least recently used one."""
        with self._lock:
            if file not in self._mapped:
                try:
                    self._mapped[file] = safe_open(self.folder / file, "pt")
                except (SafetensorError, OSError) as error:
                    raise ConversionError(
                        f"{self.folder / file}: torn or not safetensors ({error}). Download it again."
                    ) from error
            self._mapped.move_to_end(file)
            if len(self._mapped) > self._num_mapped:
                self._mapped.popitem(last=False)
            return self._mapped[file]

    @property
    def names(self) -> set[str]:
        """All tensor names."""
        return set(self._stored)

    @property
    def files(self) -> list[Path]:
        """Files that contain the tensors."""
        names = {part.file for tensor in self._stored.values() for part in (tensor, tensor.scales) if part}
        return [self.folder / name for name in sorted(names)]

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, as a view of the file if no conversion is needed: only touched bytes are read."""
        if name not in self._stored:
            raise ConversionError(
                f"{self.folder}: tensor {name!r} is missing; it has {len(self._stored)} others. "
                "The checkpoint is of another architecture, or incomplete."
            )
        stored = self._stored[name]
        weight = self._part(stored)
        if stored.scales is None:
            return weight.float() if stays_float32(name) else weight
        if stored.dtype == MXFP4:
            scales = replace(stored.scales, expert=stored.expert, turn=stored.turn, dtype=MXFP4)
            return dequantized_mxfp4(weight, self._part(scales))
        first_row = stored.rows[0] if stored.rows is not None else 0
        return dequantized(weight, self._part(replace(stored.scales, expert=stored.expert)), first_row)

    def _part(self, stored: StoredTensor) -> Tensor:
        mapped = self._map(stored.file)
        if stored.expert is None and stored.rows is None:
            return mapped.get_tensor(stored.name)
        rows = slice(*stored.rows) if stored.rows is not None else slice(None)
        whole = mapped.get_slice(stored.name)
        part = whole[rows] if stored.expert is None else whole[stored.expert, rows]
        if stored.turn is None:
            return part
        first, step = stored.turn
        if stored.dtype == MXFP4:  # [out, in / 32, ...]
            return part[first::step]
        return part[..., first::step].movedim(-1, 0)  # [in, out], or a bias

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor, read only from the headers."""
        return {name: stored.shape for name, stored in self._stored.items()}

    def dtypes(self) -> dict[str, str]:
        """Return safetensors' name of each tensor's dtype ("BF16"), read only from the headers."""
        return {name: stored.shown_dtype for name, stored in self._stored.items()}

    def file_of(self, name: str) -> Path:
        """Return the file that contains a tensor."""
        return self.folder / self._stored[name].file


def _family(folder: Path) -> tuple[ModelFamily | None, HFConfig]:
    if not (folder / "config.json").is_file():
        return None, {}
    _, hf = read_model_config(folder)
    return FAMILIES.get(architecture_of(hf)), hf


def require_one_set(folder: Path) -> tuple[str, ...]:
    """Compare the names of a folder's weight files with its index, and return the names that are not read."""
    file_of = _read_index(folder)
    return weight_files(folder, file_of and file_of.values()).ignored


def _read_index(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor that the index names; None if there is no index."""
    if not (folder / INDEX).is_file():
        return None
    try:
        weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        file_of = {name: file for name, file in weight_map.items() if not name.endswith(_NOT_WEIGHTS)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(
            f"{folder / INDEX}: torn, or no index ({type(error).__name__}: {error}). Expected a JSON "
            "object with a weight_map. Download it again."
        ) from error
    strange = [file for file in file_of.values() if not isinstance(file, str) or Path(file).name != file]
    if strange:
        raise ConversionError(
            f"{folder / INDEX}: names {strange[0]!r} as a file. Expected files of that folder."
        )
    return file_of


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield a new folder to write to, and rename it to `out` when the body has ended without an error."""
    if out.exists():
        raise ConversionError(f"{out} exists. Give a new folder, or remove that one first.")
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    unfinished.rename(out)


def write_hf_checkpoint(
    weights: Iterable[tuple[str, Tensor]], out: Path, template: Path, shard_bytes: int = 2 << 30
) -> None:
    """Write a Hugging Face folder that appears completely or not at all.

    A file is written while the tensors of the next one are produced, so memory holds the tensors of two files.
    Config, tokenizer and licence are copied from `template`. Experts get the names that its family publishes.
    """
    family, hf = _family(template)
    if family is not None and family.has_interleaved_stacks:
        weights = in_published_stacks(weights, family.sizes_of(hf).num_experts or 0)
    file_of: dict[str, str] = {}
    total, written = 0, list[tuple[str, torch.dtype, int]]()
    with whole_folder(out) as unfinished, ThreadPoolExecutor(1) as pool:
        copy_model_files(template, unfinished)
        underway: Future[None] | None = None
        for index, shard in enumerate(_shards(weights, out, shard_bytes), 1):
            file = f"model-{index:05d}.safetensors"
            file_of |= dict.fromkeys(shard, file)
            total += sum(tensor.nbytes for tensor in shard.values())
            written += [(name, tensor.dtype, tensor.numel()) for name, tensor in shard.items()]
            if underway is not None:
                underway.result()
            underway = pool.submit(save_tensors, shard, unfinished / file, metadata={"format": "pt"})
            del shard
        if underway is not None:
            underway.result()
        if written and (unfinished / "config.json").is_file():
            name_dtype(unfinished / "config.json", main_dtype(written))
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (unfinished / INDEX).write_text(json.dumps(content, indent=1))


def _shards(weights: Iterable[tuple[str, Tensor]], out: Path, shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield copies of the tensors in consecutive groups that fit into a file."""
    names: set[str] = set()
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if name in names:
            raise ConversionError(
                f"{out}: tensor {name!r} came twice. Two weight rules name it; correct the table."
            )
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        names.add(name)
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    if shard:
        yield shard
