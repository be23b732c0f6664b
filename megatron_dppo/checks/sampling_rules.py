"""Rules about which groups a rollout begins, and which it keeps."""

from collections.abc import Iterator

from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem


@rule("over_sampling")
def _over_sampling(config: Config, facts: Facts) -> Iterator[Problem]:
    """The engine can leave responses half done where more are begun than wanted."""
    options = config.rollout
    if options.over_sampling > 1 and options.engine != "sglang":
        found = f"{options.over_sampling:g} with rollout.engine = {options.engine!r}"
        expected = "1, since this engine decodes all responses to their end"
        action = "Leave it out, or use rollout.engine = 'sglang'."
        yield Problem("rollout.over_sampling", found, expected, action)
