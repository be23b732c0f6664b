"""Validates a config before any model loads: rules over several fields, the disk and the user's code.

No rule imports Megatron or SGLang. Importing this package registers all rules; a new one is one function under
`@rule` in a module imported here, and one line in tests/unit/data/refused_configs.txt.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import get_args

from megatron_dppo.checks import (  # which registers their rules, in this order
    algorithm_rules,
    data_rules,
    megatron_rules,
    model_rules,
    run_rules,
    sampling_rules,
)
from megatron_dppo.checks.facts import (
    RULES,
    TRAINING,
    Facts,
    Need,
    Rule,
    gather_facts,
    model_facts,
    section_of,
)
from megatron_dppo.checks.notes import doubts, remarks
from megatron_dppo.checks.run_rules import folder_remarks, idle_remarks, period_remarks, stop_remarks
from megatron_dppo.config.rollout import SOURCES
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang.options import installed_version, interpreter, read_options
from megatron_dppo.engines.sglang.protocol import GENERATIONS, NEWEST
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.runtime.libraries import installed_versions, untested_versions

logger = logging.getLogger(__name__)

__all__ = [
    "AT_ONCE",
    "BEFORE_LOADING",
    "RULES",
    "Facts",
    "Rule",
    "algorithm_rules",
    "check",
    "data_rules",
    "doubts",
    "folder_remarks",
    "gather_facts",
    "idle_remarks",
    "megatron_rules",
    "model_facts",
    "model_rules",
    "not_checked",
    "period_remarks",
    "problems_of",
    "remarks",
    "require_evaluable",
    "require_valid",
    "run_rules",
    "sampling_rules",
    "stop_remarks",
    "version_notes",
]

AT_ONCE: tuple[Need, ...] = ("config", "machine")
"""What every rank finds out by itself, before it joins the others."""
BEFORE_LOADING: tuple[Need, ...] = (*AT_ONCE, "data")
"""What rank 0 finds out before a model loads; a run tries the user's code in workers that it keeps."""


def check(
    config: Config,
    world_size: int,
    rules: Mapping[str, Rule] = RULES,
    *,
    accepts_changes: bool = False,
    needs: Collection[Need] = get_args(Need),
) -> list[Problem]:
    """Return every problem of a config for `world_size` processes; an empty list if the run may start.

    Args:
        config: Resolved config.
        world_size: Processes of the job.
        rules: Rules in their order.
        accepts_changes: A resume may change the experiment.
        needs: Inputs of the rules to run; rules with other inputs are skipped.
    """
    facts = gather_facts(config, world_size, accepts_changes=accepts_changes)
    return problems_of(config, facts, rules.values(), needs)


def problems_of(
    config: Config,
    facts: Facts,
    rules: Iterable[Rule] = RULES.values(),
    needs: Collection[Need] = get_args(Need),
) -> list[Problem]:
    """Return every problem that rules with these needs find; `plan` only runs rules that need the config."""
    return [problem for rule in rules if rule.needs in needs for problem in rule.check(config, facts)]


def require_valid(
    config: Config, world_size: int, *, accepts_changes: bool = False, needs: Collection[Need] = AT_ONCE
) -> None:
    """Refuse a config for which `check` finds problems, and log doubts about the data if it is read.

    Raises:
        ConfigError: The config has problems; the error lists all of them.
    """
    facts = gather_facts(config, world_size, accepts_changes=accepts_changes)
    problems = problems_of(config, facts, needs=needs)
    if problems:
        raise ConfigError(problems)
    if "data" in needs:
        for doubt in doubts(config, facts):
            logger.warning(doubt)


_EVALUATED = ("model_", "prompt", "reward", "evaluation_", "sequence_positions", "sglang_")


def require_evaluable(config: Config, world_size: int, *, needs: Collection[Need] = AT_ONCE) -> None:
    """Refuse faults of the model, the engine and the evaluation sets; settings of training are not checked.

    A config needs no `data.reward` if each evaluation set names a reward.

    Raises:
        ConfigError: The config has problems; the error lists all of them.
    """
    facts = gather_facts(config, world_size)
    held_out = {key: found for key, found in facts.columns.items() if section_of(key) != TRAINING}
    unused = set[str]()
    if not config.data.reward and all(own.reward for own in config.evaluation.sets.values()):
        unused.add("reward")
    rules = [rule for id, rule in RULES.items() if id.startswith(_EVALUATED) and id not in unused]
    problems = problems_of(config, replace(facts, columns=held_out), rules, needs)
    problems += run_rules.clash_problems(config, SOURCES)  # evaluation has one source of responses too
    if not config.evaluation.used_sets:
        found = "none" if config.evaluation.every else "evaluation.every = 0, which uses none"
        action = "Add a table [evaluation.sets.<name>] with its prompts."
        problems.append(Problem("evaluation.sets", found, "at least one set", action))
    if problems:
        raise ConfigError(problems)


def version_notes(config: Config) -> list[str]:
    """Return sentences on libraries with untested versions; `check` refuses none of them."""
    notes = untested_versions(installed_versions())
    python = interpreter(config)
    version = installed_version(python) if config.rollout.engine == "sglang" else None
    if version is not None and version not in GENERATIONS:
        known = " and ".join(GENERATIONS)
        served = f"the tests ran with {known}; servers of other versions are refused"
        notes.append(f"SGLang {version} of {python}: {served}")
    return notes


def not_checked(config: Config) -> list[str]:
    """Return sentences on what `check` could not check: options of an absent library, rules of a GPU."""
    notes: list[str] = []
    if config.megatron and megatron_rules.megatron_fields() is None:
        notes.append("[megatron]: names not checked; megatron-core is not installed here, or does not import.")
    if config.rollout.engine == "sglang" and read_options(python := interpreter(config)) is None:
        notes.append(f"[sglang]: {python} has no SGLang here; arguments were compared with version {NEWEST}.")
    return notes
