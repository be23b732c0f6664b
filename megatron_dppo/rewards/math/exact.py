"""Computes the exact values of trees that are rational numbers."""

import math
import operator
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from megatron_dppo.rewards.math.tree import Name, Node, Number

MAX_BITS = 1 << 17  # maximum bits of a rational number
_MAX_COUNT = 20_000  # maximum factors in a factorial or a number of combinations
_MAX_ROOT = 64


class TooLargeError(Exception):
    """A number has more digits than the limit."""


class UndefinedError(Exception):
    """A tree has no value: it divides by zero, or is not a number."""


class _NotRationalError(Exception):
    """A value is not a rational number, or not known to be one."""


def rational(node: Node) -> Fraction | None:
    """Return the exact value of a tree without variables, or `None` if it is not known to be rational.

    Raises:
        TooLargeError: The number is too large.
        UndefinedError: The tree has no value.
    """
    try:
        return _rational(node)
    except _NotRationalError:
        return None


def _rational(node: Node) -> Fraction:
    if isinstance(node, Number):
        return node.value
    if isinstance(node, Name):
        raise _NotRationalError
    compute = _EXACT.get(node.kind)
    if compute is None:
        raise _NotRationalError
    value: Fraction = compute(*(_rational(part) for part in node.parts))
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise TooLargeError
    return value


def _divide(above: Fraction, below: Fraction) -> Fraction:
    if below == 0:
        raise UndefinedError
    return above / below


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if base == 0 and exponent <= 0:
        raise UndefinedError
    if exponent.denominator != 1:
        return _power(_root(base, Fraction(exponent.denominator)), Fraction(exponent.numerator))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and base != 0 and abs(exponent.numerator) * bits > 2 * MAX_BITS:
        raise TooLargeError
    return base ** int(exponent % 2) if abs(base) == 1 else base**exponent.numerator


def _root(base: Fraction, index: Fraction) -> Fraction:
    if index.denominator != 1 or not 2 <= index <= _MAX_ROOT:
        raise _NotRationalError
    degree = index.numerator
    if base < 0:
        raise _NotRationalError
    above, below = _whole_root(base.numerator, degree), _whole_root(base.denominator, degree)
    return Fraction(above, below)


def _real_root(base: Fraction, index: Fraction) -> Fraction:
    if base < 0 and index.denominator == 1 and index.numerator % 2 == 1:
        return -_root(-base, index)
    return _root(base, index)


def _whole_root(number: int, degree: int) -> int:
    root = math.isqrt(number) if degree == 2 else _newton(number, degree)
    if root**degree != number:
        raise _NotRationalError
    return root


def _newton(number: int, degree: int) -> int:
    if number < 2:
        return number
    guess = 1 << -(-number.bit_length() // degree)
    while True:
        better = ((degree - 1) * guess + number // guess ** (degree - 1)) // degree
        if better >= guess:
            return guess
        guess = better


def _factorial(number: Fraction) -> Fraction:
    if number.denominator != 1 or number < 0:
        raise _NotRationalError
    if number > _MAX_COUNT:
        raise TooLargeError
    return Fraction(math.factorial(number.numerator))


def _binomial(upper: Fraction, lower: Fraction) -> Fraction:
    if upper.denominator != 1 or lower.denominator != 1 or upper < 0:
        raise _NotRationalError
    if not 0 <= lower <= upper:
        return Fraction(0)
    if (
        min(lower, upper - lower) > _MAX_COUNT
        or min(lower, upper - lower) * upper.numerator.bit_length() > MAX_BITS
    ):
        raise TooLargeError
    return Fraction(math.comb(upper.numerator, lower.numerator))


def _whole(numbers: tuple[Fraction, ...]) -> list[int]:
    if any(number.denominator != 1 for number in numbers):
        raise _NotRationalError
    return [number.numerator for number in numbers]


def _logarithm(number: Fraction, base: Fraction = Fraction(10)) -> Fraction:
    """Return a logarithm that is an integer."""
    if number <= 0 or base <= 0 or base == 1:
        raise _NotRationalError
    guess = round(math.log2(number.numerator) - math.log2(number.denominator), 6)
    size = math.log2(base.numerator) - math.log2(base.denominator)
    exponent = round(guess / size) if size else 0
    if abs(exponent) > MAX_BITS or _power(base, Fraction(exponent)) != number:
        raise _NotRationalError
    return Fraction(exponent)


def _floor(number: Fraction) -> Fraction:
    return Fraction(math.floor(number))


def _sum(*terms: Fraction) -> Fraction:
    return sum(terms, Fraction(0))


def _gcd(*numbers: Fraction) -> Fraction:
    return Fraction(math.gcd(*_whole(numbers)))


def _lcm(*numbers: Fraction) -> Fraction:
    return Fraction(math.lcm(*_whole(numbers)))


def _ceil(number: Fraction) -> Fraction:
    return Fraction(math.ceil(number))


_EXACT: Mapping[str, Any] = {
    "+": _sum,
    "-": operator.neg,
    "*": operator.mul,
    "/": _divide,
    "^": _power,
    "root": _real_root,
    "factorial": _factorial,
    "binom": _binomial,
    "abs": abs,
    "floor": _floor,
    "ceil": _ceil,
    "gcd": _gcd,
    "lcm": _lcm,
    "max": max,
    "min": min,
    "log": _logarithm,
    "lg": _logarithm,
}
