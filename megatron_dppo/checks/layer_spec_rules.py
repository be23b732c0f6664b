"""Rules about `model.layer_spec`."""

from collections.abc import Iterator

from megatron_dppo.architectures.spec_choice import library_problems, transformer_engine_limits
from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem


@rule("layer_spec", needs="machine")
def _layer_spec(config: Config, facts: Facts) -> Iterator[Problem]:
    """Transformer Engine, where its layers are asked for, can be used."""
    if facts.transformer_engine is not None:
        yield from library_problems(facts.transformer_engine)


@rule("layer_spec_limits")
def _layer_spec_limits(config: Config, facts: Facts) -> Iterator[Problem]:
    """Transformer Engine's layers, where they are asked for, can do what the config wants."""
    if config.model.layer_spec == "transformer_engine":
        yield from transformer_engine_limits(config)
