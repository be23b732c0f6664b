"""Compares two numbers or expressions. A decimal number of six places or more stands for what it rounds."""

import math
from fractions import Fraction

from megatron_dppo.rewards.answer_exact import UndefinedError, rational
from megatron_dppo.rewards.answer_tree import SETS, Name, Node, Number, Tree, names
from megatron_dppo.rewards.answer_value import are_equal_values, numeric

INFINITY = r"\infty"
_NO_NUMBERS = frozenset({INFINITY, r"\dots", *SETS})
_FEWEST_PLACES = 6  # and as few digits after leading zeros
_MOST_PLACES = 100


def are_equal_leaves(reference: Node, answer: Node) -> bool:
    """Return whether two numbers or expressions are equal, whatever their variables are.

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
    """Return 1 or -1 if a tree is infinity with that sign; else none."""
    if node == Name(INFINITY):
        return 1
    return -1 if node == Tree("-", (Name(INFINITY),)) else None


def _is_precise(number: Number) -> bool:
    """Whether a decimal has so many places and digits that it may be a rounded one."""
    if number.places is None or not _FEWEST_PLACES <= number.places <= _MOST_PLACES:
        return False
    return abs(number.value) * 10**number.places >= 10 ** (_FEWEST_PLACES - 1)


def _rounds_to(node: Node, decimal: Number) -> bool:
    """Whether a value, rounded or cut off after as many places, is the decimal."""
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
