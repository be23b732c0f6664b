"""Decides options by the config, without Megatron: layer spec, shared prefixes, and the losses on routers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_dppo.architectures.sizes import BIASED_EXPERTS, BIASED_OUTPUT, SINKS, WIDE_NORM, ModelSizes
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.runtime.libraries import Library

LayerSpecName = Literal["torch", "transformer_engine"]
BALANCE = "moe_aux_loss_coeff"
Z = "moe_z_loss_coeff"
KIND = "moe_router_load_balancing_type"
_PER_SEQUENCE = "seq_aux_loss"
_WHY = {
    "aux_loss": ", which is of one micro-batch and changes with its size",
    "global_aux_loss": ", which is of the micro-batches so far and changes with their order",
}


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


def may_use_transformer_engine(config: Config, sizes: ModelSizes | None = None) -> bool:
    """Whether a machine where Transformer Engine can be used would use it."""
    return choose_layer_spec(config, Library(), sizes).name == "transformer_engine"


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
    own = () if sizes is None else (WIDE_NORM, SINKS, BIASED_OUTPUT, BIASED_EXPERTS)
    if sizes is not None and (of_torch := [option for option in own if option in sizes.options]):
        found = f"{', '.join(of_torch)} with Transformer Engine's layers"
        yield Problem("model.layer_spec", found, "the torch spec", "Set model.layer_spec = 'torch'.")
    if sizes is not None and sizes.linear is not None:
        found = "linear attention and gated attention with Transformer Engine's layers"
        yield Problem("model.layer_spec", found, "the torch spec", "Set model.layer_spec = 'torch'.")
    if config.lora.rank:
        found = f"{config.lora.rank} with Transformer Engine's layers"
        expected = "0: adapters need the linears and stacked experts of the torch spec"
        yield Problem("lora.rank", found, expected, f"Set it to 0, {use_torch}")
    if config.parallel.share_prefixes:
        found = "true with Transformer Engine's layers"
        expected = "false: its attention cannot read the keys of another sequence's prefix"
        yield Problem("parallel.share_prefixes", found, expected, f"Set it to false, {use_torch}")
    if config.parallel.context > 1:
        found = f"{config.parallel.context} with Transformer Engine's layers"
        expected = "1: its ring of ranks, on separate CUDA streams, has not been tested yet"
        yield Problem("parallel.context", found, expected, f"Set it to 1, {use_torch}")


def shares_prefixes(config: Config, sizes: ModelSizes | None, layer_spec: LayerSpecName | None = None) -> bool:
    """Resolve `parallel.share_prefixes`: if it is not set, prefixes are shared wherever it is supported.

    Args:
        config: Config of the run.
        sizes: Sizes of the model; `None` if they are not known.
        layer_spec: Layer spec that the model is built in. `None` if it is not known, as without a GPU: then
            "auto" is taken to be "torch", as `plan` takes it.
    """
    parallel = config.parallel
    if parallel.share_prefixes is not None:
        return parallel.share_prefixes
    is_torch = (layer_spec or config.model.layer_spec) != "transformer_engine"
    has_states = sizes is not None and bool(sizes.linear_layers)
    return is_torch and parallel.context == 1 and not has_states


@dataclass(frozen=True)
class RouterCoefficients:
    """Coefficients of the losses on every router; 0 is off."""

    z: float = 0.0  # mean over learning tokens of the squared log-sum-exp of a router's logits
    balance: float = 0.0  # mean over samples of a sample's load-balancing loss

    @classmethod
    def of(cls, megatron: Mapping[str, Any]) -> "RouterCoefficients":
        """Read the coefficients from `[megatron]`."""
        problems = list(router_loss_problems(megatron))
        if problems:
            raise ConfigError(problems)
        return cls(_z(megatron), sum(weight for _, weight in _balance(megatron)))


def router_loss_problems(megatron: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of the router losses in `[megatron]`; values of wrong types are ignored."""
    kinds = megatron.get(KIND)
    if kinds == "sinkhorn":
        found = "'sinkhorn', which chooses a token's experts by the other tokens of the micro-batch"
        action = "Remove it: the engine, and a layout with other micro-batches, choose other experts."
        yield Problem(f"megatron.{KIND}", found, f"{_PER_SEQUENCE!r} or 'none'", action)
    for kind, weight in _balance(megatron):
        if weight and kind != _PER_SEQUENCE and kind != "sinkhorn":
            expected = f"{KIND} = {_PER_SEQUENCE!r}, which is the same in every layout"
            action = f"Set megatron.{KIND} = {_PER_SEQUENCE!r}, or remove the coefficient."
            yield Problem(
                f"megatron.{BALANCE}",
                f"{weight:g} with {KIND} = {kind!r}{_WHY.get(kind, '')}",
                expected,
                action,
            )
    for key, weight in [(Z, _z(megatron)), *((BALANCE, weight) for _, weight in _balance(megatron))]:
        if weight < 0:
            yield Problem(f"megatron.{key}", f"{weight:g}", "0 or more", "Correct or remove it.")


def _z(megatron: Mapping[str, Any]) -> float:
    weight: Any = megatron.get(Z)
    return float(weight) if _is_number(weight) else 0.0


def _balance(megatron: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return pairs of a kind of load-balancing loss and its coefficient."""
    kinds, weights = megatron.get(KIND, "aux_loss"), megatron.get(BALANCE, 0.0)
    if not isinstance(kinds, list):
        kinds, weights = [kinds], [weights]
    pairs = zip(kinds, weights if isinstance(weights, list) else [], strict=False)
    return [(str(kind), float(weight)) for kind, weight in pairs if _is_number(weight)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
