"""Reads and writes Hugging Face checkpoint folders: safetensors files, one index, and the files beside them."""

import json
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_dppo.architectures.family import FURTHER_LAYERS
from megatron_dppo.architectures.published_names import (
    StoredTensor,
    dequantized,
    in_table_spelling,
    stays_float32,
)
from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.architectures.sizes import architecture_of, read_model_config
from megatron_dppo.checkpoints.checkpoint_folder import is_megatron_checkpoint
from megatron_dppo.errors import ConversionError

INDEX = "model.safetensors.index.json"
_NOT_WEIGHTS = ("rotary_emb.inv_freq",)  # buffers that old checkpoints carry


class HFWeights:
    """Reads the tensors of a Hugging Face folder by name through memory maps; threads may share it.

    Names are the weight table's whichever way experts are stored, and block-wise 8-bit weights are read as
    bfloat16 (`architectures/published_names.py`). Layers that predict further tokens are left out, where
    config.json stands beside the weights.
    """

    def __init__(self, folder: Path, num_mapped: int = 2) -> None:
        """Read the headers of all files; tensors are read when asked for.

        Args:
            folder: With safetensors, and an index where there are several.
            num_mapped: Files that are mapped at a time: what was read of others leaves this process's memory.

        Raises:
            ConversionError: There are no safetensors, a file of the index is missing, a file or the index is
                torn, a tensor is not in the file that the index names, or two files without an index have it.
        """
        self.folder = folder
        self._num_mapped = num_mapped
        self._mapped: OrderedDict[str, safe_open] = OrderedDict()
        self._lock = threading.Lock()
        stored = self._read_index() if (folder / INDEX).is_file() else self._read_headers()
        self._stored = in_table_spelling(stored)
        self.left_out: frozenset[str] = _left_out(folder, self._stored)
        """Names of the tensors in the files that belong to no layer of the model."""
        self._stored = {name: own for name, own in self._stored.items() if name not in self.left_out}

    def _read_index(self) -> dict[str, StoredTensor]:
        try:
            weight_map: dict[str, str] = json.loads((self.folder / INDEX).read_text())["weight_map"]
            file_of = {name: file for name, file in weight_map.items() if not name.endswith(_NOT_WEIGHTS)}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConversionError(
                f"{self.folder / INDEX}: torn, or no index ({type(error).__name__}: {error}). Expected a JSON "
                "object with a weight_map. Download it again."
            ) from error
        strange = [file for file in file_of.values() if not isinstance(file, str) or Path(file).name != file]
        if strange:
            raise ConversionError(
                f"{self.folder / INDEX}: names {strange[0]!r} as a file. Expected files of that folder."
            )
        files = sorted(set(file_of.values()))
        missing = [file for file in files if not (self.folder / file).is_file()]
        if missing:
            raise ConversionError(
                f"{self.folder}: {INDEX} names {missing[:3]}, which are not there. "
                "Download the checkpoint again."
            )
        found = {file: self._header(file) for file in files}
        absent = sorted(name for name, file in file_of.items() if name not in found[file])
        if absent:
            raise ConversionError(
                f"{self.folder}: {len(absent)} tensors (first: {absent[:3]}) are not in the files that {INDEX} "
                "names for them. Index and files are of different checkpoints; download them again."
            )
        return {name: found[file][name] for name, file in file_of.items()}

    def _read_headers(self) -> dict[str, StoredTensor]:
        files = sorted(file.name for file in self.folder.glob("*.safetensors"))
        if not files and is_megatron_checkpoint(self.folder):
            raise ConversionError(
                f"{self.folder}: found a Megatron checkpoint; expected a Hugging Face folder. Run "
                f"megatron-dppo convert to-hf --megatron {self.folder} --out NEW, and name NEW."
            )
        if not files:
            raise ConversionError(
                f"{self.folder}: no *.safetensors files. Expected a Hugging Face checkpoint in that format; "
                "save it again with save_pretrained (pickled .bin files are not read)."
            )
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
        """Return a memory-mapped file; the least recently used one is unmapped where there are too many."""
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
        """Files that hold the tensors."""
        names = {part.file for tensor in self._stored.values() for part in (tensor, tensor.scales) if part}
        return [self.folder / name for name in sorted(names)]

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, a view of its file where it is stored as it is: only touched bytes are read.

        Raises:
            ConversionError: It is not in the checkpoint.
        """
        if name not in self._stored:
            raise ConversionError(
                f"{self.folder}: tensor {name!r} is missing; it has {len(self._stored)} others. "
                "The checkpoint is of another architecture, or incomplete."
            )
        stored = self._stored[name]
        weight = self._part(stored)
        if stored.scales is None:
            return weight.float() if stays_float32(name) else weight
        first_row = stored.rows[0] if stored.rows is not None else 0
        return dequantized(weight, self._part(replace(stored.scales, expert=stored.expert)), first_row)

    def _part(self, stored: StoredTensor) -> Tensor:
        mapped = self._map(stored.file)
        if stored.expert is None and stored.rows is None:
            return mapped.get_tensor(stored.name)
        rows = slice(*stored.rows) if stored.rows is not None else slice(None)
        whole = mapped.get_slice(stored.name)
        return whole[rows] if stored.expert is None else whole[stored.expert, rows]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor, read from the headers alone."""
        return {name: stored.shape for name, stored in self._stored.items()}

    def dtypes(self) -> dict[str, str]:
        """Return Safetensors' name of each tensor's dtype ("BF16"), read from the headers alone."""
        return {name: stored.shown_dtype for name, stored in self._stored.items()}

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self.folder / self._stored[name].file


def _left_out(folder: Path, names: Iterable[str]) -> frozenset[str]:
    config = folder / "config.json"
    if not config.is_file():
        return frozenset()
    _, hf = read_model_config(folder)
    family = FAMILIES.get(architecture_of(hf))
    return frozenset() if family is None else family.left_out(names, hf)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield a new folder to write in, which gets the name `out` when the body has ended without an error.

    Raises:
        ConversionError: `out` exists already.
    """
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
    """Write a Hugging Face folder that appears whole or not at all.

    A file is written while the next one's tensors come, so that those of two files are held.

    Args:
        weights: Names and tensors in checkpoint spelling.
        out: The folder to make.
        template: Folder whose config, tokenizer and licence are copied.
        shard_bytes: A new file is begun when the current one would exceed this.

    Raises:
        ConversionError: `out` exists already, or a tensor comes twice.
    """
    file_of: dict[str, str] = {}
    total = 0
    with whole_folder(out) as unfinished, ThreadPoolExecutor(1) as pool:
        copy_model_files(template, unfinished)
        underway: Future[None] | None = None
        for index, shard in enumerate(_shards(weights, out, shard_bytes), 1):
            file = f"model-{index:05d}.safetensors"
            file_of |= dict.fromkeys(shard, file)
            total += sum(tensor.nbytes for tensor in shard.values())
            if underway is not None:
                underway.result()
            underway = pool.submit(save_file, shard, unfinished / file, metadata={"format": "pt"})
            del shard
        if underway is not None:
            underway.result()
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (unfinished / INDEX).write_text(json.dumps(content, indent=1))


def _shards(weights: Iterable[tuple[str, Tensor]], out: Path, shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield copies of the tensors, in runs that fit into a file."""
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


_BESIDE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.tiktoken",
    "*.model",
    "LICENSE*",
)


def copy_model_files(source: Path, out: Path) -> None:
    """Copy the files beside the weights: config, generation config, tokenizer, chat template, licence.

    They are copied byte for byte, but a config.json of layers that predict further tokens, which are left out
    of the weights, then says that there are none.
    """
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(
        {file for pattern in _BESIDE_WEIGHTS for file in source.glob(pattern) if file.is_file()}
    ):
        shutil.copy2(file, out / file.name)
    config = out / "config.json"
    content = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if isinstance(content, dict) and content.get(FURTHER_LAYERS):
        config.unlink()  # keeps no permission of a read-only original
        config.write_text(json.dumps(content | {FURTHER_LAYERS: 0}, indent=2) + "\n", encoding="utf-8")
