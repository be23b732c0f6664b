"""Reads and writes Megatron folders: a distributed checkpoint (`megatron/`), config and tokenizer (`hf/`)."""

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dppo.architectures.sizes import HFConfig
from megatron_dppo.architectures.weight_map import is_adapter, is_weight_buffer
from megatron_dppo.checkpoints.checkpoint_folder import (
    WEIGHTS,
    is_megatron_checkpoint,
    require_megatron_checkpoint,
)
from megatron_dppo.checkpoints.hf_folder import HFWeights, whole_folder
from megatron_dppo.checkpoints.megatron_weights import load_hf_weights
from megatron_dppo.checkpoints.model_files import copy_model_files
from megatron_dppo.checkpoints.untrusted import refuse_code
from megatron_dppo.config.schema import LoraConfig
from megatron_dppo.errors import CheckpointError
from megatron_dppo.mcore.fixes import forget_stored_strides, plan_save, refuse_newer

HF = "hf"
# Errors that torch and Megatron raise on a torn file, or on missing or misshapen tensors.
_LOAD_ERRORS = (
    *(CheckpointingException, CheckpointException, UnpicklingError),
    *(OSError, RuntimeError, ValueError, KeyError, EOFError),
)


def hf_files(folder: Path) -> Path:
    """Return the folder of config.json and the tokenizer of a model folder of either kind."""
    return folder / HF if is_megatron_checkpoint(folder) else folder


def load_weights(chunks: Sequence[GPTModel], folder: Path, hf: HFConfig) -> None:
    """Load `model.load` into this rank's parameters, from a Hugging Face folder or a Megatron checkpoint.

    Raises:
        ConversionError: Hugging Face weights do not fit `hf`.
        CheckpointError: A Megatron checkpoint is torn, belongs to another model, or has LoRA adapters that
            the model does not have.
    """
    if not is_megatron_checkpoint(folder):
        load_hf_weights(chunks, HFWeights(folder), hf)
        return
    has_adapters = any(is_adapter(name) for chunk in chunks for name, _ in chunk.named_parameters())
    if not has_adapters and stored_lora(folder) is not None:
        raise CheckpointError(
            f"{folder} holds LoRA adapters in addition to weights; expected only weights. Merge them "
            "with megatron-dppo convert to-hf and load the result, or resume the run that wrote it."
        )
    load_model_states(chunks, load_sharded(model_states(chunks), folder / WEIGHTS))


def model_states(chunks: Sequence[GPTModel], metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the sharded state of this rank's part of the model; every layout can load its stored form."""
    return {_key(i): chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2].startswith("_extra_state")


@torch.no_grad()
def load_model_states(chunks: Sequence[GPTModel], states: dict[str, Any]) -> None:
    """Load the chunks from the result of `load_sharded` of their `model_states`."""
    for index, chunk in enumerate(chunks):
        missing, unexpected = chunk.load_state_dict(states[_key(index)], strict=False)
        odd = [name for name in (*missing, *unexpected) if not _is_extra_state(name)]
        assert not odd, f"states of another model: {odd[:3]}"


def _key(chunk: int) -> str:
    return "model" if chunk == 0 else f"model{chunk}"


def save_weights(chunks: Sequence[GPTModel], out: Path, template: Path) -> None:
    """Write a Megatron checkpoint of only weights, completely or not at all, from one process.

    Args:
        chunks: Model chunks to write.
        out: Folder to create.
        template: Hugging Face folder. Its config and tokenizer are copied into `hf/`.

    Raises:
        ConversionError: `out` exists already.
    """
    with whole_folder(out) as unfinished:
        (unfinished / WEIGHTS).mkdir()
        copy_model_files(template, unfinished / HF)
        save_sharded(model_states(chunks), unfinished / WEIGHTS)


def load_sharded(wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run Megatron's distributed load, and raise its many errors as CheckpointError.

    Each `_extra_state` is left out. Transformer Engine's modules keep fp8 scales there, as pickles that they
    would load. No supported model has fp8 scales, and the checkpoint may come from modules without
    `_extra_state`.

    Raises:
        CheckpointError: The folder is torn, belongs to another model or optimizer, or contains code.
    """
    refuse_code(folder)
    refuse_newer(folder)
    wanted = {
        key: {name: state for name, state in part.items() if not _is_extra_state(str(name))}
        if isinstance(part, dict)
        else part
        for key, part in wanted.items()
    }
    try:
        loaded: Any = dist_checkpointing.load(wanted, str(folder))
        return loaded
    except _LOAD_ERRORS as error:
        reason = str(error).splitlines()[0][:400] if str(error) else repr(error)
        raise CheckpointError(
            f"{folder} cannot be loaded: {reason}. It is torn, or of another model or optimizer; "
            "name another checkpoint, or make it again."
        ) from error


class PendingSave:
    """A distributed save: all ranks plan it together, each writes its files, then all make it valid together.

    Megatron would write from forked children. A thread is enough, since writing releases the interpreter
    lock, and no writer survives a killed trainer.
    """

    def __init__(self, state: dict[str, Any], folder: Path, *, is_copied: bool) -> None:
        """Plan the save of a sharded state into an existing empty folder; every rank calls this together.

        Args:
            state: Sharded state dict.
            folder: Empty folder to write to.
            is_copied: Keep copies on the host, so that training may change the tensors before they are written.
                Otherwise a tensor is copied from its device when it is written.
        """
        live = _storages(state)
        with results_in_this_process():
            self._request: Any = plan_save(state, folder)
        self._buckets: list[Any] = []
        if self._request.async_fn is not None:
            self._buckets = self._request.async_fn_args[1]
        if is_copied and self._buckets:
            self._buckets = _copied(self._request.preload_fn(), live)

    def write(self) -> list[Path]:
        """Write and sync this rank's files, in any thread, without communicating with other ranks.

        Raises:
            OSError: The disk is full, or fails in another way.
        """
        written: dict[int, Any] = {}
        outcomes: Any = queue.Queue()
        unfinished: Any = queue.Queue()
        for index, (path, key, (objects, tensors)) in enumerate(self._buckets):
            bucket: Any = (path, key, (objects, _OnHost(tensors)))
            unfinished.put(index)
            transforms = self._request.async_fn.args[0]
            FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, outcomes, unfinished, True)
            _, written[index] = outcomes.get()
            if isinstance(written[index], Exception):
                raise OSError(f"{bucket[0]}: {written[index]}; is the disk full?") from written[index]
        if self._buckets:
            self._request.async_fn_args[2].put(written)
        return [Path(path) for path, *_ in self._buckets]

    def finish(self) -> None:
        """Write the metadata that makes the folder loadable; every rank calls this after all have written.

        Raises:
            CheckpointError: The metadata could not be written, or a rank did not write; raised on every rank.
        """
        self._buckets = []
        finish_save(self._request)


def finish_save(request: Any) -> None:
    """Write a planned save's metadata; every rank calls this after all ranks have written.

    Raises:
        CheckpointError: The metadata could not be written, or a rank did not write; raised on every rank.
    """
    with _disk_errors_kept() as errors:
        try:
            for finalize in request.finalize_fns:
                finalize()
        except CheckpointException as error:
            raise CheckpointError(f"the checkpoint's metadata could not be written: {error}") from error
    reason: list[Any] = [str(errors[0]) if errors else None]
    dist.broadcast_object_list(reason, src=0)
    if reason[0] is not None:
        raise CheckpointError(f"the checkpoint's metadata could not be written: {reason[0]}")


@contextmanager
def _disk_errors_kept() -> Iterator[list[OSError]]:
    """Let rank 0 continue if Megatron cannot write metadata, because other ranks wait for it in collectives."""
    errors: list[OSError] = []

    def keeping(write: Callable[..., None]) -> Callable[..., None]:
        def write_or_keep(*args: Any, **kwargs: Any) -> None:
            try:
                write(*args, **kwargs)
            except OSError as error:
                errors.append(error)

        return write_or_keep

    before = FileSystemWriterAsync.finish, serialization.save_config
    FileSystemWriterAsync.finish, serialization.save_config = map(keeping, before)
    try:
        yield errors
    finally:
        FileSystemWriterAsync.finish, serialization.save_config = before


def bytes_to_write(state: Any) -> int:
    """Return the bytes of a sharded state's tensors that this rank writes."""
    sharded, _ = extract_sharded_tensors_and_factories(state)
    return sum(each.data.nbytes for each in nested_values(sharded) if is_main_replica(each.replica_id))


class _OnHost:
    """Iterates over tensors for Megatron's writer, and copies each to the host when it is written."""

    def __init__(self, tensors: Sequence[tuple[Any, Tensor]]) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for item, tensor in self._tensors:
            yield item, tensor.to("cpu")


def _storages(state: Any) -> set[int]:
    """Return the storages of a sharded state's tensors, which later training changes."""
    sharded, _ = extract_sharded_tensors_and_factories(state)
    return {each.data.untyped_storage().data_ptr() for each in nested_values(sharded)}


def _copied(buckets: Sequence[Any], live: set[int]) -> list[Any]:
    """Copy the tensors that share memory with the model or its optimizer; tensors from a device share none."""
    return [
        (path, key, (objects, [(item, _apart(tensor, live)) for item, tensor in tensors]))
        for path, key, (objects, tensors) in buckets
    ]


def _apart(tensor: Tensor, live: set[int]) -> Tensor:
    return tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor


def save_sharded(state: dict[str, Any], folder: Path) -> None:
    """Save into an existing empty folder from a single process; return when the bytes are on disk."""
    save = PendingSave(state, folder, is_copied=False)
    save.write()
    save.finish()


@contextmanager
def results_in_this_process() -> Iterator[None]:
    """Make a save return its results in a plain queue.

    Megatron otherwise starts a manager process by spawning, which takes seconds and runs the main module again.
    """
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def stored_lora(folder: Path) -> LoraConfig | None:
    """Return the `[lora]` that a Megatron checkpoint was trained with; None if it has no adapters.

    Every rank calls this together.

    Raises:
        CheckpointError: The folder contains code, or is torn.
    """
    tensors = _stored_tensors(folder)
    stored = {k: tensor for k, tensor in tensors.items() if is_adapter(k) and not k.startswith("optimizer.")}
    if not stored:
        return None
    one = next(tensor for key, tensor in stored.items() if key.endswith(".alpha"))
    alpha = load_sharded({"alpha": one.without_data()}, folder / WEIGHTS)["alpha"]
    factors = {key: tensor.global_shape for key, tensor in stored.items() if key.endswith(".lora_A")}
    ranks, found = {shape[-2] for shape in factors.values()}, {key.split(".")[-2] for key in factors}
    assert len(ranks) == 1, "all adapters of a run have one rank"
    targets = tuple(name for name in LoraConfig().targets if name in found)
    return LoraConfig(rank=ranks.pop(), alpha=int(alpha.flatten()[0]), targets=targets)


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of the weights in a Megatron checkpoint, ignoring its float32 buffers.

    Raises:
        CheckpointError: The folder is not a checkpoint, or its weights have several dtypes.
    """
    require_megatron_checkpoint(folder)
    own = ((key, tensor) for key, tensor in _stored_tensors(folder).items() if not key.startswith("optimizer."))
    weights = (tensor for key, tensor in own if not is_weight_buffer(key))
    dtypes = {tensor.dtype for tensor in weights if tensor.dtype.is_floating_point}
    if len(dtypes) != 1:
        raise CheckpointError(f"{folder}: weights of types {sorted(map(str, dtypes))}; expected one.")
    return dtypes.pop()


def _stored_tensors(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's tensors without data: Megatron's `ShardedTensor`s by name."""
    refuse_code(folder / WEIGHTS)
    forget_stored_strides()
    return dict(dist_checkpointing.load_tensors_metadata(str(folder / WEIGHTS)))
