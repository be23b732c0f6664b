"""What trades memory for time: recompute, offload, and the arithmetic of the layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from megatron_dppo.errors import ConfigError, Problem

Granularity = Literal["none", "selective", "full"]
Method = Literal["uniform", "block"]
LayerSpec = Literal["torch", "torch-cpu", "te"]
LossFrom = Literal["hidden_states", "logits"]
Moments = Literal["float32", "bfloat16", "float8"]

COUNTED_MODULES = ("core_attn", "mlp", "moe")
"""Values of recompute_modules that our layer specs recompute; others are taken to save nothing."""


@dataclass(frozen=True)
class Recompute:
    """Which activations are dropped after forward and made again in backward, in Megatron's words."""

    granularity: Granularity = "none"
    method: Method = "uniform"
    num_layers: int = 1  # "full": layers that are recomputed together, or how many of a stage ("block")
    modules: tuple[str, ...] = ("core_attn",)  # "selective"

    def __str__(self) -> str:
        if self.granularity == "selective":
            return f"selective ({', '.join(self.modules)})"
        is_usual = self.granularity == "none" or (self.method == "uniform" and self.num_layers == 1)
        return self.granularity if is_usual else f"full ({self.method}, {self.num_layers})"

    def keys(self) -> dict[str, Any]:
        """The keys of `[megatron]` that ask for it."""
        if self.granularity == "none":
            return {}
        keys: dict[str, Any] = {"recompute_granularity": self.granularity}
        if self.granularity == "full":
            return keys | {"recompute_method": self.method, "recompute_num_layers": self.num_layers}
        return keys | {"recompute_modules": list(self.modules)}


FULL = Recompute("full")


@dataclass(frozen=True)
class Options:
    """What may differ between two runs of one layout.

    Attributes:
        recompute: Activations that are made twice.
        offload_optimizer: Adam's states and its step live on the host.
        moments: Type of Adam's two moments; below float32 needs Megatron's precision-aware optimizer.
        layer_spec: Whose modules compute: our torch spec ("torch-cpu": as CPUs run it), Transformer Engine's.
    """

    recompute: Recompute = Recompute()
    offload_optimizer: bool = False
    moments: Moments = "float32"
    layer_spec: LayerSpec = "torch"

    @property
    def moment_bytes(self) -> int:
        """Of one element of one moment."""
        return {"float32": 4, "bfloat16": 2, "float8": 1}[self.moments]

    def __str__(self) -> str:
        place = ", optimizer on the host" if self.offload_optimizer else ""
        return f"recompute {self.recompute}{place}"


def recompute_of(megatron: Mapping[str, Any], granularity: Granularity | None = None) -> Recompute:
    """What `[megatron]` asks to recompute.

    Args:
        megatron: The pass-through table.
        granularity: Takes the place of the table's recompute_granularity.

    Raises:
        ConfigError: A recompute_* key has a value that Megatron does not take.
    """
    default = Recompute()
    modules = megatron.get("recompute_modules") or list(default.modules)
    found = Recompute(
        granularity=megatron.get("recompute_granularity") or "none",
        method=megatron.get("recompute_method") or default.method,
        num_layers=megatron.get("recompute_num_layers") or default.num_layers,
        modules=tuple(map(str, modules)) if isinstance(modules, list) else default.modules,
    )
    problems = [
        *_one_of("recompute_granularity", found.granularity, get_args(Granularity)),
        *_one_of("recompute_method", found.method, get_args(Method)),
    ]
    if type(found.num_layers) is not int or found.num_layers < 1:
        expected, action = "a whole number above 0", "Set it to 1 to recompute layer by layer."
        problems.append(Problem("megatron.recompute_num_layers", repr(found.num_layers), expected, action))
    if not isinstance(modules, list):
        action = "Write for example ['core_attn', 'moe']."
        problems.append(Problem("megatron.recompute_modules", repr(modules), "a list of names", action))
    if problems:
        raise ConfigError(problems)
    return found if granularity is None else replace(found, granularity=granularity)


def _one_of(key: str, found: Any, choices: tuple[str, ...]) -> list[Problem]:
    if found in choices:
        return []
    return [Problem(f"megatron.{key}", repr(found), " or ".join(choices), "Correct or remove it.")]
