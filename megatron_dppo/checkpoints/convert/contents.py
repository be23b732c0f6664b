"""Lists the contents of a checkpoint, reading only its headers."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from megatron_dppo.architectures.sizes import architecture_of
from megatron_dppo.architectures.weight_map import is_adapter
from megatron_dppo.checkpoints.checkpoint_folder import WEIGHTS, is_megatron_checkpoint
from megatron_dppo.checkpoints.convert.description import read_convertible_config
from megatron_dppo.checkpoints.convert.sources import HuggingFaceSource
from megatron_dppo.checkpoints.convert.stored_tensors import StoredTensors
from megatron_dppo.checkpoints.hf_folder import HFWeights

_OPTIMIZER = "optimizer."


def contents_of(folder: Path, *, is_listing: bool = False) -> Iterator[str]:
    """Yield kind, architecture, numbers, bytes and types of a checkpoint.

    Args:
        folder: A Hugging Face folder or a Megatron checkpoint.
        is_listing: Whether each tensor gets a line as well.

    Raises:
        CheckpointError: The Megatron checkpoint is torn, or contains code.
        ConversionError: The Hugging Face folder is torn.
        ConfigError: config.json is missing, or describes a variant that is not implemented.
    """
    hf = read_convertible_config(folder)
    is_megatron = is_megatron_checkpoint(folder)
    kind = "Megatron checkpoint" if is_megatron else "Hugging Face folder"
    yield f"{folder}: {kind} of {architecture_of(hf)}"
    if is_megatron:
        stored = StoredTensors(folder / WEIGHTS)
        tensors, files = stored.outline(), stored.files
    else:
        source = HuggingFaceSource(HFWeights(folder))
        tensors, files = source.outline(), source.files
        if source.weights.left_out:
            yield f"left out: {len(source.weights.left_out)} tensors that predict further tokens"
    yield _counted("weights", {k: t for k, t in tensors.items() if not _is_beside(k)})
    adapters = {k: t for k, t in tensors.items() if is_adapter(k) and not k.startswith(_OPTIMIZER)}
    optimizer = {k: t for k, t in tensors.items() if k.startswith(_OPTIMIZER)}
    yield from (_counted(*pair) for pair in (("LoRA", adapters), ("optimizer", optimizer)) if pair[1])
    yield f"files: {len(files)}, {sum(file.stat().st_size for file in files) / 1e9:.3f} GB"
    if is_listing:
        for key, tensor in tensors.items():
            yield f"{key} {_dtype(tensor)} {tuple(tensor.shape)}"


def _is_beside(key: str) -> bool:
    return key.startswith(_OPTIMIZER) or is_adapter(key)


def _counted(what: str, tensors: Mapping[str, Tensor]) -> str:
    dtypes = Counter(_dtype(tensor) for tensor in tensors.values())
    elements = sum(tensor.numel() for tensor in tensors.values())
    size = sum(tensor.nbytes for tensor in tensors.values())
    kinds = ", ".join(f"{number} {dtype}" for dtype, number in dtypes.most_common())
    return f"{what}: {len(tensors)} tensors ({kinds}), {elements:,} elements, {size / 1e9:.3f} GB"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
