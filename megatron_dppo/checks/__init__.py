"""What a config's types cannot say: rules over several fields and the disk, before any model loads.

No rule imports Megatron or SGLang. Importing this package registers all rules; a new one is one function under
`@rule` in a module imported here, and one failing example in tests/unit/test_checks.py.
"""

from collections.abc import Mapping
from dataclasses import replace

from megatron_dppo.checks import (
    algorithm_rules,
    data_rules,
    evaluation_rules,
    layer_spec_rules,
    lora_rules,
    megatron_rules,
    memory_rules,
    model_rules,
    run_rules,
    sampling_rules,
    sglang_rules,
)
from megatron_dppo.checks.facts import Facts, gather_facts
from megatron_dppo.checks.registry import RULES, Rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.rollout.sglang.options import interpreter, read_options

__all__ = [
    "RULES",
    "Facts",
    "Rule",
    "algorithm_rules",
    "check",
    "data_rules",
    "evaluation_rules",
    "gather_facts",
    "layer_spec_rules",
    "lora_rules",
    "megatron_rules",
    "memory_rules",
    "model_rules",
    "not_checked",
    "require_evaluable",
    "require_valid",
    "run_rules",
    "sampling_rules",
    "sglang_rules",
]

assert all(
    (
        *(algorithm_rules, data_rules, layer_spec_rules, lora_rules, megatron_rules, memory_rules, model_rules),
        *(run_rules, sampling_rules, sglang_rules, evaluation_rules),
    )
), "importing them registers rules"


def check(config: Config, world_size: int, rules: Mapping[str, Rule] = RULES) -> list[Problem]:
    """Every problem of a config that is to run on `world_size` processes; empty when it may start."""
    facts = gather_facts(config, world_size)
    return [problem for rule in rules.values() for problem in rule.check(config, facts)]


def require_valid(config: Config, world_size: int) -> None:
    """Go on only with a config that `check` finds no fault with.

    Raises:
        ConfigError: With every problem.
    """
    problems = check(config, world_size)
    if problems:
        raise ConfigError(problems)


_EVALUATED = ("model_", "prompt", "reward", "evaluation_", "sequence_positions", "sglang_", "finite_numbers")


def require_evaluable(config: Config, world_size: int) -> None:
    """Go on only where the model, the engine and the evaluation sets have no fault; training is not asked for.

    Raises:
        ConfigError: With every problem.
    """
    facts = gather_facts(config, world_size)
    held_out = {key: found for key, found in facts.columns.items() if key != "data.prompts"}
    rules = [rule for id, rule in RULES.items() if id.startswith(_EVALUATED)]
    problems = [found for rule in rules for found in rule.check(config, replace(facts, columns=held_out))]
    if not config.evaluation.sets:
        action = "Add a table [evaluation.sets.<name>] with its prompts."
        problems.append(Problem("evaluation.sets", "none", "at least one set", action))
    if problems:
        raise ConfigError(problems)


def not_checked(config: Config) -> list[str]:
    """What `check` had to take on trust, as sentences: pass-through options of an absent library."""
    notes: list[str] = []
    if config.megatron and megatron_rules.megatron_fields() is None:
        notes.append("[megatron]: names not checked; megatron-core is not installed here, or does not import.")
    if config.rollout.engine == "sglang" and read_options(python := interpreter(config)) is None:
        notes.append(f"[sglang]: arguments not checked; {python} has no SGLang, or it does not import.")
    return notes
