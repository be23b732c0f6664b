"""Compares parts of the real line: intervals, unions of them, inequalities of one variable."""

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction

from megatron_dppo.rewards.math.exact import UndefinedError, rational
from megatron_dppo.rewards.math.tree import BRACKETS, Name, Node, Tree, is_group, is_relation, names
from megatron_dppo.rewards.math.value import INFINITY, are_equal_leaves, infinity_sign, numeric


@dataclass(frozen=True)
class Interval:
    """Interval between two ends, each included or not."""

    start: Node
    end: Node
    is_start_in: bool
    is_end_in: bool


_EVERYTHING = Interval(Tree("-", (Name(INFINITY),)), Name(INFINITY), is_start_in=False, is_end_in=False)


def region(node: Node) -> list[Interval] | None:
    """Return a part of the real line as intervals in order, or `None` if the tree is not one."""
    if node == Name(r"\mathbb{R}"):
        return [_EVERYTHING]
    if not isinstance(node, Tree):
        return None
    if node.kind in BRACKETS and len(node.parts) == 2:
        start, end = node.parts
        closed = node.kind[0] == "[", node.kind[1] == "]"
        is_one = not any(map(is_group, node.parts)) and not (names(start) | names(end)) - {INFINITY}
        return [Interval(start, end, *closed)] if is_one else None
    if node.kind == "cup":
        regions = [region(part) for part in node.parts]
        return _sort([piece for region in regions for piece in region or ()]) if None not in regions else None
    if node.kind == "minus":
        whole, points = node.parts
        if whole == Name(r"\mathbb{R}") and isinstance(points, Tree) and points.kind == "set":
            return _without(list(points.parts))
        return None
    if node.kind == "or":
        lines = {_line(part) for part in node.parts}
        regions = [region(part) for part in node.parts]
        if len(lines) != 1 or None in lines or None in regions:
            return None
        return _sort([piece for region in regions for piece in region or ()])
    return _region_of_relation(node) if _line(node) is not None else None


def _line(node: Node) -> str | None:
    """Return the only variable of an inequality if it is alone on its side, such as in `1 < x < 2`."""
    if not isinstance(node, Tree) or not is_relation(node) or "=" in node.kind.split():
        return None
    variables = [side for side in node.parts if isinstance(side, Name) and side.text != INFINITY]
    others = frozenset[str]().union(*(names(side) for side in node.parts if side not in variables)) - {INFINITY}
    return variables[0].text if len(variables) == 1 and not others and names(variables[0]) else None


def _region_of_relation(node: Tree) -> list[Interval] | None:
    kinds, sides = node.kind.split(), list(node.parts)
    if kinds == ["!="]:
        return _without([side for side in sides if not names(side)])
    if "!=" in kinds or len({kind[0] for kind in kinds}) != 1:
        return None
    if kinds[0][0] == ">":
        kinds, sides = [kind.replace(">", "<") for kind in kinds][::-1], sides[::-1]
    place = next(place for place, side in enumerate(sides) if names(side) - {INFINITY})
    if place > 1 or place < len(sides) - 2:
        return None
    start, end, starts_in, ends_in = _EVERYTHING.start, _EVERYTHING.end, False, False
    if place == 1:
        start, starts_in = sides[0], kinds[0] == "<="
    if place < len(sides) - 1:
        end, ends_in = sides[-1], kinds[-1] == "<="
    return [Interval(start, end, starts_in, ends_in)]


def _without(points: list[Node]) -> list[Interval] | None:
    ordered = _sort([Interval(point, point, is_start_in=True, is_end_in=True) for point in points])
    if ordered is None or not ordered:
        return None
    ends = [_EVERYTHING.start, *(point.start for point in ordered), _EVERYTHING.end]
    return [Interval(start, end, is_start_in=False, is_end_in=False) for start, end in itertools.pairwise(ends)]


def _sort(intervals: list[Interval]) -> list[Interval] | None:
    starts = [_place(interval.start) for interval in intervals]
    if None in starts:
        return None
    order = sorted(range(len(intervals)), key=lambda place: starts[place] or 0)
    return [intervals[place] for place in order]


def _place(node: Node) -> Fraction | float | None:
    sign = infinity_sign(node)
    if sign is not None:
        return math.inf * sign
    try:
        value = rational(node)
        return value if value is not None else numeric(node)
    except UndefinedError:
        return None


def are_equal_regions(expected: list[Interval], found: list[Interval]) -> bool:
    """Return whether two parts of the real line have the same intervals.

    Raises:
        TooLargeError: A number is too large to compute.
    """
    return len(expected) == len(found) and all(
        (one.is_start_in, one.is_end_in) == (other.is_start_in, other.is_end_in)
        and are_equal_leaves(one.start, other.start)
        and are_equal_leaves(one.end, other.end)
        for one, other in zip(expected, found, strict=True)
    )
