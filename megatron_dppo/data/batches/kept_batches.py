"""Saves and reads the mini-batches of rollouts as tensors, with one file per data-parallel group."""

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.data.batches.batch_file import read_batches, write_batches
from megatron_dppo.errors import DataError
from megatron_dppo.types import TrainBatch

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
    """Return the files of all data-parallel groups, in group order.

    Raises:
        DataError: The rollout was not saved, or not by each group of one job.
    """
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

    Raises:
        DataError: The rollout was not saved completely, or its groups are not a multiple of the reading groups.
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
