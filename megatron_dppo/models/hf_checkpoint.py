"""Reading and writing Hugging Face checkpoint folders: safetensors files, one index, and what stands beside."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_dppo.errors import ConversionError

INDEX = "model.safetensors.index.json"
_NOT_WEIGHTS = ("rotary_emb.inv_freq",)  # buffers that old checkpoints carry


class HFWeights:
    """The tensors of a Hugging Face folder, read by name through memory maps."""

    def __init__(self, folder: Path) -> None:
        """Open the folder and map its files; tensors are read when asked for.

        Raises:
            ConversionError: There are no safetensors, a file of the index is missing, a file or the index is
                torn, a tensor is not in the file that the index names, or two files without an index have it.
        """
        self.folder = folder
        self._open: dict[str, safe_open] = {}
        self._file_of = self._read_index() if (folder / INDEX).is_file() else self._read_headers()

    def _read_index(self) -> dict[str, str]:
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
        names_in = {file: self._map(file) for file in files}
        absent = sorted(name for name, file in file_of.items() if name not in names_in[file])
        if absent:
            raise ConversionError(
                f"{self.folder}: {len(absent)} tensors (first: {absent[:3]}) are not in the files that {INDEX} "
                "names for them. Index and files are of different checkpoints; download them again."
            )
        return file_of

    def _read_headers(self) -> dict[str, str]:
        files = sorted(file.name for file in self.folder.glob("*.safetensors"))
        if not files:
            raise ConversionError(
                f"{self.folder}: no *.safetensors files. Expected a Hugging Face checkpoint in that format; "
                "save it again with save_pretrained (pickled .bin files are not read)."
            )
        file_of: dict[str, str] = {}
        for file in files:
            for name in self._map(file):
                if name in file_of:
                    raise ConversionError(
                        f"{self.folder}: {file_of[name]} and {file} both have {name!r}, and there is no "
                        f"{INDEX} to choose. Keep the files of one checkpoint only."
                    )
                file_of[name] = file
        return file_of

    def _map(self, file: str) -> set[str]:
        """Open a file; the names of the weights in it."""
        try:
            self._open[file] = safe_open(self.folder / file, "pt")
        except SafetensorError as error:
            raise ConversionError(
                f"{self.folder / file}: torn or not safetensors ({error}). Download it again."
            ) from error
        return {name for name in list(self._open[file].keys()) if not name.endswith(_NOT_WEIGHTS)}

    @property
    def names(self) -> set[str]:
        """All tensor names."""
        return set(self._file_of)

    def tensor(self, name: str) -> Tensor:
        """One tensor, whole.

        Raises:
            ConversionError: It is not in the checkpoint.
        """
        return self._opened(name).get_tensor(name)

    def dtypes(self) -> dict[str, str]:
        """Safetensors' name of each tensor's dtype ("BF16"), read from the headers alone."""
        return {name: str(self._opened(name).get_slice(name).get_dtype()) for name in self._file_of}

    def _opened(self, name: str) -> safe_open:
        if name not in self._file_of:
            raise ConversionError(
                f"{self.folder}: tensor {name!r} is missing; it has {len(self._file_of)} others. "
                "The checkpoint is of another architecture, or incomplete."
            )
        return self._open[self._file_of[name]]


def write_hf_checkpoint(
    weights: Iterable[tuple[str, Tensor]], out: Path, template: Path, shard_bytes: int = 4 << 30
) -> None:
    """Write a Hugging Face folder that appears whole or not at all.

    Args:
        weights: Names and tensors in checkpoint spelling.
        out: The folder to make.
        template: Folder whose config, tokenizer and licence are copied.
        shard_bytes: A new file is begun when the current one would exceed this.

    Raises:
        ConversionError: `out` exists already, or a tensor comes twice.
    """
    if out.exists():
        raise ConversionError(f"{out} exists. Give a new folder, or remove that one first.")
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    copy_model_files(template, unfinished)
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal shard, size
        if shard:
            file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
            save_file(shard, unfinished / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, file))
        shard, size = {}, 0

    for name, tensor in weights:
        if name in shard or name in weight_map:
            raise ConversionError(
                f"{out}: tensor {name!r} came twice. Two weight rules name it; correct the table."
            )
        num_bytes = tensor.numel() * tensor.element_size()
        if size + num_bytes > shard_bytes:
            flush()
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size, total = size + num_bytes, total + num_bytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (unfinished / INDEX).write_text(json.dumps(index, indent=1))
    unfinished.rename(out)


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
    """Copy what makes weights a model: config, generation config, tokenizer, chat template, licence."""
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(
        {file for pattern in _BESIDE_WEIGHTS for file in source.glob(pattern) if file.is_file()}
    ):
        shutil.copy2(file, out / file.name)


def dtype_of(weights: HFWeights) -> torch.dtype:
    """The one dtype of a checkpoint.

    Raises:
        ConversionError: It mixes dtypes, or uses one that Megatron parameters cannot have.
    """
    by_dtype: dict[str, list[str]] = {}
    for name, dtype in weights.dtypes().items():
        by_dtype.setdefault(dtype, []).append(name)
    known = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    if len(by_dtype) != 1 or next(iter(by_dtype)) not in known:
        found = ", ".join(f"{len(names)} x {dtype} ({names[0]}, …)" for dtype, names in by_dtype.items())
        raise ConversionError(f"{weights.folder}: tensors of {found}. Expected one dtype of {sorted(known)}.")
    return known[next(iter(by_dtype))]
