"""Validates a what-if question before any model loads: rollouts, weights, presets, rules and sweeps."""

import itertools
import logging
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

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
_RULES = (
    "preset",
    "preset_fields",
    "model_folder",
    "model_architecture",
    "model_sizes",
    "model_variant",
    "layout",
)
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
        """The objective of the variant, without an entropy bonus: that is no part of a trust region.

        Raises:
            ConfigError: The preset is invalid, or the module of a custom rule fails.
        """
        options = {name.removeprefix(OPTION): value for name, value in self.fields.items() if _is_option(name)}
        given = {name: value for name, value in self.fields.items() if not _is_option(name)}
        try:
            found = preset(self.preset, **given, **({"rule_options": options} if options else {}))
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
class Asked:
    """Options of the command line, unchecked."""

    run: Path  # a run folder with `batches/`
    out: Path  # output folder
    checkpoint: Path | None = None  # weights to evaluate; None means the newest checkpoint
    before: Path | None = None  # weights that the rollouts were sampled with
    rollouts: Sequence[str] = ()  # kept rollouts, counted from 1, or "all"; the default is the last one
    presets: Sequence[str] = ()  # besides the run's own; by default that one is swept
    is_all: bool = False  # all presets with kept inputs as well
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
        asked: Options of the command line.
        world_size: Processes; with one, the run's layout is left aside.

    Raises:
        ConfigError: Some options are invalid. The message lists every problem.
        DataError: A rollout was not kept completely.
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
    """Return the requested rollouts, each once; the last kept rollout if none is requested.

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


def _is_option(name: str) -> bool:
    return name.startswith(OPTION)


def flat_fields(settings: Mapping[str, object]) -> dict[str, Value]:
    """Return overrides of a preset as fields of a variant: each option of an own rule on its own."""
    found: dict[str, Value] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{option}": each for option, each in value.items()}
        elif isinstance(value, Value):
            found[name] = value
    return found


def variants(
    base: Variant,
    presets: Sequence[str],
    sweeps: Mapping[str, Sequence[Value]],
    own_fields: Mapping[str, Value] | None = None,
) -> list[Variant]:
    """Return the run's own variant, then each preset with each combination of the swept fields that it uses.

    Args:
        base: The run's own.
        presets: Names, and "module:function" of custom rules. Empty means the run's preset.
        sweeps: Values of fields.
        own_fields: Set for each own rule that uses them. The run's rule has the run's otherwise.

    Raises:
        ConfigError: A preset is unknown, none uses a swept field or an option, or a value is out of range.
    """
    of_run = {key: value for key, value in base.fields.items() if _is_option(key) or key in OWN_FIELDS}
    plain = [Variant(name, of_run if name == base.preset and ":" in name else {}) for name in presets]
    given = dict(own_fields or {})
    chosen = [
        replace(variant, fields={**variant.fields, **{key: given[key] for key in given if variant.uses(key)}})
        for variant in plain
    ] or [base]
    unused = [name for name in (*sweeps, *given) if not any(variant.uses(name) for variant in chosen)]
    if unused:
        found = f"{', '.join(unused)} of {', '.join(variant.name for variant in chosen)}"
        fields = {name for variant in chosen for name in variant.objective.fields_in_use}
        fields |= {OPTION + name for variant in chosen for name in variant.objective.rule_options}
        known = "one of " + ", ".join(sorted(fields))
        otherwise = "Name a field that one of the presets uses; an own rule's option is rule_options.NAME."
        key = "--sweep" if unused[0] in sweeps else "--rule-options"
        raise ConfigError(Problem(key, found, known, did_you_mean(unused[0], fields, otherwise)))
    found = list(_sweep(chosen, sweeps))
    for variant in found:
        _ = variant.objective  # raises if a value is out of range
    own = base.objective
    return [base, *(variant for variant in found if replace(variant.objective, name=own.name) != own)]


def _sweep(chosen: Sequence[Variant], sweeps: Mapping[str, Sequence[Value]]) -> Iterator[Variant]:
    for variant in chosen:
        own = {name: values for name, values in sweeps.items() if variant.uses(name)}
        for values in itertools.product(*own.values()):
            yield Variant(variant.preset, {**variant.fields, **dict(zip(own, values, strict=True))})


def inputs_lacking(variant: Variant, *, num_columns: int, has_old_log_probs: bool) -> list[Problem]:
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


def require_inputs(asked: Sequence[Variant], *, num_columns: int, has_old_log_probs: bool) -> None:
    """Refuse variants with inputs that the kept tokens lack, before any model loads.

    Raises:
        ConfigError: There are problems. The message lists all of them.
    """
    kept = {"num_columns": num_columns, "has_old_log_probs": has_old_log_probs}
    problems = [problem for variant in asked for problem in inputs_lacking(variant, **kept)]
    if problems:
        raise ConfigError(problems)


def require_own_rules(asked: Sequence[Variant]) -> None:
    """Refuse own rules that fail on a small batch, and warn of doubtful ones, before any model loads.

    Raises:
        ConfigError: There are problems. The message lists all of them.
    """
    own = [variant for variant in asked if variant.objective.own is not None]
    problems = [
        problem
        for variant in own
        for problem in problems_with_own_rule(
            "--preset", variant.objective, how_to_set=lambda field, value: f"Add --sweep {field}={value}."
        )
    ]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    for variant in own:
        for doubt in doubts(variant.objective):
            logger.warning("%s: %s", variant.name, doubt)
