"""Options of the config that determine the memory of layers: recompute, and the layer spec."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem

Granularity = Literal["none", "selective", "full"]
Method = Literal["uniform", "block"]
LayerSpec = Literal["torch", "torch-cpu", "te"]

COUNTED_MODULES = ("core_attn", "mlp", "moe")
"""Values of recompute_modules that our layer specs recompute; others are taken to save nothing."""


@dataclass(frozen=True)
class Recompute:
    """Activations that are recomputed in backward, in Megatron's terms."""

    granularity: Granularity = "none"
    method: Method = "uniform"
    num_layers: int = 1  # "full": number of layers recomputed together, or per stage ("block")
    modules: tuple[str, ...] = ("core_attn",)  # "selective"

    def __str__(self) -> str:
        if self.granularity == "selective":
            return f"selective ({', '.join(self.modules)})"
        is_usual = self.granularity == "none" or (self.method == "uniform" and self.num_layers == 1)
        return self.granularity if is_usual else f"full ({self.method}, {self.num_layers})"

    def keys(self) -> dict[str, Any]:
        """Return the keys of `[megatron]` that set it."""
        if self.granularity == "none":
            return {}
        keys: dict[str, Any] = {"recompute_granularity": self.granularity}
        if self.granularity == "full":
            return keys | {"recompute_method": self.method, "recompute_num_layers": self.num_layers}
        return keys | {"recompute_modules": list(self.modules)}


FULL = Recompute("full")


@dataclass(frozen=True)
class Options:
    """Recompute and layer spec.

    Attributes:
        recompute: Activations that are recomputed.
        layer_spec: Our torch spec ("torch-cpu": as on CPUs), or Transformer Engine's modules.
    """

    recompute: Recompute = Recompute()
    layer_spec: LayerSpec = "torch"

    @classmethod
    def of(cls, config: Config) -> "Options":
        """Return the options of a config; for layer_spec "auto", assume the spec that keeps more.

        Raises:
            ConfigError: A recompute_* key has a value that Megatron does not take.
        """
        is_engine = config.model.layer_spec == "transformer_engine"
        return cls(recompute_of(config.megatron), "te" if is_engine else "torch")

    def __str__(self) -> str:
        return f"recompute {self.recompute}"


def recompute_of(megatron: Mapping[str, Any]) -> Recompute:
    """Return the recompute settings of `[megatron]`.

    Raises:
        ConfigError: A recompute_* key has a value that Megatron does not take.
    """
    problems = recompute_problems(megatron)
    if problems:
        raise ConfigError(problems)
    default = Recompute()
    return Recompute(
        granularity=megatron.get("recompute_granularity", default.granularity),
        method=megatron.get("recompute_method", default.method),
        num_layers=megatron.get("recompute_num_layers", default.num_layers),
        modules=tuple(megatron.get("recompute_modules", default.modules)),
    )


def recompute_problems(megatron: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of the recompute_* keys of `[megatron]` that Megatron would refuse."""
    granularity = megatron.get("recompute_granularity")
    problems = [
        *_one_of(megatron, "recompute_granularity", ("selective", "full")),
        *_one_of(megatron, "recompute_method", get_args(Method)),
    ]
    num_layers, modules = megatron.get("recompute_num_layers", 1), megatron.get("recompute_modules", [])
    if type(num_layers) is not int or num_layers < 1:
        expected, action = "a whole number above 0", "Set it to 1 to recompute layer by layer."
        problems.append(Problem("megatron.recompute_num_layers", repr(num_layers), expected, action))
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        action = "Write for example ['core_attn', 'moe']."
        problems.append(Problem("megatron.recompute_modules", repr(modules), "a list of names", action))
    for key, value in FULL.keys().items():
        if granularity == "full" and key not in megatron:
            expected, action = "a value with recompute_granularity = 'full'", f"Set megatron.{key} = {value!r}."
            problems.append(Problem(f"megatron.{key}", "none", expected, action))
    if granularity == "selective" and "recompute_num_layers" in megatron:
        found = f"{num_layers!r} with recompute_granularity = 'selective'"
        action = "Remove it: modules of all layers are recomputed."
        problems.append(Problem("megatron.recompute_num_layers", found, "none", action))
    return problems


def _one_of(megatron: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> list[Problem]:
    if key not in megatron or megatron[key] in choices:
        return []
    action = "Correct or remove it."
    return [Problem(f"megatron.{key}", repr(megatron[key]), " or ".join(choices), action)]
