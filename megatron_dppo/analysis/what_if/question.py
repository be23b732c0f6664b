"""Validates a what-if question about a run's kept mini-batches before any model loads."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.algorithms.presets import overrides_in
from megatron_dppo.analysis.what_if.variants import Value, Variant, require_inputs, variants
from megatron_dppo.checkpoints.checkpoint_folder import complete
from megatron_dppo.checks import RULES, check
from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config, ParallelConfig
from megatron_dppo.data.batches.kept_batches import group_files, kept_inputs, kept_rollouts
from megatron_dppo.errors import ConfigError, Problem, writing_to

# What a forward of kept tokens needs; the rest is about sampling and training.
_RULES = (
    "preset",
    "preset_fields",
    "model_folder",
    "model_architecture",
    "model_sizes",
    "model_variant",
    "layout",
)


@dataclass(frozen=True)
class Question:
    """Rollouts, variants and weights of a what-if question."""

    run: Path
    rollouts: tuple[int, ...]
    variants: tuple[Variant, ...]  # the run's own first
    before: Path | None = None  # weights that the rollouts were sampled with, for "recomputed" anchors

    @property
    def batches(self) -> Path:
        """Folder of the kept mini-batches."""
        return self.run / "batches"


def question_of(
    run: Path,
    *,
    checkpoint: Path | None,
    before: Path | None,
    rollouts: Sequence[int],
    presets: Sequence[str],
    sweeps: Sequence[str],
    overrides: Sequence[str],
    world_size: int,
    out: Path,
) -> tuple[Config, Question]:
    """Return the config to build the actor from, and the question.

    Args:
        run: A run folder with `batches/`.
        checkpoint: Weights to ask; none means the run's newest checkpoint.
        before: Weights that the rollouts were sampled with.
        rollouts: Of those kept; none means the last.
        presets: Beside the run's own; none means that one swept.
        sweeps: "field=value,value".
        overrides: "section.key=value" on top of the run's config.
        world_size: Processes; with one, the run's layout is left aside.
        out: Will hold the answer; made here, so that nobody waits for what cannot be written.

    Raises:
        ConfigError: With every problem of what was given.
        DataError: A rollout was not kept.
    """
    if not (run / "config.toml").is_file():
        action = "Name the folder that run.folder said."
        raise ConfigError(Problem("RUN", f"no config.toml in {run}", "a run folder", action))
    if not (kept := kept_rollouts(run / "batches")):
        action = "Run with tracking.batches_every, say 10: it keeps the rollout's mini-batches as tensors."
        raise ConfigError(Problem("RUN", f"no mini-batches in {run / 'batches'}", "some rollout's", action))
    config = _config_of(run, checkpoint, overrides, world_size)
    chosen = tuple(rollouts) or (kept[-1],)
    base = Variant(config.algorithm.preset, overrides_in(config.algorithm.model_dump()))
    question = Question(run, chosen, tuple(variants(base, presets, parse_sweeps(sweeps))), before)
    num_columns, has_old = kept_inputs(
        [file for rollout in chosen for file in group_files(question.batches, rollout)]
    )
    require_inputs(question.variants, num_columns=num_columns, has_old_log_probs=has_old or before is not None)
    problems = check(config, world_size, {name: RULES[name] for name in _RULES})
    if before is not None and not before.is_dir():
        problems.append(Problem("--before", f"no folder {before}", "a checkpoint", "Check the path."))
    if problems:
        raise ConfigError(problems)
    with writing_to("--out", out):
        out.mkdir(parents=True, exist_ok=True)
    return config, question


def _config_of(run: Path, checkpoint: Path | None, overrides: Sequence[str], world_size: int) -> Config:
    if checkpoint is None:
        whole = complete(run / "checkpoints")
        if not whole:
            action = "Name weights with --checkpoint; model.load of the run are those it began with."
            raise ConfigError(Problem("--checkpoint", f"no checkpoint in {run}", "one", action))
        checkpoint = whole[-1]
    config = load_config([run / "config.toml"], [f"model.load={checkpoint}", *overrides])
    if world_size > 1:
        return config
    alone = ParallelConfig(max_tokens_per_microbatch=config.parallel.max_tokens_per_microbatch)
    return config.model_copy(update={"parallel": alone})


def parse_sweeps(sweeps: Sequence[str]) -> dict[str, list[Value]]:
    """Parse field -> values, from "field=value,value" each.

    Raises:
        ConfigError: One of them is not of that form.
    """
    found: dict[str, list[Value]] = {}
    for sweep in sweeps:
        name, _, text = sweep.partition("=")
        values = [_value(part.strip()) for part in text.split(",")]
        if not name.isidentifier() or "" in values:
            action = "Write for example --sweep delta=0.05,0.1,0.2."
            raise ConfigError(Problem("--sweep", repr(sweep), "field=value,value,...", action))
        found[name] = values
    return found


def _value(text: str) -> Value:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, float | int | str | bool) else text
