"""Chooses the layer spec, ours (`torch`) or Transformer Engine's, without Megatron."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_dppo.architectures.sizes import ModelSizes
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem
from megatron_dppo.runtime.libraries import Library

LayerSpecName = Literal["torch", "transformer_engine"]


@dataclass(frozen=True)
class SpecChoice:
    """A layer spec, and the reason for the choice."""

    name: LayerSpecName
    reason: str


def choose_layer_spec(
    config: Config, transformer_engine: Library, sizes: ModelSizes | None = None
) -> SpecChoice:
    """Resolve `model.layer_spec` for a model of these sizes, depending on the installed library."""
    if config.model.layer_spec != "auto":
        return SpecChoice(config.model.layer_spec, "model.layer_spec asks for it")
    if config.model.dtype == "float32":
        return SpecChoice("torch", "float32 is for exact comparisons, which were made with this one")
    if not transformer_engine.is_usable:
        return SpecChoice("torch", f"Transformer Engine cannot be used here: {transformer_engine.fault}")
    problem = next(transformer_engine_limits(config, sizes), None)
    if problem is None:
        return SpecChoice("transformer_engine", "Transformer Engine can be used")
    return SpecChoice("torch", f"Transformer Engine cannot be used: {problem.where}: {problem.found}")


def transformer_engine_problems(config: Config, transformer_engine: Library) -> Iterator[Problem]:
    """Yield the problems that prevent this config from using Transformer Engine's modules."""
    yield from library_problems(transformer_engine)
    yield from transformer_engine_limits(config)


def library_problems(transformer_engine: Library) -> Iterator[Problem]:
    """Yield the problems that prevent any config from using Transformer Engine's modules on this machine."""
    if not transformer_engine.is_usable:
        found = f"Transformer Engine, which cannot be used here: {transformer_engine.fault}"
        action = (
            "Use 'torch' or 'auto'; or install it where CUDA and cuDNN are, with "
            "pip install 'megatron_dppo[te]', and see that python -c 'import transformer_engine.pytorch' works."
        )
        yield Problem("model.layer_spec", found, "a Transformer Engine that imports, and a GPU", action)


def transformer_engine_limits(config: Config, sizes: ModelSizes | None = None) -> Iterator[Problem]:
    """Yield the problems of features that are untested with Transformer Engine's modules."""
    use_torch = "or set model.layer_spec = 'torch'."
    if sizes is not None and sizes.latent is not None:
        found = "latent attention with Transformer Engine's layers"
        expected = "grouped-query attention: latent attention has not been tested yet"
        yield Problem("model.layer_spec", found, expected, "Set model.layer_spec = 'torch'.")
    if config.lora.rank:
        found = f"{config.lora.rank} with Transformer Engine's layers"
        expected = "0: adapters need the linears and stacked experts of the torch spec"
        yield Problem("lora.rank", found, expected, f"Set it to 0, {use_torch}")
    if config.parallel.context > 1:
        found = f"{config.parallel.context} with Transformer Engine's layers"
        expected = "1: its ring of ranks, on separate CUDA streams, has not been tested yet"
        yield Problem("parallel.context", found, expected, f"Set it to 1, {use_torch}")
