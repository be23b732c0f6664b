"""Validates a what-if question before any model loads: rollouts, weights, presets, rules and sweeps."""

import itertools
import logging
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_dppo.algorithms import PRESETS, Objective, preset
from megatron_dppo.algorithms.own_rule import OWN_FIELDS
from megatron_dppo.algorithms.presets import overrides_in
from megatron_dppo.algorithms.trial import doubts
from megatron_dppo.architectures.sizes import config_file
from megatron_dppo.checkpoints.checkpoint_folder import complete
from megatron_dppo.checks import RULES, check
from megatron_dppo.checks.algorithm_rules import problems_with_own_rule
from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config, ParallelConfig
from megatron_dppo.data.batches.batch_file import group_files, kept_inputs, kept_rollouts
from megatron_dppo.errors import ConfigError, Problem, did_you_mean, writing_to
from megatron_dppo.runtime.user_code import describe_error

# What a forward of kept tokens needs; the rest is about sampling and training.
_RULES = (*("preset", "preset_fields", "model_family", "layout"),)
logger = logging.getLogger(__name__)
Value = float | int | str | bool
OPTION = "rule_options."  # before the name of an own rule's option


@dataclass(frozen=True)
class Variant:
    """A preset, or an own rule, and the fields of it that are set; an option's name has `OPTION` before it."""

    preset: str
    fields: Mapping[str, Value] = field(default_factory=dict[str, Value])

    @property
    def objective(self) -> Objective:
        """The objective of the variant, without an entropy bonus: that is no part of a trust region."""
        given: dict[str, Any] = {key: value for key, value in self.fields.items() if not _is_option(key)}
        options = {key.removeprefix(OPTION): value for key, value in self.fields.items() if _is_option(key)}
        if options:
            given["rule_options"] = options
        try:
            found = preset(self.preset, **given)
        except ConfigError:
            raise
        except Exception as error:  # whatever the module raises
            fails, action = f"{self.preset!r}, which fails ({describe_error(error)})", "Correct the module."
            raise ConfigError(Problem("--preset", fails, "what can be imported", action)) from error
        return replace(found, entropy_coef=0.0)

    @property
    def name(self) -> str:
        """Name of the preset, then its fields."""
        words = (f"{key.removeprefix(OPTION)}={value}" for key, value in self.fields.items())
        return " ".join([self.preset, *words])

    def uses(self, name: str) -> bool:
        """Return whether a field changes what the objective does; a custom rule declares its options."""
        objective = self.objective
        if objective.own is not None and _is_option(name):
            return objective.own.takes(name.removeprefix(OPTION))
        return name in objective.fields_in_use


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


def question_of(
    run: Path,
    out: Path,
    world_size: int,
    *,
    checkpoint: Path | None = None,
    before: Path | None = None,
    rollouts: Sequence[str] = (),
    presets: Sequence[str] = (),
    is_all: bool = False,
    sweeps: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> tuple[Config, Question]:
    """Return the config to build the actor from, and the question; makes the output folder.

    The arguments are the options of the command. With a `world_size` of 1 the run's layout is left aside.
    """
    if not (run / "config.toml").is_file():
        action = "Name the run.folder of the run."
        raise ConfigError(Problem("RUN", f"no config.toml in {run}", "a run folder", action))
    if not (kept := kept_rollouts(run / "batches")):
        action = "Run with tracking.batches_every, say 10: it keeps the rollout's mini-batches as tensors."
        raise ConfigError(Problem("RUN", f"no mini-batches in {run / 'batches'}", "some rollout's", action))
    config = _config_of(run, checkpoint, overrides, world_size)
    numbers = rollouts_of(rollouts, [index + 1 for index in kept])
    files = [file for number in numbers for file in group_files(run / "batches", number - 1)]
    num_columns, has_old = kept_inputs(files)
    optional = [name for name in PRESETS if is_all and name not in presets]
    settings = dict(overrides_in(config.algorithm.model_dump()))
    options: Mapping[str, Value] = settings.pop("rule_options", None) or {}
    base = Variant(
        config.algorithm.preset, settings | {OPTION + name: value for name, value in options.items()}
    )
    usable, left_out = list[Variant](), dict[str, str]()
    problems: list[Problem] = []
    for variant in variants(base, [*presets, *optional], parse_sweeps(sweeps)):
        lacking = inputs_lacking(variant, num_columns, has_old_log_probs=has_old or before is not None)
        if usable and lacking and variant.preset in optional:
            left_out[variant.name] = " ".join(
                f"{p.found.partition(', ')[2]}; expected {p.expected}. {p.action}" for p in lacking
            )
        else:
            problems += lacking
            usable.append(variant)
    problems += check(config, world_size, {name: RULES[name] for name in _RULES})
    if before is not None:
        problems += _problems_with_weights("--before", before)
    if problems:
        raise ConfigError(problems)
    require_own_rules(usable)
    with writing_to("--out", out):
        out.mkdir(parents=True, exist_ok=True)
    return config, Question(run, numbers, tuple(usable), before, left_out)


def rollouts_of(asked: Sequence[str], kept: Sequence[int]) -> tuple[int, ...]:
    """Return the requested rollouts, each once; the last kept rollout if none is requested.

    Args:
        asked: Numbers of rollouts, or "all".
        kept: Numbers of the rollouts that were kept. Both count from 1, as logs and reports do.
    """
    numbers: list[int] = []
    for word in asked:
        if word != "all" and not (word.isdecimal() and int(word) in kept):
            action = f"Kept are {', '.join(map(str, kept))}. tracking.batches_every keeps more."
            expected = "the number of a kept rollout, counted from 1, or all"
            raise ConfigError(Problem("--rollout", repr(word), expected, action))
        numbers += kept if word == "all" else [int(word)]
    return tuple(dict.fromkeys(numbers)) or (kept[-1],)


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


def parse_sweeps(sweeps: Sequence[str]) -> dict[str, list[Value]]:
    """Parse field -> values, from "field=value,value" each."""
    found: dict[str, list[Value]] = {}
    for sweep in sweeps:
        name, _, text = sweep.partition("=")
        found[name] = [_value(part.strip()) for part in text.split(",")]
        if not name.removeprefix(OPTION).isidentifier() or "" in found[name]:
            action = "Write for example --sweep delta=0.05,0.1,0.2."
            raise ConfigError(Problem("--sweep", repr(sweep), "field=value,value,...", action))
    return found


def _value(text: str) -> Value:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, float | int | str | bool) else text


def _is_option(name: str) -> bool:
    return name.startswith(OPTION)


def variants(base: Variant, presets: Sequence[str], sweeps: Mapping[str, Sequence[Value]]) -> list[Variant]:
    """Return the run's own variant, then each preset with each combination of the swept fields that it uses.

    Args:
        base: The run's own.
        presets: Names, and "module:function" of custom rules; the run's rule has the run's options. Empty means
            the run's preset.
        sweeps: Values of fields.
    """
    of_run = {key: value for key, value in base.fields.items() if _is_option(key) or key in OWN_FIELDS}
    chosen = [Variant(name, of_run if name == base.preset and ":" in name else {}) for name in presets] or [
        base
    ]
    unused = [name for name in sweeps if not any(variant.uses(name) for variant in chosen)]
    if unused:
        found = f"{', '.join(unused)} of {', '.join(variant.name for variant in chosen)}"
        fields = {name for variant in chosen for name in variant.objective.fields_in_use}
        fields |= {OPTION + name for variant in chosen for name in variant.objective.rule_options}
        otherwise = "Name a field that one of the presets uses; an own rule's option is rule_options.NAME."
        action = did_you_mean(unused[0], fields, otherwise)
        raise ConfigError(Problem("--sweep", found, f"one of {', '.join(sorted(fields))}", action))
    swept = [base]
    for variant in chosen:
        own = {name: values for name, values in sweeps.items() if variant.uses(name)}
        for values in itertools.product(*own.values()):
            each = Variant(variant.preset, {**variant.fields, **dict(zip(own, values, strict=True))})
            if replace(each.objective, name=base.objective.name) != base.objective:
                swept.append(each)
    return swept


def inputs_lacking(variant: Variant, num_columns: int, *, has_old_log_probs: bool) -> list[Problem]:
    """Return a problem for each input that the variant's trust region reads and the kept tokens lack."""
    problems: list[Problem] = []
    objective = variant.objective
    if objective.needs_topk and objective.top_k > num_columns:
        found = f"{variant.name}, which uses {objective.top_k} columns of the rollout's top-K"
        expected = f"at most the {num_columns} that were kept"
        action = "Sweep a smaller top_k, or sample with a larger rollout.num_topk_log_probs."
        if num_columns == 0:
            action = "Sample with rollout.num_topk_log_probs = 20: this rollout has no top-K."
        problems.append(Problem("--sweep", found, expected, action))
    if objective.anchor == "recomputed" and not has_old_log_probs:
        found = f"{variant.name}, whose anchor is the trainer's policy before the steps"
        action = "Give the checkpoint that the rollout was sampled with as --before."
        problems.append(Problem("--before", found, "that policy's weights", action))
    return problems


def require_own_rules(variants: Sequence[Variant]) -> None:
    """Refuse own rules that fail on a small batch, with all problems, and warn of doubtful ones."""
    own = [variant for variant in variants if variant.objective.own is not None]
    problems: list[Problem] = []
    for variant in own:
        problems += problems_with_own_rule(
            "--preset", variant.objective, how_to_set=lambda field, value: f"Add --sweep {field}={value}."
        )
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    for variant in own:
        for doubt in doubts(variant.objective):
            logger.warning("%s: %s", variant.name, doubt)
