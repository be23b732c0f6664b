"""Rules about prompts and rewards."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.load import did_you_mean
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem
from megatron_dppo.rewards import REWARDS


@rule("prompts_file")
def _prompts_file(config: Config, facts: Facts) -> Iterator[Problem]:
    """The prompt files of training and evaluation are there and can be read."""
    yield from (found for found in facts.columns.values() if isinstance(found, Problem))


@rule("prompt_columns")
def _prompt_columns(config: Config, facts: Facts) -> Iterator[Problem]:
    """The prompt files have the named columns."""
    wanted = {"data.prompt_column": config.data.prompt_column, "data.answer_column": config.data.answer_column}
    for source, columns in facts.columns.items():
        for key, name in wanted.items():
            if not isinstance(columns, Problem) and name not in columns:
                guess = did_you_mean(name, columns)
                action = f"Did you mean {guess!r}?" if guess else f"Set {key} to one of them."
                yield Problem(key, f"{name!r}, which {source} lacks", f"one of {columns}", action)


@rule("reward")
def _reward(config: Config, facts: Facts) -> Iterator[Problem]:
    """The reward is registered, or in a package that can be found; a user's module is not imported to check."""
    name = config.data.reward
    if ":" in name:
        package = name.partition(":")[0].partition(".")[0]
        is_here = Path(package).is_dir() or Path(f"{package}.py").is_file()
        if not package.isidentifier() or not (is_here or importlib.util.find_spec(package)):
            expected = "'package.module:function' of an installed package or of the working directory"
            yield Problem("data.reward", f"{name!r}, and no package {package!r}", expected, "Correct the name.")
    elif name not in REWARDS:
        guess = did_you_mean(name, list(REWARDS))
        action = f"Did you mean {guess!r}?" if guess else "Choose one of these."
        yield Problem("data.reward", repr(name), f"one of {sorted(REWARDS)}", action)
