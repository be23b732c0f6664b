"""Rules about which groups a rollout begins, and which it keeps."""

from collections.abc import Iterator

from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.environments import problem_with
from megatron_dppo.errors import Problem
from megatron_dppo.runtime.user_code import problem_with_path


@rule("over_sampling")
def _over_sampling(config: Config, facts: Facts) -> Iterator[Problem]:
    """The engine can leave responses half done where more are begun than wanted."""
    options = config.rollout
    if options.over_sampling > 1 and options.engine != "sglang":
        found = f"{options.over_sampling:g} with rollout.engine = {options.engine!r}"
        expected = "1, since this engine decodes all responses to their end"
        action = "Leave it out, or use rollout.engine = 'sglang'."
        yield Problem("rollout.over_sampling", found, expected, action)


@rule("environment", needs="machine")
def _environment(config: Config, facts: Facts) -> Iterator[Problem]:
    """The environment is registered, or its package can be found; a user's module is not imported to check."""
    problem = problem_with(config.rollout.environment)
    if problem is not None:
        yield problem


@rule("turns")
def _turns(config: Config, facts: Facts) -> Iterator[Problem]:
    """Multi-turn rollouts have an environment, and trajectories are never left half done."""
    options = config.rollout
    if options.max_turns > 1 and options.environment == "single_turn":
        found, expected = (
            f"{options.max_turns} with rollout.environment = 'single_turn'",
            "1: one response ends it",
        )
        yield Problem("rollout.max_turns", found, expected, "Leave it out, or name an environment.")
    if options.over_sampling > 1 and options.environment != "single_turn":
        found = f"{options.environment!r} with rollout.over_sampling = {options.over_sampling:g}"
        expected = "1, since what over-sampling leaves half done is not kept with its environment"
        yield Problem("rollout.environment", found, expected, "Set rollout.over_sampling = 1.")


@rule("generate", needs="machine")
def _generate(config: Config, facts: Facts) -> Iterator[Problem]:
    """A user's own sampling can be found, and is asked for nothing that only the package's own can do."""
    options, key = config.rollout, "rollout.generate"
    if options.generate is None:
        return
    problem = problem_with_path(key, options.generate, "package.module:function")
    if problem is not None:
        yield problem
    taken = {
        f"environment = {options.environment!r}": options.environment != "single_turn",
        f"over_sampling = {options.over_sampling:g}": options.over_sampling > 1,
        f"max_turn_tokens = {options.max_turn_tokens}": options.max_turn_tokens is not None,
    }
    for option, is_set in taken.items():
        if is_set:
            expected = "one of them: the function says itself whom responses answer, and when they end"
            yield Problem(
                key, f"{options.generate!r} with rollout.{option}", expected, "Leave one of them out."
            )
