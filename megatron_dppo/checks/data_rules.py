"""Rules about prompts and rewards."""

from collections.abc import Iterator

from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.load import did_you_mean
from megatron_dppo.config.schema import Config
from megatron_dppo.data.schemas import TRAINING_SCHEMAS, detect, has
from megatron_dppo.errors import Problem
from megatron_dppo.rewards import RewardChoice, problems_with


@rule("prompts_file")
def _prompts_file(config: Config, facts: Facts) -> Iterator[Problem]:
    """The prompt files of training and evaluation are there and can be read."""
    yield from (found for found in facts.columns.values() if isinstance(found, Problem))


@rule("prompt_columns")
def _prompt_columns(config: Config, facts: Facts) -> Iterator[Problem]:
    """The prompt files have the named columns."""
    for source, columns in facts.columns.items():
        if not isinstance(columns, Problem):
            yield from _missing_columns(config, source, columns)


def _missing_columns(config: Config, source: str, columns: list[str]) -> Iterator[Problem]:
    prompt, answer = config.data.prompt_column, config.data.answer_column
    for key, name in {"data.prompt_column": prompt, "data.answer_column": answer}.items():
        if name is not None and not has(columns, name):
            guess = did_you_mean(name, columns)
            action = f"Did you mean {guess!r}?" if guess else f"Set {key} to one of them."
            yield Problem(key, f"{name!r}, which {source} lacks", f"one of {columns}", action)
    if answer is None and has(columns, prompt) and detect(columns, TRAINING_SCHEMAS, prompt) is None:
        expected = " or ".join(schema.answer for schema in TRAINING_SCHEMAS)
        action = "Set it, or make a file of prompts with tools/prepare_data.py."
        yield Problem("data.answer_column", f"none, with columns {columns} in {source}", expected, action)


@rule("reward")
def _reward(config: Config, facts: Facts) -> Iterator[Problem]:
    """Rewards are registered, or their package can be found; a user's module is not imported to check."""
    data = config.data
    yield from problems_with(RewardChoice(data.reward, data.reward_values, data.thinking))


@rule("overlong_buffer")
def _overlong_buffer(config: Config, facts: Facts) -> Iterator[Problem]:
    """Some length of a response costs nothing."""
    buffer, longest = config.data.overlong_buffer_tokens, config.rollout.max_response_tokens
    if buffer >= longest:
        expected = f"fewer than rollout.max_response_tokens = {longest}"
        yield Problem("data.overlong_buffer_tokens", str(buffer), expected, "Lower it.")
