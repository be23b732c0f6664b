"""Rules about sampling: which groups a rollout begins and keeps, user code, and SGLang's servers."""

import os
from collections.abc import Iterator

from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang.options import (
    interpreter,
    option_problems,
    read_options,
    shipped_options,
)
from megatron_dppo.engines.sglang.protocol import NEWEST
from megatron_dppo.engines.sglang.sampling_settings import argument_problems, variable_problems
from megatron_dppo.environments import problem_with
from megatron_dppo.errors import Problem
from megatron_dppo.runtime.user_code import problem_with_path


@rule("over_sampling")
def _over_sampling(config: Config, facts: Facts) -> Iterator[Problem]:
    """The engine can leave responses unfinished if more are started than needed."""
    options = config.rollout
    if options.over_sampling > 1 and options.engine != "sglang":
        found = f"{options.over_sampling:g} with rollout.engine = {options.engine!r}"
        expected = "1, because this engine decodes all responses to their end"
        action = "Leave it out, or use rollout.engine = 'sglang'."
        yield Problem("rollout.over_sampling", found, expected, action)


@rule("lag")
def _lag(config: Config, facts: Facts) -> Iterator[Problem]:
    """Rollouts sampled ahead are complete, trained on in order, and not all sampled by the first weights."""
    lag, key = config.rollout.lag, "rollout.lag"
    if lag == 0:
        return
    if lag >= config.run.num_rollouts:
        found = f"{lag} with run.num_rollouts = {config.run.num_rollouts}"
        expected = "less than run.num_rollouts: else the first weights sample every rollout"
        yield Problem(key, found, expected, "Lower it, or raise run.num_rollouts.")
    if config.rollout.over_sampling > 1:
        found = f"{lag} with rollout.over_sampling = {config.rollout.over_sampling:g}"
        expected = (
            "0: over-sampling lets speed select the training samples, but lag should change only their age"
        )
        yield Problem(key, found, expected, "Set rollout.over_sampling = 1, or rollout.lag = 0.")
    if config.tracking.alarms == "roll_back":
        found = f"{lag} with tracking.alarms = 'roll_back'"
        expected = "0, because rollouts ahead were sampled by weights that a roll back discards"
        yield Problem(key, found, expected, "Set tracking.alarms to 'log' or 'stop', or rollout.lag = 0.")


@rule("environment", needs="machine")
def _environment(config: Config, facts: Facts) -> Iterator[Problem]:
    """The environment is registered, or its package can be found; a user's module is not imported to check."""
    problem = problem_with(config.rollout.environment)
    if problem is not None:
        yield problem


@rule("turns")
def _turns(config: Config, facts: Facts) -> Iterator[Problem]:
    """Multi-turn rollouts have an environment, and trajectories are never left unfinished."""
    options = config.rollout
    if options.max_turns > 1 and options.environment == "single_turn":
        found, expected = (
            f"{options.max_turns} with rollout.environment = 'single_turn'",
            "1: one response ends it",
        )
        yield Problem("rollout.max_turns", found, expected, "Leave it out, or name an environment.")
    if options.over_sampling > 1 and options.environment != "single_turn" and not options.max_staleness:
        found = f"{options.environment!r} with rollout.over_sampling = {options.over_sampling:g}"
        expected = "1: without max_staleness, unfinished trajectories of over-sampling lose their environment"
        action = "Set rollout.over_sampling = 1, or rollout.max_staleness = 1 or more."
        yield Problem("rollout.environment", found, expected, action)


@rule("generate", needs="machine")
def _generate(config: Config, facts: Facts) -> Iterator[Problem]:
    """A custom sampling function can be found, and no setting is given that it would not read."""
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
            expected = "one of them: the function itself decides on observations and on the end of responses"
            yield Problem(
                key, f"{options.generate!r} with rollout.{option}", expected, "Leave one of them out."
            )


@rule("sglang_owned")
def _sglang_owned(config: Config, facts: Facts) -> Iterator[Problem]:
    """[sglang] has no argument that the package sets, or that changes sampling."""
    yield from argument_problems(config.sglang)


@rule("sglang_environment", needs="machine")
def _sglang_environment(config: Config, facts: Facts) -> Iterator[Problem]:
    """No environment variable that servers would inherit changes what they sample."""
    if config.rollout.engine == "sglang":
        yield from variable_problems(os.environ)


@rule("sglang_arguments", needs="machine")
def _sglang_arguments(config: Config, facts: Facts) -> Iterator[Problem]:
    """Keys of [sglang] are arguments of SGLang's server, and their values are valid."""
    if config.sglang:
        options = read_options(interpreter(config)) or shipped_options(NEWEST)
        yield from option_problems(config.sglang, options)


@rule("sglang_parts")
def _sglang_parts(config: Config, facts: Facts) -> Iterator[Problem]:
    """Weights reach every part of a server, and several servers do not share a port."""
    if config.rollout.engine != "sglang":
        return
    if config.rollout.sglang.num_own_servers > 1 and "port" in config.sglang:
        found = f"{config.sglang['port']!r} with rollout.sglang.num_own_servers > 1"
        yield Problem("sglang.port", found, "none: each server takes a free one", "Remove it.")
    for name in ("pp_size", "dp_size"):
        value = config.sglang.get(name, 1)
        if isinstance(value, int) and value > 1:
            action = f"Remove it; start more servers or raise sglang.tp_size instead of {name}."
            yield Problem(f"sglang.{name}", str(value), "1: updates reach tensor-parallel ranks only", action)


@rule("sglang_weight_sync")
def _sglang_weight_sync(config: Config, facts: Facts) -> Iterator[Problem]:
    """The weight sync works with the servers' quantization and placement."""
    options, where = config.rollout.sglang, "rollout.sglang.weight_sync"
    if config.rollout.engine != "sglang":
        return
    if config.sglang.get("quantization") is not None and options.weight_sync != "disk":
        found = f"{options.weight_sync!r} with sglang.quantization"
        action = "Set it to 'disk', or serve without quantization."
        yield Problem(where, found, "'disk': servers quantise only what they load themselves", action)
    elif options.colocated and options.weight_sync == "distributed":
        action = "Set it to 'tensor', or rollout.sglang.colocated = false."
        yield Problem(
            where,
            "'distributed' with colocated",
            "'tensor' or 'disk': NCCL has no two ranks on one GPU",
            action,
        )


@rule("release_trainer")
def _release_trainer(config: Config, facts: Facts) -> Iterator[Problem]:
    """One setting decides whether trainer and engine take turns on the GPU."""
    if config.rollout.release_trainer and config.rollout.engine == "sglang":
        expected = "false: with SGLang, rollout.sglang.colocated decides whether trainer and servers take turns"
        yield Problem("rollout.release_trainer", "true with engine = 'sglang'", expected, "Remove it.")
