"""Rules about the engine, the optimizer, tracking, and what a resume may change."""

import contextlib
import importlib.util
import math
import tomllib
from collections.abc import Iterator
from typing import Any

from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.resuming import change_table, experiment_changes
from megatron_dppo.config.schema import Config
from megatron_dppo.config.settings import flat
from megatron_dppo.data.prompts.prompts import detect_schema, read_columns
from megatron_dppo.errors import DataError, Problem, did_you_mean
from megatron_dppo.rollout.evaluation import evaluation_sets

_WRITTEN = {
    "samples_every": "no samples are written",
    "batches_every": "no mini-batches are kept",
    "paired_routing_every": "no mini-batch is forwarded with both routes",
    "clipped_tokens_every": "no masked tokens are listed",
}


def period_remarks(config: Config) -> list[str]:
    """Return the periods of [tracking] that are longer than the run and never act, as sentences."""
    last = config.run.num_rollouts
    periods = {name: getattr(config.tracking, name) for name in _WRITTEN}
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
            "the same experiment; megatron_dppo/config/README.md lists the settings that may change",
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
        prompts, column = config.data.prompts, data.get("prompt_column", config.data.prompt_column)
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


@rule("overlap")
def _overlap(config: Config, facts: Facts) -> Iterator[Problem]:
    """Communication that Megatron is to overlap with computing exists."""
    if not config.parallel.overlap_param_gather:
        return
    for name, is_on in (
        ("optimizer.distributed", config.optimizer.distributed),
        ("parallel.overlap_grad_reduce", config.parallel.overlap_grad_reduce),
    ):
        if not is_on:
            action = f"Set {name} = true, or turn parallel.overlap_param_gather off."
            yield Problem(name, "false with parallel.overlap_param_gather", "true", action)


@rule("roll_back")
def _roll_back(config: Config, facts: Facts) -> Iterator[Problem]:
    """A run that may roll back has checkpoints between rollouts."""
    if config.tracking.alarms == "roll_back" and config.checkpoint.every == 0:
        expected = "1 or more with tracking.alarms = 'roll_back'"
        yield Problem("checkpoint.every", "0", expected, "Set how many rollouts a roll back may lose.")


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


@rule("finite_numbers")
def _finite_numbers(config: Config, facts: Facts) -> Iterator[Problem]:
    """Numbers are finite, except in [algorithm], where infinity can mean off; the preset checks them."""
    for key, value in flat(config.model_dump(exclude={"algorithm", "megatron", "sglang"})).items():
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(key, str(value), "a finite number", "Write a number.")


@rule("learning_rate_floor")
def _learning_rate_floor(config: Config, facts: Facts) -> Iterator[Problem]:
    """The schedule decays."""
    if config.optimizer.min_lr > config.optimizer.lr:
        expected = f"at most optimizer.lr = {config.optimizer.lr}"
        yield Problem("optimizer.min_lr", str(config.optimizer.min_lr), expected, "Lower it.")


@rule("warmup")
def _warmup(config: Config, facts: Facts) -> Iterator[Problem]:
    """Warm-up ends within the run."""
    if config.optimizer.warmup_steps > config.num_gradient_steps:
        expected = f"at most the run's {config.num_gradient_steps} gradient steps"
        yield Problem("optimizer.warmup_steps", str(config.optimizer.warmup_steps), expected, "Lower it.")


@rule("tracking_backends", needs="machine")
def _tracking_backends(config: Config, facts: Facts) -> Iterator[Problem]:
    """The trackers are installed."""
    for name in config.tracking.backends:
        if importlib.util.find_spec(name) is None:
            found = f"{name!r}, which is not installed"
            action = "Install it with pip install 'megatron_dppo[track]', or remove it from the list."
            yield Problem("tracking.backends", found, "an installed tracker", action)
