"""Rules about the run: its folder and disk, resuming, the optimizer, evaluation sets, and tracking."""

import contextlib
import importlib.util
import math
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron_dppo.architectures.parameters import model_shape
from megatron_dppo.checkpoints.checkpoint_folder import is_megatron_checkpoint
from megatron_dppo.checks.data_rules import reward_problems
from megatron_dppo.checks.facts import Facts, nearest_folder, rule
from megatron_dppo.config.markers import Section, bound_problems, clashes, idle_settings
from megatron_dppo.config.resuming import change_table, experiment_changes
from megatron_dppo.config.schema import Config
from megatron_dppo.data.prompts.prompts import detect_schema, read_columns
from megatron_dppo.errors import DataError, Problem, did_you_mean
from megatron_dppo.rewards import RewardChoice
from megatron_dppo.rollout.evaluation import evaluation_sets
from megatron_dppo.run_folder.folder import SUBFOLDERS
from megatron_dppo.run_folder.lock import LOCK, holder
from megatron_dppo.run_folder.trackers import NO_URL, WEBHOOK, is_url
from megatron_dppo.runtime.files import binary_count
from megatron_dppo.runtime.process import host_bytes

_GIB = 1 << 30
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_MASTER_BYTES = 4  # the optimizer's own copy, which it has of float32 parameters too
_MOMENTS_BYTES = 8

_WRITTEN = {
    "samples_every": "no samples are written",
    "batches_every": "no mini-batches are kept",
    "paired_routing_every": "no mini-batch is forwarded with both routes",
    "clipped_tokens_every": "no masked tokens are listed",
}


def idle_remarks(config: Config) -> list[str]:
    """Return a note on the settings that do nothing, because another setting turns them off."""
    found = [f"{key} (it needs {needs.text})" for key, needs in idle_settings(config)]
    return [f"these settings do nothing: {', '.join(found)}"] if found else []


@rule("clashes")
def _clashes(config: Config, facts: Facts) -> Iterator[Problem]:
    """No two settings are given that exclude each other; a marker of the setting's type says which."""
    yield from clash_problems(config)


@rule("bounds")
def _bounds(config: Config, facts: Facts) -> Iterator[Problem]:
    """No setting is beyond a number or another setting that limits it in training; a marker says which."""
    yield from bound_problems(config)


def clash_problems(config: Config, among: tuple[str, ...] = ("",)) -> Iterator[Problem]:
    """Yield the problem of each two settings that exclude each other, whose keys begin with one of `among`."""
    for key, clash in clashes(config):
        if key.startswith(among) and clash.key.startswith(among):
            found = f"{_shown(config, key)} with {clash.key} = {_shown(config, clash.key)}"
            yield Problem(key, found, clash.because, f"Change it, or {clash.key}.")


def _shown(config: Config, key: str) -> str:
    value = attrgetter(key)(config)
    return "a table" if isinstance(value, Section) else repr(value)


def period_remarks(config: Config) -> list[str]:
    """Return the periods of [tracking] that were set, are longer than the run and never act, as sentences."""
    last, tracking = config.run.num_rollouts, config.tracking
    periods = {name: getattr(tracking, name) for name in _WRITTEN if name in tracking.model_fields_set}
    return [
        f"tracking.{name} is {every} and run.num_rollouts {last}: it acts in rollouts {every}, {2 * every}, "
        f"{3 * every}, ..., so {_WRITTEN[name]}. Set it to at most {last}, or to 0."
        for name, every in periods.items()
        if every > last
    ]


@rule("same_experiment", needs="machine")
def _same_experiment(config: Config, facts: Facts) -> Iterator[Problem]:
    """A resumed run has the settings that it was trained with, except for settings that may change."""
    if facts.saved is None or facts.accepts_changes:
        return
    file, now = config.run.folder / "config.toml", config.model_dump(mode="json")
    accepted = file.read_text(encoding="utf-8") if file.is_file() else ""  # by the run's last start
    trained = [tomllib.loads(was) for was in (facts.saved.config, accepted) if was]
    changes = [experiment_changes(_with_answers(was, config), _with_answers(now, config)) for was in trained]
    if changes and all(changes):
        settings = "setting that differs" if len(changes[0]) == 1 else "settings that differ"
        yield Problem(
            "run.folder",
            f"{len(changes[0])} {settings} from those that trained {facts.saved.checkpoint}",
            "the same experiment; examples/guides/stopping_and_resuming.md lists the settings that may change",
            "Choose another run.folder, restore the settings, or add --accept-changes, which notes them in "
            "metrics.jsonl.",
            change_table(changes[0]),
        )


def _with_answers(settings: dict[str, Any], config: Config) -> dict[str, Any]:
    """Return the settings; if they name no answer column, with the column found in the file."""
    data = settings.get("data", {})
    if data.get("answer_column") is not None:
        return settings
    with contextlib.suppress(DataError):
        prompts, column = config.data.prompts[0].path, data.get("prompt_column", config.data.prompt_column)
        found = detect_schema(prompts, column, read_columns(prompts))
        return {**settings, "data": {**data, "answer_column": found.answer}}
    return settings


@rule("same_optimizer_states", needs="machine")
def _same_optimizer_states(config: Config, facts: Facts) -> Iterator[Problem]:
    """A resumed run uses optimizer states in the form in which its checkpoint stores them."""
    if facts.saved is None:
        return
    now, checkpoint = config.optimizer.distributed, str(facts.saved.checkpoint)
    if tomllib.loads(facts.saved.config).get("optimizer", {}).get("distributed", now) != now:
        yield Problem(
            "optimizer.distributed",
            f"{str(now).lower()}, which {checkpoint} was not saved with",
            "the same: Megatron stores optimizer states in another form, and does not convert them",
            f"Restore it, or start a run in another folder from its weights: model.load = {checkpoint!r}.",
        )


@rule("best_metric")
def _best_metric(config: Config, facts: Facts) -> Iterator[Problem]:
    """The metric that picks the best checkpoints is one that this run measures."""
    checkpoint = config.checkpoint
    if not checkpoint.keep_best or not checkpoint.best_metric.startswith("eval/"):
        return
    measured = [name for each in evaluation_sets(config) for name in each.metric_names]
    if checkpoint.best_metric not in measured:
        switched_off = "Set evaluation.every to 1 or more, or name another metric."
        otherwise = "Add the set to evaluation.sets, or name another metric."
        otherwise = otherwise if config.evaluation.every else switched_off
        action = did_you_mean(checkpoint.best_metric, measured, otherwise)
        yield Problem("checkpoint.best_metric", repr(checkpoint.best_metric), "a metric of this run", action)


@rule("tracking_backends", needs="machine")
def _tracking_backends(config: Config, facts: Facts) -> Iterator[Problem]:
    """The trackers are installed."""
    for name in config.tracking.backends:
        if importlib.util.find_spec(name) is None:
            found = f"{name!r}, which is not installed"
            action = "Install it with pip install 'megatron_dppo[track]', or remove it from the list."
            yield Problem("tracking.backends", found, "an installed tracker", action)


@rule("tracking_webhook", needs="machine")
def _tracking_webhook(config: Config, facts: Facts) -> Iterator[Problem]:
    """The URL for alarms is one."""
    if (url := os.environ.get(WEBHOOK)) and not is_url(url):
        yield NO_URL


@rule("run_folder", needs="machine")
def _run_folder(config: Config, facts: Facts) -> Iterator[Problem]:
    """The run folder is, or can become, a separate folder for the run that can be written."""
    folder, expected = config.run.folder, "a separate folder for the run, such as runs/first"
    if folder.absolute() in (Path.cwd(), Path("/")):
        found = "'', the working directory" if folder == Path() else f"{folder}, which has many other files"
        yield Problem("run.folder", found, expected, "Name a folder.")
        return
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            found = f"{folder}, but {path} is a link to {path.readlink()}, which is not there"
            action = "Mount its disk, remove the link, or choose another folder."
            yield Problem("run.folder", found, "a folder, or a new name", action)
            return
    in_the_way = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if in_the_way.exists() and not in_the_way.is_dir():
        found = f"{folder}, but {in_the_way} is a file"
        yield Problem("run.folder", found, "a folder, or a new name", "Choose another folder.")
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".check_", dir=nearest_folder(folder)):
            pass
    except OSError as error:
        found = f"{folder}: nothing can be written in {nearest_folder(folder)} ({error.strerror})"
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
    needed = num_bytes + config.checkpoint.reserve_gib * _GIB
    if facts.free_bytes < needed:
        yield Problem(
            "run.folder",
            f"{binary_count(facts.free_bytes)} free where {config.run.folder} is",
            f"at least {binary_count(needed)}: a checkpoint takes {binary_count(num_bytes)}, and "
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
            f"true, with {binary_count(here)} of a checkpoint's {binary_count(num_bytes)} copied by {local} "
            "processes on this host",
            f"at most its {binary_count(own)} of memory",
            "Set it to false, which writes without a copy and lets training wait, or use more hosts.",
        )


def processes_here() -> int | None:
    """Return the number of the job's processes on this host; None outside of a job, such as on a login node."""
    given = os.environ.get("LOCAL_WORLD_SIZE")
    return None if given is None else int(given)


def checkpoint_bytes(config: Config, facts: Facts) -> int | None:
    """Return a lower bound of a checkpoint's bytes: weights, and Adam's states of all trained parameters.

    Adapters are not counted. The result is None if the model's sizes are not known.
    """
    if facts.model_sizes is None or isinstance(facts.model, Problem):
        return None
    num_parameters = model_shape(facts.model).num_parameters
    state_bytes = 0 if config.lora.rank else _MOMENTS_BYTES + _MASTER_BYTES
    return num_parameters * (_DTYPE_BYTES[config.model.dtype] + state_bytes)


_ASSUMED_BYTES_PER_S = 1e9
_DEFAULT_SAVE_S = 480  # as examples/slurm has it


def stop_remarks(config: Config, facts: Facts) -> list[str]:
    """Return a note if a SLURM job that is asked to stop has less time than a checkpoint takes to write."""
    num_bytes, given = checkpoint_bytes(config, facts), os.environ.get("SAVE_SECONDS", "")
    if num_bytes is None:
        return []
    limit_s = int(given) if given.isdecimal() else _DEFAULT_SAVE_S
    needed_s = math.ceil(num_bytes / _ASSUMED_BYTES_PER_S)
    if needed_s <= limit_s:
        return []
    enough_s = 60 * math.ceil(1.25 * needed_s / 60)
    return [
        f"SAVE_SECONDS: a SLURM job that is asked to stop has {limit_s} s for a gradient step and a checkpoint "
        f"of at least {binary_count(num_bytes)}, which takes {needed_s} s at 1 GB/s. This speed is assumed: "
        "that of the disk is not known. If the disk is not faster, submit with "
        f"SAVE_SECONDS={enough_s} and --signal=B:USR1@{enough_s + 120}, both in the environment (the signal as "
        f"SBATCH_SIGNAL=B:USR1@{enough_s + 120}), or the work since the checkpoint before is repeated."
    ]


@rule("evaluation_names")
def _evaluation_names(config: Config, facts: Facts) -> Iterator[Problem]:
    """The name of a set can be part of a metric's name, and of a file's."""
    for name in config.evaluation.used_sets:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            expected = "letters, digits, _ and -, starting with a letter or digit"
            yield Problem("evaluation.sets", f"a set called {name!r}", expected, "Choose another name.")


@rule("evaluation_pass_at")
def _evaluation_pass_at(config: Config, facts: Facts) -> Iterator[Problem]:
    """No k of pass@k is above the number of responses to a prompt."""
    for each in evaluation_sets(config):
        largest = max(each.pass_at, default=1)
        if largest > each.samples_per_prompt:
            expected = f"at most the {each.samples_per_prompt} responses to each prompt of {each.name}"
            action = "Lower it, or raise samples_per_prompt."
            yield Problem("evaluation.pass_at", str(largest), expected, action)


@rule("evaluation_reward", needs="machine")
def _evaluation_reward(config: Config, facts: Facts) -> Iterator[Problem]:
    """The reward of a set, if it names one, is registered, or its package can be found."""
    for name, own in config.evaluation.used_sets.items():
        problems = reward_problems(RewardChoice(own.reward), config) if own.reward is not None else ()
        for problem in problems:
            yield replace(problem, where=f"evaluation.sets.{name}.reward")
