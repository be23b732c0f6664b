"""Rules about the `[sglang]` pass-through table: the interpreter that has SGLang says what it takes."""

from collections.abc import Iterator

from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem
from megatron_dppo.rollout.sglang.options import interpreter, option_problems, owned_problems, read_options


@rule("sglang_owned")
def _sglang_owned(config: Config, facts: Facts) -> Iterator[Problem]:
    """[sglang] leaves alone what the package sets."""
    yield from owned_problems(config.sglang)


@rule("sglang_arguments")
def _sglang_arguments(config: Config, facts: Facts) -> Iterator[Problem]:
    """Keys of [sglang] are arguments of the installed SGLang's server, and their values will do."""
    options = read_options(interpreter(config)) if config.sglang else None
    if options is not None:
        yield from option_problems(config.sglang, options)
