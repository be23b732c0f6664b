"""Rules about the run folder, its disk, and the host's memory in a save."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_dppo.architectures.parameters import model_shape
from megatron_dppo.checkpoints.checkpoint_folder import is_megatron_checkpoint
from megatron_dppo.checks.facts import Facts, existing
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem
from megatron_dppo.run_folder.folder import SUBFOLDERS
from megatron_dppo.run_folder.lock import LOCK, holder

_GIB = 1 << 30
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_MASTER_BYTES = 4  # the optimizer's own copy, which it has of float32 parameters too
_MOMENTS_BYTES = 8


@rule("run_folder", needs="machine")
def _run_folder(config: Config, facts: Facts) -> Iterator[Problem]:
    """The run folder is, or can become, a separate folder for the run that can be written."""
    folder, expected = config.run.folder, "a separate folder for the run, such as runs/first"
    if folder.absolute() in (Path.cwd(), Path("/")):
        found = "'', the working directory" if folder == Path() else f"{folder}, which has many other files"
        yield Problem("run.folder", found, expected, "Name a folder.")
        return
    in_the_way = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if in_the_way.exists() and not in_the_way.is_dir():
        found = f"{folder}, but {in_the_way} is a file"
        yield Problem("run.folder", found, "a folder, or a new name", "Choose another folder.")
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".check_", dir=existing(folder)):
            pass
    except OSError as error:
        found = f"{folder}: nothing can be written in {existing(folder)} ({error.strerror})"
        yield Problem("run.folder", found, "a place that can be written", "Choose another folder.")


@rule("run_folder_models", needs="machine")
def _run_folder_models(config: Config, facts: Facts) -> Iterator[Problem]:
    """The run does not write into a model's folder, or into a folder of models."""
    folder = config.run.folder
    foreign = _foreign(folder)
    models = [path for path in (folder, *foreign) if foreign and _is_model(path)]
    for model in models[:1]:
        found = (
            f"{folder}, a model's folder"
            if model == folder
            else f"{folder}, which contains the model {model.name}"
        )
        expected = "a separate folder for the run, such as runs/first"
        yield Problem("run.folder", found, expected, "Name another folder.")


@rule("run_folder_in_use", needs="now")
def _run_folder_in_use(config: Config, facts: Facts) -> Iterator[Problem]:
    """No other process uses the run folder."""
    if (owner := holder(config.run.folder)) is not None:
        found, expected = f"{config.run.folder}, in use by {owner}", "a folder that no other run is using"
        yield Problem(
            "run.folder", found, expected, "Wait for that run or end it, or choose another run.folder."
        )


def folder_remarks(config: Config) -> list[str]:
    """Return notes on files in the run folder that belong to no run; `train` does not touch them."""
    foreign = _foreign(config.run.folder)
    if not foreign:
        return []
    names = ", ".join(path.name for path in foreign[:_SHOWN]) + (", ..." if len(foreign) > _SHOWN else "")
    return [f"run.folder: {config.run.folder} contains no run, but {names}; the run would write next to them."]


_SHOWN = 3
_OF_A_RUN = ("config.toml", "metrics.jsonl")
_OF_A_LAUNCHER = (*SUBFOLDERS, "slurm", LOCK)
_LOGS = (".log", ".out", ".err")


def _foreign(folder: Path) -> list[Path]:
    """Return the contents of a folder without a run, except the logs and servers of a launcher, by name."""
    if (
        not folder.is_dir()
        or folder.absolute() in (Path.cwd(), Path("/"))
        or any((folder / name).exists() for name in _OF_A_RUN)
    ):
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.name not in _OF_A_LAUNCHER and path.suffix not in _LOGS and not path.name.startswith(".")
    )


def _is_model(folder: Path) -> bool:
    config = folder / "config.json"
    keys = (b'"model_type"', b'"architectures"')
    return is_megatron_checkpoint(folder) or (
        config.is_file() and any(key in config.read_bytes() for key in keys)
    )


@rule("checkpoint_disk", needs="machine")
def _checkpoint_disk(config: Config, facts: Facts) -> Iterator[Problem]:
    """One checkpoint fits the disk."""
    num_bytes = checkpoint_bytes(config, facts)
    if num_bytes is None or facts.free_bytes == 0:  # /proc and its like, which another rule refuses
        return
    needed = num_bytes / _GIB + config.checkpoint.reserve_gib
    if facts.free_bytes / _GIB < needed:
        yield Problem(
            "run.folder",
            f"{facts.free_bytes / _GIB:.1f} GiB free where {config.run.folder} is",
            f"at least {needed:.1f} GiB: a checkpoint takes {num_bytes / _GIB:.1f} GiB, and "
            f"checkpoint.reserve_gib = {config.checkpoint.reserve_gib:g} stays free",
            "Choose a folder on a larger disk, or free some space.",
        )


@rule("checkpoint_memory", needs="machine")
def _checkpoint_memory(config: Config, facts: Facts) -> Iterator[Problem]:
    """The host's memory fits its processes' copies of a checkpoint; checked only inside a job, on its hosts."""
    num_bytes, local = checkpoint_bytes(config, facts), processes_here()
    if num_bytes is None or local is None or not config.checkpoint.asynchronous:
        return
    here, own = num_bytes * local // facts.world_size, host_bytes()
    if here > own:
        yield Problem(
            "checkpoint.asynchronous",
            f"true, with {here / _GIB:.1f} of a checkpoint's {num_bytes / _GIB:.1f} GiB copied by {local} "
            "processes on this host",
            f"at most its {own / _GIB:.1f} GiB of memory",
            "Set it to false, which writes without a copy and lets training wait, or use more hosts.",
        )


def processes_here() -> int | None:
    """Return the number of the job's processes on this host; None outside of a job, such as on a login node."""
    given = os.environ.get("LOCAL_WORLD_SIZE")
    return None if given is None else int(given)


def host_bytes() -> int:
    """Return the memory of this host, or of this process's control group if that is less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            found.append(int(Path(file).read_text()))
    return min(found)


def checkpoint_bytes(config: Config, facts: Facts) -> int | None:
    """Return a lower bound of a checkpoint's bytes: weights, and Adam's states of all trained parameters.

    Adapters are not counted. The result is None if the model's sizes are not known.
    """
    if facts.model_sizes is None or isinstance(facts.model, Problem):
        return None
    num_parameters = model_shape(facts.model).num_parameters
    state_bytes = 0 if config.lora.rank else _MOMENTS_BYTES + _MASTER_BYTES
    return num_parameters * (_DTYPE_BYTES[config.model.dtype] + state_bytes)
