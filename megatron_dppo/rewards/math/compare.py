"""Compares the values of answers. Importing it loads mpmath, so only the worker of `math` imports it."""

import threading
from fractions import Fraction
from functools import lru_cache

from megatron_dppo.rewards.math.equality import are_equal_trees
from megatron_dppo.rewards.math.exact import TooLargeError, UndefinedError, rational
from megatron_dppo.rewards.math.parser import parsed
from megatron_dppo.rewards.math.time_limit import OutOfTimeError, within
from megatron_dppo.rewards.math.tree import Node, NotUnderstoodError, Number, Tree

_MAX_CPU_S = 1.0
_ONE_AT_A_TIME = threading.Lock()  # for threads: mpmath caches numbers


class TooHardError(Exception):
    """Two answers could not be compared within the limits of time and digits."""


def are_equal(reference: str, answer: str, *, per_cents: tuple[bool, bool] = (False, False)) -> bool:
    r"""Return whether two answers, without words and units, are equal. Any thread may call it.

    Args:
        reference: Tidy reference answer.
        answer: Tidy answer of the response.
        per_cents: Whether the reference and the answer had a per cent sign.

    Raises:
        TooHardError: Computing took more than a second, or a number has too many digits.
    """
    try:
        with _ONE_AT_A_TIME:
            return within(_MAX_CPU_S, lambda: _compare(reference, answer, per_cents))
    except (OutOfTimeError, TooLargeError, RecursionError):
        raise TooHardError from None


def _compare(reference: str, answer: str, per_cents: tuple[bool, bool]) -> bool:
    expected, found = _parsed(reference), _tree(answer)
    if expected is None or found is None:
        return False
    if per_cents[0] == per_cents[1]:
        return are_equal_trees(expected, found)
    if (per_cents[0] or not _is_below_one(expected)) and are_equal_trees(expected, found):
        return True
    if per_cents[0]:
        return are_equal_trees(_hundredth(expected), found)
    return are_equal_trees(expected, _hundredth(found))


def _is_below_one(node: Node) -> bool:
    """Return whether a number is a fraction of one, so that a per cent sign changes its value."""
    try:
        value = rational(node)
    except UndefinedError:
        return True
    return value is not None and 0 < abs(value) < 1


def _hundredth(node: Node) -> Node:
    """Return each value of a tree divided by a hundred."""
    if isinstance(node, Number):
        return Number(node.value / 100, None if node.places is None else node.places + 2)
    if isinstance(node, Tree) and node.kind in ("list", "or", "()", "[]", "(]", "[)", "set"):
        return Tree(node.kind, tuple(map(_hundredth, node.parts)))
    return Tree("/", (node, Number(Fraction(100))))


def _tree(text: str) -> Node | None:
    try:
        return parsed(text)
    except NotUnderstoodError:
        return None


_parsed = lru_cache(maxsize=256)(_tree)  # all responses to a prompt share the reference
