"""Reads checkpoints of either kind as Hugging Face tensors: by name, in groups, or as a trainer sends them."""

import hashlib
import itertools
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_dppo.architectures.published_names import in_published_stacks, published_name, stays_float32
from megatron_dppo.architectures.registry import FAMILIES, family_of, read_hf_config
from megatron_dppo.architectures.sizes import HFConfig, architecture_of, config_file, read_model_config
from megatron_dppo.architectures.weight_map import ADAPTER_SUFFIX
from megatron_dppo.checkpoints.checkpoint_folder import (
    WEIGHTS,
    is_megatron_checkpoint,
    require_megatron_checkpoint,
)
from megatron_dppo.checkpoints.convert.stored_tensors import Piece, StoredTensors, pieces_of
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.errors import CheckpointError, ConversionError
from megatron_dppo.runtime.process import Runtime

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class WeightSource(Protocol):
    """Source of tensors under Hugging Face names; threads may share an instance."""

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        ...

    @property
    def files(self) -> Sequence[Path]:
        """The files that hold the tensors."""
        ...

    def outline(self) -> dict[str, Tensor]:
        """Return each tensor on the meta device (shape and dtype), in the fastest order of reading."""
        ...

    def groups(self) -> list[tuple[str, ...]]:
        """Return names that are best read together; each name is in one group."""
        ...

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Read the tensors with these names, which must belong to one group."""
        ...


class HuggingFaceSource:
    """A folder of safetensors."""

    def __init__(self, weights: HFWeights) -> None:
        self.weights = weights
        self.folder = weights.folder
        self.files = weights.files

    def outline(self) -> dict[str, Tensor]:
        """Return names, shapes and dtypes, file by file."""
        dtypes, shapes = self.weights.dtypes(), self.weights.shapes()
        odd = next((name for name, dtype in dtypes.items() if dtype not in SAFETENSORS_DTYPES), None)
        if odd is not None:
            raise ConversionError(
                f"{self.weights.file_of(odd)}: {odd!r} is of type {dtypes[odd]}; expected one of "
                f"{', '.join(SAFETENSORS_DTYPES)}."
            )
        names = sorted(shapes, key=lambda name: (self.weights.file_of(name), name))
        return {
            name: torch.empty(shapes[name], dtype=SAFETENSORS_DTYPES[dtypes[name]], device="meta")
            for name in names
        }

    def groups(self) -> list[tuple[str, ...]]:
        """Return one group for each tensor."""
        return [(name,) for name in self.outline()]

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors, as views of the mapped files if no conversion is needed."""
        for name in names:
            yield name, self.weights.tensor(name)


class MegatronSource:
    """A Megatron checkpoint from a conversion or a run of any layout; LoRA updates are added."""

    def __init__(self, folder: Path, hf: HFConfig | None = None) -> None:
        """Compare the stored tensors with the tensors that the model needs.

        Args:
            folder: Checkpoint folder with `megatron/` and `hf/`.
            hf: Model's config.json. None reads `hf/config.json`.
        """
        require_megatron_checkpoint(folder)
        self.folder = folder
        self.hf = hf if hf is not None else read_hf_config(folder)
        self.stored = StoredTensors(folder / WEIGHTS)
        self.files = self.stored.files
        self._table = family_of(self.hf).weight_table(self.hf)
        self._pieces = list(pieces_of(self.hf))
        self._piece_of = {name: piece for piece in self._pieces for name in piece.hf}
        self._require_fit()

    def _require_fit(self) -> None:
        shapes = self.stored.shapes
        for piece in self._pieces:
            found = shapes.get(piece.key, ())
            is_padded = piece.rule.is_vocabulary and found[1:] == piece.whole[1:] and found > piece.whole
            if found != piece.whole and not is_padded:
                raise CheckpointError(
                    f"{self.stored.folder}: {piece.key!r} is {found or 'missing'}; expected "
                    f"shape {piece.whole}. Checkpoint and config.json are of different models."
                )
        weights = {key for key in shapes if not key.startswith("optimizer.")}
        known = {piece.key for piece in self._pieces}
        extra = sorted(key for key in weights - known if f"{ADAPTER_SUFFIX}." not in key)
        if extra:
            raise CheckpointError(
                f"{self.stored.folder}: {len(extra)} tensors are left over (first: {extra[:3]}). "
                "Checkpoint and config.json are of different models."
            )

    def outline(self) -> dict[str, Tensor]:
        """Return names, shapes and dtypes, in the order of the layers."""
        dtypes = self.stored.dtypes
        return {
            name: torch.empty(shape, dtype=dtypes[piece.key], device="meta")
            for piece in self._pieces
            for name, shape in zip(piece.hf, piece.hf_shapes, strict=True)
        }

    def groups(self) -> list[tuple[str, ...]]:
        """Return groups: all experts' tensors of one linear, or queries, keys and values, or one tensor."""
        return [piece.hf for piece in self._pieces]

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield views of a block that is read once."""
        piece = self._piece_of[names[0]]
        block = self.stored.region(piece.key, piece.offset, piece.shape)
        wanted, adapters = set(names), dict(self._adapters(piece, names))
        for name, tensor in zip(piece.hf, piece.unfuse(block, self._table), strict=True):
            if name in wanted:
                yield name, adapters[name].merge(tensor) if name in adapters else tensor

    def adapters(self) -> "Iterator[tuple[str, Adapter]]":
        """Yield the LoRA adapters of the checkpoint by the Hugging Face names of their weights."""
        for piece in self._pieces:
            yield from self._adapters(piece, piece.hf)

    def _adapters(self, piece: Piece, names: Sequence[str]) -> "Iterator[tuple[str, Adapter]]":
        """Yield the adapters of these weights of a piece."""
        linear_of = {name: name.split(".")[-2] for name in names}
        found = {linear: self._adapter(piece, linear) for linear in dict.fromkeys(linear_of.values())}
        for index, name in enumerate(piece.hf):
            if name in linear_of and (adapter := found[linear_of[name]]) is not None:
                yield name, adapter.of_expert(index)

    def _adapter(self, piece: Piece, linear: str) -> "Adapter | None":
        """Return the LoRA factors of a linear of the piece's layer; None if it has no adapter."""
        if piece.layer is None:
            return None
        module = piece.key.rpartition(".")[0]
        if piece.rule.is_expert:
            module = piece.key.replace(".mlp.experts.experts.linear_", ".mlp.experts_").removesuffix(".weight")
        module += ADAPTER_SUFFIX
        if f"{module}.{linear}.lora_A" not in self.stored.shapes:
            return None
        alpha = int(self._of_layer(f"{module}.alpha", piece).flatten()[0])
        factors = [self._of_layer(f"{module}.{linear}.{name}", piece) for name in ("lora_A", "lora_B")]
        return Adapter(alpha, factors[0], factors[1])

    def _of_layer(self, key: str, piece: Piece) -> Tensor:
        shape = self.stored.shapes[key]
        if not piece.has_layer_axis:
            return self.stored.region(key, (0,) * len(shape), shape)
        assert piece.layer is not None
        offset = (piece.layer, *(0 for _ in shape[1:]))
        return self.stored.region(key, offset, (1, *shape[1:]))[0]


class StackedSource:
    """Another source's tensors, with interleaved stacks of experts in place of single experts."""

    def __init__(self, source: WeightSource, num_experts: int) -> None:
        """Group the names of the stacks' parts; nothing is read."""
        self._source, self._num_experts = source, num_experts
        self.folder, self.files = source.folder, source.files
        self._parts: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for group in source.groups():
            published = tuple(dict.fromkeys(map(published_name, group)))
            self._parts.setdefault(published, []).append(group)
        self._group_of = {name: group for group in self._parts for name in group}

    def outline(self) -> dict[str, Tensor]:
        """Return names, shapes and dtypes of the stacks and of the other tensors."""
        return dict(in_published_stacks(self._source.outline().items(), self._num_experts))

    def groups(self) -> list[tuple[str, ...]]:
        """Return the other source's groups, with one group for each stack."""
        return list(self._parts)

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors; all parts of a stack are in memory."""
        parts = itertools.chain.from_iterable(
            self._source.read(group) for group in self._parts[self._group_of[names[0]]]
        )
        wanted = set(names)
        yield from (pair for pair in in_published_stacks(parts, self._num_experts) if pair[0] in wanted)


def as_published(source: WeightSource, template: Path) -> WeightSource:
    """Return a source with the names that the family of `template`'s config.json publishes."""
    if config_file(template) is None:
        return source
    _, hf = read_model_config(template)
    family = FAMILIES.get(architecture_of(hf))
    if family is None or not family.has_interleaved_stacks:
        return source
    return StackedSource(source, family.sizes_of(hf).num_experts or 0)


def float32_parts(source: WeightSource, folder: Path) -> dict[str, list[str]]:
    """Return the names of the parts that a source keeps in float32 among weights of another dtype.

    Args:
        source: Weights by the names of the weight table.
        folder: Folder with the model's config.json, of either kind; without one the result is empty.
    """
    if config_file(folder) is None:
        return {}
    _, hf = read_model_config(folder)
    family = FAMILIES.get(architecture_of(hf))
    if family is None or not any(rule.may_be_float32 for rule in family.rules):
        return {}
    dtypes = {name: tensor.dtype for name, tensor in source.outline().items()}
    return family.float32_parts(hf, dtypes, torch.float32)


def source_of(folder: Path) -> WeightSource:
    """Return the source for a folder: a Megatron checkpoint or a Hugging Face folder, by its contents."""
    return MegatronSource(folder) if is_megatron_checkpoint(folder) else HuggingFaceSource(HFWeights(folder))


def trained_from(megatron: Path) -> Path | None:
    """Return `model.load` of the run that wrote a checkpoint; None if it is in no run's folder."""
    config = megatron.resolve().parent.parent / "config.toml"
    if not config.is_file():
        return None
    return Path(tomllib.loads(config.read_text(encoding="utf-8"))["model"]["load"])


def base_of(megatron: Path, like: WeightSource) -> WeightSource | None:
    """Return the weights that a run's checkpoint was trained from.

    Args:
        megatron: A folder in a run's `checkpoints/`.
        like: Weights of the checkpoint. A base model has the same names and shapes.

    Returns:
        Weights of the base model; None if the checkpoint is in no run's folder, or the base model is gone.
    """
    folder = trained_from(megatron)
    if folder is None or config_file(folder) is None:
        return None
    base, wanted = source_of(folder), like.outline()
    found = base.outline()
    is_same = all(name in found and found[name].shape == wanted[name].shape for name in wanted)
    return base if is_same else None


@dataclass(frozen=True)
class Adapter:
    """LoRA factors of a linear, or of one linear of all experts."""

    alpha: int
    lora_a: Tensor  # [(experts,) rank, in]
    lora_b: Tensor  # [(experts,) out, rank]

    def of_expert(self, index: int) -> "Adapter":
        """Return the factors of the `index`th expert; of a linear without experts, this."""
        if self.lora_a.dim() == 2:
            return self
        return Adapter(self.alpha, self.lora_a[index], self.lora_b[index])

    def merge(self, weight: Tensor) -> Tensor:
        """Return the weight plus its update, added in float32; the factors are of one linear."""
        update = self.alpha / self.lora_a.shape[0] * (self.lora_b.float() @ self.lora_a.float())
        return (weight.float() + update).to(weight.dtype)


class StoredWeights:
    """All weights of a folder, on every rank; implements `weight_sync.syncs.WeightOwner`.

    LoRA updates are added. Any number of ranks works, because each rank reads all weights.
    """

    log_probs = None
    """Empty, because no model computes them here."""

    def __init__(self, folder: Path, dtype: torch.dtype, runtime: Runtime) -> None:
        """Read the headers, and compare them with the tensors that the model needs."""
        self._hf, self._dtype, self._runtime = read_hf_config(folder), dtype, runtime
        self._source = source_of(folder)
        parts = float32_parts(self._source, folder)
        self._kept = {name for names in parts.values() for name in names}

    @property
    def identity(self) -> str:
        """Identity of the weights: changes with the files' names, sizes and modification times."""
        digest = hashlib.blake2b(digest_size=16)
        for file in sorted(self._source.files):
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def weights(
        self, *, of_own_stage: bool = False, max_bytes: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights under Hugging Face names, on this rank's device, layer by layer, as one stage."""
        for piece in pieces_of(self._hf):
            for name, tensor in self._source.read(piece.hf):
                yield name, tensor.to(self._runtime.device, self._dtype_of(name))

    def describe_weights(self, *, of_own_stage: bool = False) -> dict[str, Tensor]:
        """Return the tensors of `weights` without data."""
        return {
            name: torch.empty(shape, dtype=self._dtype_of(name), device="meta")
            for piece in pieces_of(self._hf)
            for name, shape in zip(piece.hf, piece.hf_shapes, strict=True)
        }

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if stays_float32(name) or name in self._kept else self._dtype

    @property
    def pipeline_place(self) -> tuple[int, int, bool]:
        """Stage 0 of one pipeline stage, with rank 0 as its first rank."""
        return 0, 1, self._runtime.is_main
