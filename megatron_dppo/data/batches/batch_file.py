"""Reads and writes gradient steps as safetensors files.

Checkpoints in the middle of a rollout have one file. A run's `batches/` keeps one per data-parallel group.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_dppo.errors import DataError
from megatron_dppo.runtime.files import ABSENT, save_tensors, unreadable
from megatron_dppo.types import Microbatch, RolloutTopK, RoutedExperts, Sample, TrainBatch

Record = TypeVar("Record", Sample, Microbatch)

_LAYOUT = "steps"  # metadata key of the description that assigns tensors to steps


def write_batches(path: Path, steps: Sequence[TrainBatch]) -> None:
    """Write gradient steps without pickle. `read_batches` returns the same bits.

    Tensors are named `<step>.<micro-batch>.<field>`. The file's metadata contains counts, the layer numbers of
    routes and the sample ids as JSON.
    """
    tensors: dict[str, Tensor] = {}
    layout: list[dict[str, object]] = []
    for i, step in enumerate(steps):
        for j, microbatch in enumerate(step.microbatches):
            named = tensors_of(microbatch).items()
            tensors |= {f"{i}.{j}.{name}": tensor.contiguous().clone() for name, tensor in named}
        routes = next((m.routed_experts for m in step.microbatches if m.routed_experts is not None), None)
        layout.append(
            {
                "num_microbatches": len(step.microbatches),
                "num_loss_tokens": step.num_loss_tokens,
                "num_samples": step.num_samples,
                "layer_numbers": None if routes is None else list(routes.layer_numbers),
                "num_experts": None if routes is None else routes.num_experts,
                "sample_ids": [list(microbatch.sample_ids) for microbatch in step.microbatches],
            }
        )
    save_tensors(tensors, path, metadata={_LAYOUT: json.dumps(layout)})


def read_batches(path: Path) -> tuple[TrainBatch, ...]:
    """Read gradient steps written by `write_batches`."""
    try:
        opened: Any = safe_open(path, "pt")
        with opened as file:
            layout: list[dict[str, Any]] = json.loads(file.metadata()[_LAYOUT])
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in list(file.keys())}
        return tuple(_step(tensors, i, **entry) for i, entry in enumerate(layout))
    except (*ABSENT, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: found {type(error).__name__}: {error}; expected gradient steps of a rollout. "
            "The file is torn or of another kind; resume from an earlier checkpoint."
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


def bytes_of(step: TrainBatch) -> int:
    """Return the size of a gradient step's tensors in bytes."""
    return sum(tensor.nbytes for m in step.microbatches for tensor in tensors_of(m).values())


def tensors_of(record: Sample | Microbatch | RolloutTopK | RoutedExperts) -> dict[str, Tensor]:
    """Return the tensors of a record by field name, and of the records in it as `topk.ids`, ..."""
    found: dict[str, Tensor] = {}
    for name, value in vars(record).items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, RolloutTopK | RoutedExperts):
            found |= {f"{name}.{inner}": tensor for inner, tensor in tensors_of(value).items()}
    return found


def record_of(
    kind: type[Record],
    plain: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    layer_numbers: Sequence[int] | None,
    num_experts: int | None,
) -> Record:
    """Return a record with these tensors, named as by `tensors_of`, and its other fields.

    Args:
        kind: Its class.
        plain: Fields that have no tensor.
        tensors: Tensors; a tensor whose name is no field's is left out.
        layer_numbers: Layers of the routes, if there are any.
        num_experts: Number of experts of each of these layers.
    """
    names = {each.name for each in fields(kind)}
    given: dict[str, Any] = {**plain, **{name: tensor for name, tensor in tensors.items() if name in names}}
    if "topk.ids" in tensors:
        given["topk"] = RolloutTopK(tensors["topk.ids"], tensors["topk.log_probs"])
    if layer_numbers is not None and num_experts is not None:
        indices = tensors["routed_experts.indices"]
        given["routed_experts"] = RoutedExperts(indices, tuple(layer_numbers), num_experts)
    return kind(**given)


def _step(
    tensors: dict[str, Tensor],
    index: int,
    *,
    num_microbatches: int,
    num_loss_tokens: int,
    num_samples: int,
    layer_numbers: list[int] | None,
    num_experts: int | None,
    sample_ids: Sequence[Sequence[str]] = (),
) -> TrainBatch:
    microbatches: list[Microbatch] = []
    for j in range(num_microbatches):
        prefix = f"{index}.{j}."
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        plain = {"sample_ids": tuple(sample_ids[j]) if sample_ids else ()}
        microbatches.append(record_of(Microbatch, plain, own, layer_numbers, num_experts))
    return TrainBatch(tuple(microbatches), num_loss_tokens, num_samples)


_FOLDER = re.compile(r"rollout_(\d{6,})")
_FILE = re.compile(r"group_(\d+)_of_(\d+)\.safetensors")


def write_group(folder: Path, rollout: int, place: tuple[int, int], steps: Sequence[TrainBatch]) -> None:
    """Write one group's gradient steps of a rollout. The file is written atomically.

    Args:
        folder: The run's `batches/`.
        rollout: Index of the rollout, from 0.
        place: (index of the group, number of data-parallel groups).
        steps: Gradient steps of the group.
    """
    rank, size = place
    file = _of_rollout(folder, rollout) / f"group_{rank}_of_{size}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    write_batches(unfinished, steps)
    unfinished.replace(file)


def kept_rollouts(folder: Path) -> list[int]:
    """Return the indices of the rollouts with saved files, ascending."""
    names = [_FOLDER.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(found[1]) for found in names if found)


def group_files(folder: Path, rollout: int) -> list[Path]:
    """Return the files of all data-parallel groups, in group order."""
    of_rollout = _of_rollout(folder, rollout)
    names = sorted(of_rollout.iterdir()) if of_rollout.is_dir() else []
    places = {(int(found[1]), int(found[2])): path for path in names if (found := _FILE.fullmatch(path.name))}
    sizes = {size for _, size in places}
    if len(sizes) != 1 or {rank for rank, _ in places} != set(range(*sizes)):
        kept = ", ".join(path.name for path in names) or "nothing"
        there = ", ".join(str(index + 1) for index in kept_rollouts(folder)) or "none"
        raise DataError(
            f"{of_rollout}: found {kept}; expected group_<n>_of_<size>.safetensors of each data-parallel group "
            f"of one job. Rollouts kept in {folder}, counted from 1: {there}. Name one of them, or run with "
            "tracking.batches_every."
        )
    return [places[place] for place in sorted(places)]


def read_share(folder: Path, rollout: int, place: tuple[int, int]) -> list[TrainBatch]:
    """Read this group's equal share of a rollout's gradient steps, in a job with fewer data-parallel groups.

    Args:
        folder: The run's `batches/`.
        rollout: Index of the rollout, from 0.
        place: (index of the reading group, number of data-parallel groups in the reading job).
    """
    rank, size = place
    files = group_files(folder, rollout)
    if len(files) % size:
        raise DataError(
            f"{folder}: found batches of {len(files)} data-parallel groups; expected a multiple of the {size} "
            "that read them. Start one process, or the same number as the run."
        )
    return [step for file in files[rank::size] for step in read_batches(file)]


def kept_inputs(files: Sequence[Path]) -> tuple[int, bool]:
    """Return (number of top-K columns in all files, whether all have log-probs of a "recomputed" anchor)."""
    steps = [step for file in files for step in read_batches(file)]
    microbatches = [m for step in steps for m in step.microbatches]
    columns: list[int] = [0 if m.topk is None else m.topk.ids.shape[1] for m in microbatches]
    return min(columns, default=0), all(m.old_log_probs is not None for m in microbatches)


def _of_rollout(folder: Path, rollout: int) -> Path:
    return folder / f"rollout_{rollout:06d}"
