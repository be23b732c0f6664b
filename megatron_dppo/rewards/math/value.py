"""Computes the value of a tree: exactly if it is rational, otherwise to enough digits for a decision.

Each value has an error bound, so a difference between two values is certain. Two values are equal if they still
agree at far more digits than their largest and smallest numbers have.
A decimal number of six places or more equals the numbers that round to it.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

from mpmath import MPContext  # pyright: ignore[reportMissingTypeStubs]

from megatron_dppo.rewards.math.exact import TooLargeError, UndefinedError, rational
from megatron_dppo.rewards.math.tree import CONSTANTS, FUNCTIONS, SETS, Name, Node, Number, Tree, names

_MAX_PRECISION = 60_000  # bits
_FIRST_PRECISION = 200
_NUM_POINTS = 8
_NUM_PRECISE_POINTS = 3
INFINITY = r"\infty"
_NO_NUMBERS = frozenset({INFINITY, r"\dots", *SETS})
_FEWEST_PLACES = 6  # also the minimum of digits after leading zeros
_MOST_PLACES = 100


def are_equal_leaves(reference: Node, answer: Node) -> bool:
    """Return whether two numbers or expressions are equal for all values of the variables.

    Raises:
        TooLargeError: A number is too large to compute.
    """
    try:
        signs = infinity_sign(reference), infinity_sign(answer)
        if signs != (None, None):
            return signs[0] == signs[1]
        if (names(reference) | names(answer)) & _NO_NUMBERS:
            return False
        for decimal, other in ((reference, answer), (answer, reference)):
            if isinstance(decimal, Number) and _is_precise(decimal) and _rounds_to(other, decimal):
                return True
        return are_equal_values(reference, answer)
    except UndefinedError:
        return False


def infinity_sign(node: Node) -> int | None:
    """Return 1 or -1 if a tree is infinity with that sign, else `None`."""
    if node == Name(INFINITY):
        return 1
    return -1 if node == Tree("-", (Name(INFINITY),)) else None


def _is_precise(number: Number) -> bool:
    """Return whether a decimal has enough places and digits to be a rounded number."""
    if number.places is None or not _FEWEST_PLACES <= number.places <= _MOST_PLACES:
        return False
    return abs(number.value) * 10**number.places >= 10 ** (_FEWEST_PLACES - 1)


def _rounds_to(node: Node, decimal: Number) -> bool:
    """Return whether a value, rounded or truncated to the decimal's places, equals the decimal."""
    if names(node):
        return False
    places = decimal.places or 0
    if isinstance(node, Number) and node.places is not None and node.places < places:
        return node.value == decimal.value
    value = rational(node)
    if value is None:
        value = numeric(node)
    if value is None or (value < 0) != (decimal.value < 0):
        return False
    shifted = abs(value) * 10**places
    rounded = math.floor(shifted + Fraction(1, 2))
    cut_off = rounded if isinstance(node, Number) else math.floor(shifted)
    return abs(decimal.value) * 10**places in (rounded, cut_off)


def are_equal_values(first: Node, second: Node) -> bool:
    """Return whether two trees are equal for all values of the variables.

    Raises:
        TooLargeError: A number is too large.
        UndefinedError: A tree has no value.
    """
    return is_zero(Tree("+", (first, Tree("-", (second,)))))


def is_zero(node: Node) -> bool:
    """Return whether a tree is zero for all values of the variables.

    Raises:
        TooLargeError: A number is too large.
        UndefinedError: The tree has no value.
    """
    variables = names(node)
    if not variables:
        exact = rational(node)
        return exact == 0 if exact is not None else _vanishes(node, {})
    defined = list[Mapping[str, Fraction]]()
    for point in range(_NUM_POINTS):
        values = {name: coordinate(name, point) for name in variables}
        try:
            if not _vanishes(node, values, is_rough=True):
                return False
        except UndefinedError:
            continue
        defined.append(values)
    is_known = len(defined) >= _NUM_POINTS // 2
    return is_known and all(_vanishes(node, values) for values in defined[:_NUM_PRECISE_POINTS])


def coordinate(name: str, point: int) -> Fraction:
    """Return the value of a variable at one of the comparison points, with a magnitude of 0.2 to 2.2."""
    hashed = zlib.crc32(f"{point} {name}".encode(errors="replace"))
    sign = -1 if point % 4 == 1 or ((hashed >> 8) & 1 and point % 4 == 2) else 1
    return sign * Fraction(hashed % 9973 + 1009, 4999)


def numeric(node: Node) -> Fraction | None:
    """Return a variable-free tree's value to more digits than a decimal has, or `None` if it is not real.

    Raises:
        TooLargeError: A number is too large.
        UndefinedError: The tree has no value.
    """
    context = _Numeric(4 * _FIRST_PRECISION, {})
    value, _ = context.value(node)
    if context.is_complex(value):
        return None
    sign, mantissa, exponent, _ = context.context.re(value)._mpf_
    if exponent > _MAX_PRECISION or exponent < -_MAX_PRECISION:
        raise TooLargeError
    return Fraction(-1 if sign else 1) * int(mantissa) * Fraction(2) ** exponent


def sign_of(node: Node, point: int) -> int:
    """Return the sign of a real tree at one of the comparison points, or 0 if it is unknown.

    Raises:
        TooLargeError: A number is too large.
        UndefinedError: The tree has no real value.
    """
    context = _Numeric(_FIRST_PRECISION, {name: coordinate(name, point) for name in names(node)})
    value, error = context.value(node)
    if context.is_complex(value):
        raise UndefinedError
    value = context.context.re(value)
    return 0 if abs(value) <= error else 1 if value > 0 else -1


def _vanishes(node: Node, values: Mapping[str, Fraction], *, is_rough: bool = False) -> bool:
    """Return whether a tree is zero at a point. Compute roughly first, then to all digits that can matter."""
    precision = _FIRST_PRECISION
    while True:
        context = _Numeric(precision, values)
        value, error = context.value(node)
        if abs(value) > error:
            return False
        needed = 4 * context.largest + _FIRST_PRECISION
        if is_rough or precision >= needed:
            return is_rough or bool(error <= context.context.ldexp(1, -precision // 4))
        if needed > _MAX_PRECISION:
            raise TooLargeError
        precision = needed


class _Numeric:
    """Computes values to a precision in bits, each with an error bound."""

    def __init__(self, precision: int, values: Mapping[str, Fraction]) -> None:
        self.context: Any = MPContext()
        self.context.prec = precision
        self.largest = 0  # bits of the largest number so far, or of the smallest number's inverse
        self._values = values
        self._epsilon = self.context.ldexp(1, 4 - precision)
        self._functions = _functions(self)

    def is_complex(self, value: Any) -> bool:
        """Return whether a value is not real."""
        return isinstance(value, self.context.mpc) and value.imag != 0

    def value(self, node: Node) -> tuple[Any, Any]:
        """Return the value and its error bound."""
        if isinstance(node, Number) and node.value.denominator == 1:
            self.count_bits(node.value.numerator.bit_length())
            return self.of_fraction(node.value), self.context.zero
        value, error = self._compute(node)
        if not self.context.isfinite(value) or not self.context.isfinite(error):
            raise UndefinedError
        error += abs(value) * self._epsilon
        if abs(value) > error:
            self.count(value)
        return value, error

    def count(self, value: Any) -> None:
        """Record the magnitude of an intermediate number.

        Raises:
            TooLargeError: The number is too large or too small.
        """
        self.count_bits(abs(int(self.context.mag(value))))

    def count_bits(self, count: int) -> None:
        """Record the number of bits of a number, like `count`."""
        self.largest = max(self.largest, count)
        if self.largest > _MAX_PRECISION:
            raise TooLargeError

    def of_fraction(self, value: Fraction) -> Any:
        """Return a rational number to the precision."""
        return self.context.mpf(value.numerator) / value.denominator

    def _compute(self, node: Node) -> tuple[Any, Any]:
        context = self.context
        if isinstance(node, Number):
            return self.of_fraction(node.value), context.zero
        if isinstance(node, Name):
            return self._named(node.text), context.zero
        if not names(node) and (exact := rational(node)) is not None:
            self.count_bits(max(exact.numerator.bit_length(), exact.denominator.bit_length()))
            return self.of_fraction(exact), context.zero
        parts = [self.value(part) for part in node.parts]
        values, errors = [value for value, _ in parts], [error for _, error in parts]
        if node.kind == "+":
            rounding = self._epsilon * sum(abs(value) for value in values)
            return context.fsum(values), context.fsum(errors) + rounding
        if node.kind == "-":
            return -values[0], errors[0]
        if node.kind == "*":
            (first, second), (first_error, second_error) = values, errors
            error = abs(first) * second_error + abs(second) * first_error + first_error * second_error
            return first * second, error
        return self._function(node.kind, values, errors)

    def _named(self, text: str) -> Any:
        context = self.context
        if text in CONSTANTS:
            return {r"\pi": +context.pi, "e": +context.e, "i": context.mpc(0, 1)}[text]
        if text not in self._values:
            raise UndefinedError
        return self.of_fraction(self._values[text])

    def _function(self, kind: str, values: list[Any], errors: list[Any]) -> tuple[Any, Any]:
        """Return a function's value. Its error is the change if each argument moves by its error."""
        if kind == "/" and abs(values[1]) <= errors[1] * 4:
            raise UndefinedError
        opaque = partial(_opaque, self, kind) if kind.startswith("call ") else None
        compute = opaque or self._functions.get(kind)
        if compute is None:
            raise UndefinedError
        try:
            value = compute(*values)
            error = self.context.zero
            for place, one in enumerate(errors):
                moved = [*values]
                for shift in (one, -one):
                    moved[place] = values[place] + shift
                    error = max(error, abs(compute(*moved) - value) * len(errors) * 2)
        except (ZeroDivisionError, ValueError, OverflowError, TypeError, NotImplementedError) as problem:
            raise UndefinedError from problem
        return value, error


def _functions(numeric: _Numeric) -> Mapping[str, Callable[..., Any]]:
    """Return the functions of numbers to a precision, by the kind of tree."""
    context = numeric.context

    def require_small(logarithm: Any) -> None:
        if abs(logarithm) > _MAX_PRECISION:
            raise TooLargeError

    def real(number: Any) -> Any:
        if numeric.is_complex(number):
            raise UndefinedError
        return context.re(number)

    def divide(above: Any, below: Any) -> Any:
        return above / below

    def power(base: Any, exponent: Any) -> Any:
        if base == 0 and context.re(exponent) <= 0:
            raise UndefinedError
        require_small(exponent * context.ln(base) if base else 0)
        return context.power(base, exponent)

    def root(base: Any, index: Any) -> Any:
        is_odd = not numeric.is_complex(index) and index == int(index) and int(index) % 2 == 1
        if is_odd and not numeric.is_complex(base) and context.re(base) < 0:
            return -context.power(-base, 1 / index)
        return context.sqrt(base) if index == 2 else context.power(base, 1 / index)

    def bounded(compute: Callable[[Any], Any], number: Any) -> Any:
        require_small(number)
        return compute(number)

    def tanh(number: Any) -> Any:
        """Compute from a power of e. Record its magnitude: the value differs from 1 by its inverse."""
        grown = bounded(context.exp, 2 * number)
        numeric.count(grown)
        return 1 - 2 / (grown + 1)

    def log(number: Any, base: Any = 10) -> Any:
        return context.ln(number) / context.ln(base)

    def largest(*numbers: Any) -> Any:
        return max(map(real, numbers))

    def smallest(*numbers: Any) -> Any:
        return min(map(real, numbers))

    def binomial(upper: Any, lower: Any) -> Any:
        return context.binomial(upper, lower)

    elementary = {kind: getattr(context, kind.replace("arc", "a", 1)) for kind in FUNCTIONS - {"lg", "log"}}
    growing = {kind: partial(bounded, elementary[kind]) for kind in ("exp", "sinh", "cosh", "sech", "csch")}
    others: Mapping[str, Any] = {
        "/": divide,
        "^": power,
        "root": root,
        "factorial": context.factorial,
        "binom": binomial,
        "abs": abs,
        "floor": lambda number: context.floor(real(number)),  # pyright: ignore[reportUnknownLambdaType]
        "ceil": lambda number: context.ceil(real(number)),  # pyright: ignore[reportUnknownLambdaType]
        "max": largest,
        "min": smallest,
        "log": log,
        "lg": log,
        "tanh": tanh,
        "coth": lambda number: 1 / tanh(number),  # pyright: ignore[reportUnknownLambdaType]
    }
    return {**elementary, **growing, **others}


def _opaque(numeric: _Numeric, kind: str, *arguments: Any) -> Any:
    """Return a value of an unknown function, chosen so that no identity holds for it."""
    total = numeric.context.zero
    for place, argument in enumerate(arguments):
        shift = numeric.of_fraction(coordinate(f"{kind} {place}", 0))
        total += numeric.context.cos(argument * shift + shift) + shift * argument * argument
    return total


def _compute_constants() -> None:
    """Compute mpmath's cached constants once, to the maximum number of digits.

    mpmath must not be interrupted while it replaces a constant, or be used by two threads meanwhile.
    """
    context: Any = MPContext()
    context.prec = _MAX_PRECISION * 4 // 3
    for name in ("pi", "e", "ln2", "ln10"):
        _ = +getattr(context, name)


_compute_constants()
