"""Rules about `model.layer_spec`."""

from collections.abc import Iterator

from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem
from megatron_dppo.models.spec_choice import transformer_engine_problems


@rule("layer_spec")
def _layer_spec(config: Config, facts: Facts) -> Iterator[Problem]:
    """Transformer Engine's layers, where they are asked for, can be used and can do what the config wants."""
    if facts.transformer_engine is not None:
        yield from transformer_engine_problems(config, facts.transformer_engine)
