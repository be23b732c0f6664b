"""Computes the values of trees: exactly if they are rational, otherwise as balls that contain them (FLINT).

A ball without zero proves a difference. Two values are equal if their difference still contains zero at twice
the digits of the largest or smallest number in it. Expressions with variables are compared at points on both
sides of every kink. The limits are of bits and of work, so that every machine gives the same result.
"""

# pyright: basic
import contextlib
import math
import operator
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce
from typing import Any

from flint import acb, arb, ctx, fmpq, fmpz

from megatron_dppo.rewards.math.text import FUNCTIONS, Name, Node, Number, Tree, words_of

_FIRST_BITS, _MAX_BITS = 256, 20_000  # precision of balls
_PRECISE_BITS = 2_048
_MAX_EXACT_BITS = 1 << 17
_MAX_EXPONENT = 100_000  # of e
_MAX_ROOT = 1 << 62
_MAX_WORK = 4e10  # sum of the squared precisions of all operations: about a second
_NUM_SMOOTH, _NUM_KINKED, _FEWEST_POINTS = 12, 60, 4
_FEWEST_PLACES, _MOST_PLACES = 6, 100  # of a decimal that may be rounded; and its digits after leading zeros
_WHOLE, _STEPS, _SMOOTH = words_of("factorial binom"), words_of("floor ceil gcd lcm"), words_of("+ - * /")
_EXPONENTIAL, _OF_REAL = words_of("exp sinh cosh sech csch"), words_of("floor ceil max min")
_INDICES = frozenset("nmkijNMK")  # variables that are integers where steps occur


class TooLargeError(Exception):
    """A number has more digits than the limit, or a comparison takes too long."""


class UndefinedError(Exception):
    """A tree has no value: it divides by zero, or is not a number."""


@dataclass
class _Computation:
    """Computes trees at one point to a precision in bits."""

    bits: int
    point: Mapping[str, Any]
    largest: int = 0  # bits of the largest number so far, or of the smallest number's inverse
    work: float = 0.0

    def value(self, node: Node) -> Any:
        """Return a rational number (`fmpq`) or a ball (`acb`), or `None` if the tree has no value."""
        with ctx.workprec(self.bits):
            try:
                return self._value(node)
            except (UndefinedError, ZeroDivisionError):
                return None

    def _value(self, node: Node) -> Any:
        if isinstance(node, Number):
            return self._counted(fmpq(*node.value.as_integer_ratio()))
        if isinstance(node, Name):
            return self.point[node.text] if node.text in self.point else _apply(node.text, [])
        self.work += self.bits**2
        if self.work > _MAX_WORK:
            raise TooLargeError
        parts = [self._value(part) for part in node.parts]
        if node.kind in ("tanh", "coth"):  # its distance from 1 is a power of e
            self.largest = max(self.largest, math.ceil(3 * float(_small(acb(parts[0])).abs_upper())))
        return self._counted(_apply(node.kind, parts))

    def _counted(self, value: Any) -> Any:
        limit = _MAX_EXACT_BITS
        if isinstance(value, fmpq):
            size = int(value.height_bits())
        else:
            if not value.is_finite():
                raise UndefinedError
            mantissa, exponent = value.abs_lower().man_exp()
            size = abs(int(exponent) + fmpz(mantissa).bit_length()) if mantissa else 0
            limit += self.bits
        if size > limit:
            raise TooLargeError
        self.largest = max(self.largest, size)
        return value


def _apply(kind: str, parts: list[Any]) -> Any:
    if kind in ("^", "root") and isinstance(parts[1], fmpq):
        return _rational_power(parts[0], parts[1] if kind == "^" else 1 / parts[1])
    if kind in _EXACT and all(isinstance(part, fmpq) for part in parts):
        return fmpq(_EXACT[kind](*parts))
    balls = [acb(part) for part in parts]
    if kind not in _BALLS or (kind in _OF_REAL and not all(ball.imag.is_zero() for ball in balls)):
        raise UndefinedError
    if kind in _EXPONENTIAL:
        _small(balls[0])
    return _BALLS[kind](*balls)


def _rational_power(base: Any, exponent: Any) -> Any:
    r"""Return the real power if there is one: `\sqrt[3]{-8}` and `(-8)^{1/3}` are -2."""
    if base == exponent == 0:
        raise UndefinedError
    if isinstance(base, fmpq) and (exponent.q == 1 or base == 0):
        return base ** int(_bounded(exponent.p, abs(exponent.p) * base.height_bits(), 2 * _MAX_EXACT_BITS))
    ball = acb(base)
    is_negative = ball.imag.is_zero() and ball.real < 0 and exponent.q % 2 == 1
    size = -ball if is_negative else ball
    if not size.contains(0):
        _small(acb(exponent) * size.log())
    power = size.root(int(_bounded(exponent.q, exponent.q, _MAX_ROOT))).pow(acb(exponent.p))
    return -power if is_negative and exponent.p % 2 else power


def _bounded(number: Any, size: Any, limit: int) -> Any:
    if size > limit:
        raise TooLargeError
    return number


def _of_whole(compute: Callable[..., int], *numbers: Any) -> Any:
    """Return a function of integers that are not negative."""
    if any(number.q != 1 or number < 0 for number in numbers):
        raise UndefinedError
    return compute(*(int(number.p) for number in numbers))


def _combinations(upper: int, lower: int) -> int:
    if lower > upper:
        raise UndefinedError
    return math.comb(upper, _bounded(lower, min(lower, upper - lower) * upper.bit_length(), _MAX_EXACT_BITS))


_FIELD: Mapping[str, Callable[..., Any]] = {
    "+": lambda *terms: reduce(operator.add, terms),
    "-": operator.neg,
    "*": operator.mul,
    "/": operator.truediv,
}
_EXACT: Mapping[str, Callable[..., Any]] = {
    **_FIELD,
    "factorial": partial(_of_whole, lambda number: math.factorial(_bounded(number, number, 10_000))),
    "binom": partial(_of_whole, _combinations),
    "gcd": partial(_of_whole, math.gcd),
    "lcm": partial(_of_whole, math.lcm),
    "abs": abs,
    "floor": fmpq.floor,
    "ceil": fmpq.ceil,
    "max": max,
    "min": min,
}


def _small(exponent: Any) -> Any:
    """Return the exponent of a power of e, if the power has few enough digits."""
    if not exponent.is_finite():
        raise UndefinedError
    return _bounded(exponent, float(exponent.abs_upper()), _MAX_EXPONENT)


_BALLS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(acb, own) for name in FUNCTIONS if hasattr(acb, own := re.sub("^arc?", "a", name))},
    **{r"\pi": acb.pi, "e": acb(1).exp, "i": partial(acb, 0, 1)},
    **_FIELD,
    "arccot": lambda x: (1 / x).atan(),
    "arcsec": lambda x: (1 / x).acos(),
    "arccsc": lambda x: (1 / x).asin(),
    "ln": acb.log,
    "lg": lambda x: x.log() / acb(10).log(),
    "log": lambda x, base=None: x.log() / (acb(10) if base is None else base).log(),
    "^": lambda base, exponent: _small(exponent * base.log()).exp(),
    "abs": lambda x: acb(abs(x)),
    "floor": acb.real_floor,
    "ceil": acb.real_ceil,
    "max": lambda *numbers: reduce(acb.real_max, numbers),
    "min": lambda *numbers: reduce(acb.real_min, numbers),
}


def are_equal(reference: Node, answer: Node) -> bool:
    """Return whether two numbers or expressions are equal for all values of the variables.

    Raises:
        TooLargeError: A number is too large to compute.
    """
    for decimal, other in ((reference, answer), (answer, reference)):
        if isinstance(decimal, Number) and _is_precise(decimal) and rounds_to(other, decimal):
            return True
    difference, num_points, has_large = Tree("+", (reference, Tree("-", (answer,)))), 0, False
    if not difference.names:
        return _is_zero(difference, {})
    for point in _points(reference, answer):
        try:
            values = [_Computation(_FIRST_BITS, point).value(node) for node in (reference, answer)]
        except TooLargeError:
            has_large = True
            continue
        if values == [None, None]:
            continue
        if None in values or not acb(values[0]).overlaps(acb(values[1])):
            return False
        if num_points < 3 and not _is_zero(difference, point):
            return False
        num_points += 1
    if has_large and not num_points:
        raise TooLargeError
    return num_points >= _FEWEST_POINTS


def _is_zero(node: Node, point: Mapping[str, Any]) -> bool:
    needed = _FIRST_BITS
    while needed <= _MAX_BITS:
        bits = needed
        computation = _Computation(bits, point)
        value = computation.value(node)
        if value is None or isinstance(value, fmpq) or not value.contains(0):
            return value == 0
        needed = 2 * computation.largest + _FIRST_BITS
        if bits >= needed:
            return bool(value.rad() < arb(2) ** (-bits // 4))
    raise TooLargeError


def is_multiple(first: Node, second: Node, *, is_positive: bool) -> bool:
    """Return whether one expression is a constant, not zero, times the other one."""
    ratios = list[Any]()
    with ctx.workprec(_PRECISE_BITS):
        for point in _points(first, second):
            with contextlib.suppress(TooLargeError):
                values = [_Computation(_PRECISE_BITS, point).value(node) for node in (first, second)]
                if None not in values:
                    one, other = map(acb, values)
                    if one.contains(0) != other.contains(0):
                        return False
                    ratios += [] if one.contains(0) else [one / other]
        are_alike = all(each.overlaps(ratios[0]) and (each.real > 0 or not is_positive) for each in ratios)
        return len(ratios) >= _FEWEST_POINTS and are_alike


def _is_precise(number: Number) -> bool:
    """Return whether a decimal has enough places and digits to be a rounded number."""
    is_long = number.places is not None and _FEWEST_PLACES <= number.places <= _MOST_PLACES
    return is_long and abs(number.value) * 10 ** (number.places or 0) >= 10 ** (_FEWEST_PLACES - 1)


def rounds_to(node: Node, decimal: Number) -> bool:
    """Return whether a value without variables, rounded or cut off to the decimal's places, equals it."""
    value = approximate(node)
    if value is None or (value < 0) != (decimal.value < 0):
        return False
    excess = (abs(value) - abs(decimal.value)) * 10 ** (decimal.places or 0)
    return Fraction(-1, 2) <= excess < (Fraction(1, 2) if isinstance(node, Number) else 1)


def approximate(node: Node) -> Fraction | None:
    """Return the value of a tree to more digits than a decimal has; `None` if it is no real number.

    Raises:
        TooLargeError: A number is too large.
    """
    value = _Computation(_PRECISE_BITS, {}).value(node)
    if isinstance(value, acb):
        is_real = value.imag.contains(0) and value.real.rad() < 1
        value = value.real.mid().fmpq() if is_real else None
    return None if value is None else Fraction(int(value.p), int(value.q))


def _points(first: Node, second: Node) -> Iterator[Mapping[str, Any]]:
    """Yield points of several sizes and both signs, from the constants of both trees."""
    nodes = [*first.walk(), *second.walk()]
    kinds = {node.kind for node in nodes} - {""}
    sizes = sorted(size for size in map(_size, nodes) if size)[-8:] or [Fraction(1)]
    scales = [1, 10, 100, 1000, *sizes, 2 * sizes[-1], 10 * sizes[-1], 1000 * sizes[-1]]
    for number in range(_NUM_SMOOTH if kinds <= _SMOOTH else _NUM_KINKED):
        point = dict[str, Any]()
        for name in sorted(first.names | second.names):
            # a remainder by a prime: single bits of the checksums of `x` and `y` always agree, or always differ
            hashed = zlib.crc32(f"{number} {name}".encode(errors="replace")) % 9973
            part = fmpq(hashed + 1009, 4999)  # 0.2 to 2.2
            is_negative = number % 4 == 1 or (number % 4 > 1 and hashed % 2)
            scale = scales[hashed // 2 % len(scales) if number >= 8 else 0]
            value = part * fmpq(*scale.as_integer_ratio()) * (-1 if is_negative else 1)
            if kinds & _WHOLE:
                value = fmpq(math.floor(min(sizes[-1], 100)) + 2 + int((part * 1000).floor()) % 40)
            elif kinds & _STEPS and (name[0] in _INDICES or number % 2):
                value = fmpq((value * 7).floor())
            point[name] = value
        yield point


def _size(node: Node) -> Fraction:
    """Return the magnitude of a tree without variables, else 0: kinks are where an expression passes it."""
    with contextlib.suppress(TooLargeError):
        return abs((None if node.names else approximate(node)) or Fraction(0)).limit_denominator(10**9)
    return Fraction(0)
