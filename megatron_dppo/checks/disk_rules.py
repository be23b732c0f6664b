"""Rules about the run folder and its disk."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_dppo.architectures.parameters import model_shape
from megatron_dppo.checks.facts import Facts, existing
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem

_GIB = 1 << 30
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_MASTER_BYTES = 4  # the optimizer's own copy, which it has of float32 parameters too
_MOMENTS_BYTES = 8


@rule("run_folder", needs="machine")
def _run_folder(config: Config, facts: Facts) -> Iterator[Problem]:
    """The run folder is, or can become, a folder of the run's own that can be written."""
    folder, expected = config.run.folder, "a folder of the run's own, such as runs/first"
    if folder.absolute() in (Path.cwd(), Path("/")):
        found = "'', the working directory" if folder == Path() else f"{folder}, which holds much else"
        yield Problem("run.folder", found, expected, "Name a folder.")
        return
    in_the_way = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if in_the_way.exists() and not in_the_way.is_dir():
        found = f"{folder}, where {in_the_way} is a file"
        yield Problem("run.folder", found, "a folder, or a new name", "Choose another folder.")
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".check_", dir=existing(folder)):
            pass
    except OSError as error:
        found = f"{folder}: nothing can be written in {existing(folder)} ({error.strerror})"
        yield Problem("run.folder", found, "a place that can be written", "Choose another folder.")


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


def checkpoint_bytes(config: Config, facts: Facts) -> int | None:
    """Return the least that a checkpoint takes: weights, and Adam's states of all that is trained.

    Adapters are not counted. None where the model's sizes are not known.
    """
    if facts.model_sizes is None or isinstance(facts.model, Problem):
        return None
    num_parameters = model_shape(facts.model).num_parameters
    state_bytes = 0 if config.lora.rank else _MOMENTS_BYTES + _MASTER_BYTES
    return num_parameters * (_DTYPE_BYTES[config.model.dtype] + state_bytes)
