"""Rules about the `[sglang]` pass-through table: the interpreter that has SGLang says what it takes."""

from collections.abc import Iterator

from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem
from megatron_dppo.rollout.sglang.options import (
    interpreter,
    option_problems,
    owned_problems,
    read_options,
    shipped_options,
)
from megatron_dppo.rollout.sglang.protocol import GENERATIONS


@rule("sglang_owned")
def _sglang_owned(config: Config, facts: Facts) -> Iterator[Problem]:
    """[sglang] leaves alone what the package sets."""
    yield from owned_problems(config.sglang)


@rule("sglang_arguments", needs="machine")
def _sglang_arguments(config: Config, facts: Facts) -> Iterator[Problem]:
    """Keys of [sglang] are arguments of SGLang's server, and their values will do."""
    if config.sglang:
        options = read_options(interpreter(config)) or shipped_options(next(iter(GENERATIONS)))
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
            action = f"Remove it; start more servers, or raise sglang.tp_size, in the place of {name}."
            yield Problem(f"sglang.{name}", str(value), "1: updates reach tensor-parallel ranks only", action)


@rule("sglang_weight_sync")
def _sglang_weight_sync(config: Config, facts: Facts) -> Iterator[Problem]:
    """The way that weights travel suits what servers do with them, and where they are."""
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
