"""Rules about evaluation sets."""

import re
from collections.abc import Iterator
from dataclasses import replace

from megatron_dppo.checks.data_rules import reward_problems
from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem
from megatron_dppo.rewards import RewardChoice
from megatron_dppo.rollout.evaluation import evaluation_sets


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


@rule("evaluation_positions")
def _evaluation_positions(config: Config, facts: Facts) -> Iterator[Problem]:
    """The longest prompt and response of each set fit the model's positions."""
    options, sizes = config.evaluation, facts.model_sizes
    given = {f"evaluation.sets.{name}": own.max_response_tokens for name, own in options.used_sets.items()}
    given["evaluation"] = options.max_response_tokens  # if neither is given, training's rule reports it
    for where, num_tokens in given.items():
        if sizes is None or num_tokens is None:
            continue
        if config.data.max_prompt_tokens + num_tokens > sizes.max_position_embeddings:
            found = f"{num_tokens} after prompts of {config.data.max_prompt_tokens} tokens"
            expected = f"at most {sizes.max_position_embeddings} positions in all (config.json)"
            action = "Lower it, or lower data.max_prompt_tokens."
            yield Problem(f"{where}.max_response_tokens", found, expected, action)


@rule("evaluation_reward", needs="machine")
def _evaluation_reward(config: Config, facts: Facts) -> Iterator[Problem]:
    """The reward of a set, if it names one, is registered, or its package can be found."""
    for name, own in config.evaluation.used_sets.items():
        problems = reward_problems(RewardChoice(own.reward), config) if own.reward is not None else ()
        for problem in problems:
            yield replace(problem, where=f"evaluation.sets.{name}.reward")
