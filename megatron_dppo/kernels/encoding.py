"""An objective as plain numbers: what an operator's schema can carry, and a kernel can read."""

from functools import lru_cache
from typing import Any, get_args

from megatron_dppo.algorithms.divergence import DIVERGENCES, SampledToken
from megatron_dppo.algorithms.objective import Anchor, Objective, Relax, Rule

# The values of each field that has names, by their number: capi.h's, where it has them.
CHOICES: dict[str, tuple[Any, ...]] = {
    "rule": get_args(Rule),
    "divergence": tuple(DIVERGENCES),
    "relax": get_args(Relax),
    "anchor": get_args(Anchor),
    "sampled_token": get_args(SampledToken),
    "include_other": (False, True),
    "is_imitation": (False, True),
}
NUMBERS = ("delta_low", "delta_high", "eps_low", "eps_high", "alpha", "ratio_cap", "entropy_coef", "top_k")


def encode(objective: Objective) -> list[float]:
    """The objective without its name; `decode` inverts it."""
    choices = [float(names.index(getattr(objective, field))) for field, names in CHOICES.items()]
    return choices + [float(getattr(objective, field)) for field in NUMBERS]


def decode(code: list[float]) -> Objective:
    """The objective that `encode` was given, but for its name."""
    return _decode(tuple(code))


@lru_cache
def _decode(code: tuple[float, ...]) -> Objective:
    choices = {field: names[int(n)] for (field, names), n in zip(CHOICES.items(), code, strict=False)}
    numbers: dict[str, Any] = dict(zip(NUMBERS, code[len(CHOICES) :], strict=True))
    numbers["top_k"] = int(numbers["top_k"])
    return Objective("decoded", **choices, **numbers)
