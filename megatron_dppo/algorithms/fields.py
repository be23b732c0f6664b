"""The fields of an objective: what each may be, and what it bounds."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Number:
    """What a number of an objective may be, and what it bounds.

    Attributes:
        above_0: Whether 0 is refused.
        is_finite: Whether inf is refused.
        at_most: Largest value.
        bounds: Bound of what the number is compared with: from here on it never acts, and at 0 it drops all
            that moved. "divergence" is the bound of the objective's divergence. None: it is no threshold.
        may_be_0: Whether a threshold of 0 has a meaning.
        is_main: Whether `what-if` scales it.
        around_1: Whether its logarithm is scaled: it bounds a ratio around 1.
    """

    above_0: bool = False
    is_finite: bool = False
    at_most: float = math.inf
    bounds: float | Literal["divergence"] | None = None
    may_be_0: bool = False
    is_main: bool = False
    around_1: bool = False

    def refusal(self, value: object) -> str | None:
        """Return what is expected instead of a value, or None if the value is allowed."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            return "a number"
        if not (value > 0 if self.above_0 else value >= 0):
            return "a number > 0" if self.above_0 else "a number >= 0"
        if self.is_finite and value == math.inf:
            return "a finite number"
        return None if value <= self.at_most else f"a number from 0 to {self.at_most:g}"


def number(doc: str, default: float = math.inf, **bounds: Any) -> Any:
    """Return a field for a number >= 0: a setting of [algorithm] with a docstring.

    Args:
        doc: Docstring of the setting.
        default: Value that has no effect.
        bounds: Fields of `Number`.
    """
    return field(default=default, metadata={"doc": doc, "number": Number(**bounds)})


def choice(doc: str, default: Any) -> Any:
    """Return a field for a name or a switch: a setting of [algorithm] with a docstring."""
    return field(default=default, metadata={"doc": doc})
