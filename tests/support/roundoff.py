"""How far a float32 result may be from its reference: a factor times what float32 makes of the reference.

Two programs that add in another order differ by roundings. By how much depends on the model, the tensor and the
CPU, so no fixed number is right on every machine. The limit is derived on the machine that compares: from the
reference in float64 and in float32, or, if the reference is float32 alone, from what it changes by when each
weight moves by its last bit.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

OF_FLOAT64 = 12.0  # times the reference's error; up to 4.3 were measured, with AVX-512, AVX2 and neither
OF_LAST_BITS = 6.0  # times the reference's change
FLOOR = 2e-5  # as either may be small by chance; up to 5e-6 were measured then
COARSEST = 5e-4  # no limit may be so large: what is off by a thousandth must fail


class Error(NamedTuple):
    """Difference of a float32 result from its reference, and the largest that may be."""

    value: float
    limit: float

    @property
    def share(self) -> float:
        """The error divided by its limit; infinite for NaN."""
        share = self.value / self.limit
        return math.inf if math.isnan(share) else share

    @classmethod
    def of(cls, value: float, roundoff: float, factor: float) -> "Error":
        """An error, and its limit: so many times the reference's own roundoff, `FLOOR` at least."""
        return cls(value, max(factor * roundoff, FLOOR))


def relative(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference||."""
    return float((value - reference).norm() / reference.norm().clamp(min=1e-12))


def worst(errors: Iterable[Error]) -> Error:
    """The error that is nearest to its limit, or farthest beyond it."""
    return max(errors, key=lambda error: error.share)


def require_close(errors: Mapping[str, Error], coarsest: float = COARSEST) -> None:
    """Fail with the worst of these errors if it is beyond its limit, or if a limit is none."""
    shares = {name: error.share for name, error in errors.items()}
    name = max(shares, key=lambda name: shares[name])
    assert shares[name] <= 1, (name, errors[name])
    assert max(error.limit for error in errors.values()) < coarsest, "too coarse: make the model smoother"


@torch.no_grad()
def move_last_bits(weights: Iterable[Tensor], seed: int = 0) -> None:
    """Move each weight to the next larger or smaller float, by chance."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        is_up = torch.rand(weight.shape, generator=generator) < 0.5
        towards = torch.where(is_up, torch.inf, -torch.inf).to(weight)
        weight.copy_(torch.nextafter(weight, towards))
