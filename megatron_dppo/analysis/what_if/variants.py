"""Names the trust regions of a what-if question: presets, custom rules, and sweeps over their fields."""

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_dppo.algorithms import Objective, preset
from megatron_dppo.algorithms.objective import OWN_FIELDS
from megatron_dppo.algorithms.trial import doubts
from megatron_dppo.checks.algorithm_rules import problems_with_own_rule
from megatron_dppo.errors import ConfigError, Problem, did_you_mean
from megatron_dppo.runtime.user_code import describe_error

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
        presets: Names, and "module:function" of own rules; none means the run's own.
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
    found = list(_swept(chosen, sweeps))
    for variant in found:
        _ = variant.objective  # raises if a value is out of range
    own = base.objective
    return [base, *(variant for variant in found if replace(variant.objective, name=own.name) != own)]


def _swept(chosen: Sequence[Variant], sweeps: Mapping[str, Sequence[Value]]) -> Iterator[Variant]:
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
    """Refuse variants whose inputs the kept tokens lack, before any model loads.

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
