"""Rules about sampling beside training: what it needs of the engine, and what bounds a sample's age."""

from collections.abc import Iterator

from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem


@rule("max_staleness")
def _max_staleness(config: Config, facts: Facts) -> Iterator[Problem]:
    """Sampling beside training has servers of its own, and the package's own way to sample."""
    options, key = config.rollout, "rollout.max_staleness"
    if not options.max_staleness:
        return
    given = str(options.max_staleness)
    if options.engine != "sglang":
        expected = "0: this engine samples in the trainer's processes, which train meanwhile"
        found = f"{given} with rollout.engine = {options.engine!r}"
        yield Problem(key, found, expected, "Set it to 0, or rollout.engine = 'sglang'.")
    elif options.sglang.colocated:
        found = f"{given} with rollout.sglang.colocated"
        expected = "0: trainer and servers take turns on the same GPUs"
        yield Problem(key, found, expected, "Give the servers GPUs of their own, or set it to 0.")
    if options.lag:
        found, expected = f"{given} with rollout.lag = {options.lag}", "one of them: a bound, or a set age"
        yield Problem(key, found, expected, "Leave one of them out.")
    if options.generate is not None:
        found = f"{given} with rollout.generate = {options.generate!r}"
        expected = "0: a push interrupts responses in the middle, which such a function cannot go on with"
        yield Problem(key, found, expected, "Write an environment (rollout.environment), or set it to 0.")


@rule("open_groups")
def _open_groups(config: Config, facts: Facts) -> Iterator[Problem]:
    """No more groups are begun than the bound of staleness lets rollouts train on."""
    options = config.rollout
    if options.max_staleness and options.over_sampling > options.max_staleness + 1:
        found = f"{options.over_sampling:g} with rollout.max_staleness = {options.max_staleness}"
        expected = (
            f"1 to {options.max_staleness + 1}: what is begun beyond that would be older than "
            "max_staleness when its turn comes"
        )
        yield Problem("rollout.over_sampling", found, expected, "Lower it, or raise rollout.max_staleness.")


@rule("keep_partials")
def _keep_partials(config: Config, facts: Facts) -> Iterator[Problem]:
    """What is aborted is resumed where its age has a bound, and dropped elsewhere."""
    options, key = config.rollout, "rollout.keep_partials"
    if options.max_staleness and not options.keep_partials:
        found = f"false with rollout.max_staleness = {options.max_staleness}"
        expected = "true: responses that a push interrupts are gone on with, and none is dropped"
        yield Problem(key, found, expected, "Remove it.")
    if not options.max_staleness and options.over_sampling > 1 and options.keep_partials:
        found = f"true with rollout.over_sampling = {options.over_sampling:g} and rollout.max_staleness = 0"
        expected = "false, or a bound: nothing would say how old a response may be once it is trained on"
        action = "Set rollout.max_staleness = 1 or more, or keep_partials = false to drop what is aborted."
        yield Problem(key, found, expected, action)
