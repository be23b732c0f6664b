"""Validates a what-if question about a run's kept mini-batches before any model loads."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_dppo.algorithms import PRESETS
from megatron_dppo.algorithms.presets import overrides_in
from megatron_dppo.analysis.what_if.variants import (
    OPTION,
    Value,
    Variant,
    flat_fields,
    inputs_lacking,
    require_inputs,
    require_own_rules,
    variants,
)
from megatron_dppo.architectures.sizes import config_file
from megatron_dppo.checkpoints.checkpoint_folder import complete
from megatron_dppo.checks import RULES, check
from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config, ParallelConfig
from megatron_dppo.data.batches.batch_file import group_files, kept_inputs, kept_rollouts
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
class Asked:
    """Options of the command line, unchecked."""

    run: Path  # a run folder with `batches/`
    out: Path  # output folder
    checkpoint: Path | None = None  # weights to evaluate; None means the newest checkpoint
    before: Path | None = None  # weights that the rollouts were sampled with
    rollouts: Sequence[str] = ()  # kept rollouts, counted from 1, or "all"; the default is the last one
    presets: Sequence[str] = ()  # besides the run's own; by default that one is swept
    is_all: bool = False  # all presets as well, but those whose inputs were not kept
    sweeps: Sequence[str] = ()  # "field=value,value"
    rule_options: str = ""  # "name=value,name=value" of own rules
    overrides: Sequence[str] = ()  # "section.key=value" on top of the run's config


@dataclass(frozen=True)
class Question:
    """Rollouts, variants and weights of a what-if question."""

    run: Path
    rollouts: tuple[int, ...]  # counted from 1
    variants: tuple[Variant, ...]  # the run's own first
    before: Path | None = None  # weights that the rollouts were sampled with, for "recomputed" anchors
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])  # variants of --all, and what they lack

    @property
    def batches(self) -> Path:
        """Folder of the kept mini-batches."""
        return self.run / "batches"


def question_of(asked: Asked, world_size: int) -> tuple[Config, Question]:
    """Return the config to build the actor from, and the question; makes the output folder.

    Args:
        asked: Options of the user.
        world_size: Processes; with one, the run's layout is left aside.

    Raises:
        ConfigError: Some options are invalid. The message lists every problem.
        DataError: A rollout was not kept whole.
    """
    run, before = asked.run, asked.before
    if not (run / "config.toml").is_file():
        action = "Name the run.folder of the run."
        raise ConfigError(Problem("RUN", f"no config.toml in {run}", "a run folder", action))
    if not (kept := kept_rollouts(run / "batches")):
        action = "Run with tracking.batches_every, say 10: it keeps the rollout's mini-batches as tensors."
        raise ConfigError(Problem("RUN", f"no mini-batches in {run / 'batches'}", "some rollout's", action))
    config = _config_of(run, asked.checkpoint, asked.overrides, world_size)
    rollouts = rollouts_of(asked.rollouts, [index + 1 for index in kept])
    files = [file for rollout in rollouts for file in group_files(run / "batches", rollout - 1)]
    num_columns, has_old = kept_inputs(files)
    found, left_out = _variants(asked, config, num_columns, has_old or before is not None)
    question = Question(run, rollouts, tuple(found), before, left_out)
    problems = check(config, world_size, {name: RULES[name] for name in _RULES})
    if before is not None:
        problems += _problems_with_weights("--before", before)
    if problems:
        raise ConfigError(problems)
    with writing_to("--out", asked.out):
        asked.out.mkdir(parents=True, exist_ok=True)
    return config, question


def rollouts_of(asked: Sequence[str], kept: Sequence[int]) -> tuple[int, ...]:
    """Return the rollouts that are meant, each once: of numbers, "all" of those kept, or none for the last.

    Args:
        asked: Numbers of rollouts, or "all".
        kept: Numbers of the rollouts that were kept. Both count from 1, as logs and reports do.

    Raises:
        ConfigError: One is neither the number of a kept rollout nor "all".
    """
    numbers: list[int] = []
    for word in asked:
        if word != "all" and not (word.isdecimal() and int(word) in kept):
            action = f"Kept are {', '.join(map(str, kept))}. tracking.batches_every keeps more."
            expected = "the number of a kept rollout, counted from 1, or all"
            raise ConfigError(Problem("--rollout", repr(word), expected, action))
        numbers += kept if word == "all" else [int(word)]
    return tuple(dict.fromkeys(numbers)) or (kept[-1],)


def _variants(
    asked: Asked, config: Config, num_columns: int, has_old_log_probs: bool
) -> tuple[list[Variant], dict[str, str]]:
    """Return the variants to evaluate, and the variants of --all with missing inputs, with what they lack."""
    settings = config.algorithm.model_dump()
    base = Variant(config.algorithm.preset, flat_fields(overrides_in(settings)))
    own: dict[str, Value] = {}
    if asked.rule_options:
        own = {f"{OPTION}{name}": value for name, value in parse_options(asked.rule_options).items()}
        if not any(":" in name for name in asked.presets):
            action = "Name it with --preset module:function, or leave the option out."
            raise ConfigError(Problem("--rule-options", asked.rule_options, "a custom rule", action))
    others = [name for name in PRESETS if asked.is_all and name not in asked.presets]
    found = variants(base, [*asked.presets, *others], parse_sweeps(asked.sweeps), own)
    kept = {"num_columns": num_columns, "has_old_log_probs": has_old_log_probs}
    left_out: dict[str, str] = {}
    for variant in found[1:]:
        if variant.preset in others and (problems := inputs_lacking(variant, **kept)):
            said = (f"{p.found.partition(', ')[2]}; expected {p.expected}. {p.action}" for p in problems)
            left_out[variant.name] = " ".join(said)
    usable = [variant for variant in found if variant.name not in left_out]
    require_inputs(usable, **kept)
    require_own_rules(usable)
    return usable, left_out


def _config_of(run: Path, checkpoint: Path | None, overrides: Sequence[str], world_size: int) -> Config:
    if checkpoint is None:
        whole = complete(run / "checkpoints")
        if not whole:
            action = "Name weights with --checkpoint; model.load of the run are those it began with."
            raise ConfigError(Problem("--checkpoint", f"no checkpoint in {run}", "one", action))
        checkpoint = whole[-1]
    elif problems := _problems_with_weights("--checkpoint", checkpoint):
        raise ConfigError(problems)
    config = load_config([run / "config.toml"], [f"model.load={checkpoint}", *overrides])
    if world_size > 1:
        return config
    alone = ParallelConfig(max_tokens_per_microbatch=config.parallel.max_tokens_per_microbatch)
    return config.model_copy(update={"parallel": alone})


def _problems_with_weights(option: str, folder: Path) -> list[Problem]:
    if config_file(folder) is not None:
        return []
    what = "has no config.json and no hf/config.json" if folder.exists() else "does not exist"
    expected = "a checkpoint of the run, or a model folder of either kind"
    return [Problem(option, f"{folder}, which {what}", expected, "Check the path.")]


def parse_options(text: str) -> dict[str, Value]:
    """Parse name -> value, from "name=value,name=value".

    Raises:
        ConfigError: It is not of that form.
    """
    found: dict[str, Value] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if not name.isidentifier() or not value:
            action = "Write for example --rule-options delta=0.2,power=2."
            raise ConfigError(Problem("--rule-options", repr(text), "name=value,name=value,...", action))
        found[name] = _value(value)
    return found


def parse_sweeps(sweeps: Sequence[str]) -> dict[str, list[Value]]:
    """Parse field -> values, from "field=value,value" each.

    Raises:
        ConfigError: One of them is not of that form.
    """
    found: dict[str, list[Value]] = {}
    for sweep in sweeps:
        name, _, text = sweep.partition("=")
        values = [_value(part.strip()) for part in text.split(",")]
        if not name.removeprefix(OPTION).isidentifier() or "" in values:
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
