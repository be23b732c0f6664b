"""Rules about asynchronous sampling: its requirements on the engine, and the bounds of a sample's age."""

from collections.abc import Iterator

from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem


@rule("max_staleness")
def _max_staleness(config: Config, facts: Facts) -> Iterator[Problem]:
    """Asynchronous sampling has separate servers, and uses the package's sampling."""
    options, key = config.rollout, "rollout.max_staleness"
    if not options.max_staleness:
        return
    given = str(options.max_staleness)
    if options.engine != "sglang":
        expected = "0: this engine samples in the trainer's processes, and they cannot train at the same time"
        found = f"{given} with rollout.engine = {options.engine!r}"
        yield Problem(key, found, expected, "Set it to 0, or rollout.engine = 'sglang'.")
    elif options.sglang.colocated:
        found = f"{given} with rollout.sglang.colocated"
        expected = "0: trainer and servers take turns on the same GPUs"
        yield Problem(key, found, expected, "Give the servers separate GPUs, or set it to 0.")
    if options.lag:
        found, expected = f"{given} with rollout.lag = {options.lag}", "one of them: a largest or a fixed age"
        yield Problem(key, found, expected, "Leave one of them out.")
    if options.generate is not None:
        found = f"{given} with rollout.generate = {options.generate!r}"
        expected = "0: a push interrupts responses, and such a function cannot resume them"
        yield Problem(key, found, expected, "Write an environment (rollout.environment), or set it to 0.")


@rule("open_groups")
def _open_groups(config: Config, facts: Facts) -> Iterator[Problem]:
    """Over-sampling starts only groups that rollouts can train on within max_staleness."""
    options = config.rollout
    if options.max_staleness and options.over_sampling > options.max_staleness + 1:
        found = f"{options.over_sampling:g} with rollout.max_staleness = {options.max_staleness}"
        expected = (
            f"1 to {options.max_staleness + 1}: further groups would be older than "
            "max_staleness when they are trained on"
        )
        yield Problem("rollout.over_sampling", found, expected, "Lower it, or raise rollout.max_staleness.")


@rule("keep_partials")
def _keep_partials(config: Config, facts: Facts) -> Iterator[Problem]:
    """Aborted responses are resumed if their age has a bound, and dropped otherwise."""
    options, key = config.rollout, "rollout.keep_partials"
    if options.max_staleness and not options.keep_partials:
        found = f"false with rollout.max_staleness = {options.max_staleness}"
        expected = "true: responses that a push interrupts are resumed, and none is dropped"
        yield Problem(key, found, expected, "Remove it.")
    if not options.max_staleness and options.over_sampling > 1 and options.keep_partials:
        found = f"true with rollout.over_sampling = {options.over_sampling:g} and rollout.max_staleness = 0"
        expected = "false, or a bound: otherwise the age of a response in training is not limited"
        action = "Set rollout.max_staleness = 1 or more, or keep_partials = false to drop aborted responses."
        yield Problem(key, found, expected, action)
