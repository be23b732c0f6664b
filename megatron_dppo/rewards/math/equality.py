"""Compares the trees of two answers: quantities, lists, sets, intervals, relations, matrices, expressions."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_dppo.rewards.math.text import BRACKETS, GROUPS, LISTS, Name, Node, Number, Quantity, Tree
from megatron_dppo.rewards.math.values import UndefinedError, approximate, are_equal, is_multiple, rounds_to

_MAX_ITEMS = 60
_HUNDRED = Number(Fraction(100))
_EVERYTHING = Tree("()", (Tree("-", (Name(r"\infty"),)), Name(r"\infty")))
_Points = set[float]
_OPERATIONS: dict[str, Callable[..., _Points]] = {"or": _Points.union, "cup": _Points.union}
_OPERATIONS.update({"cap": _Points.intersection, "setminus": _Points.difference})
_REGIONS = BRACKETS.union(_OPERATIONS)


@dataclass(frozen=True)
class Comparison:
    """Compares the trees of a reference answer and of a response's answer.

    Args:
        are_known: Whether words occur in the problem or may stand anywhere.
        are_compatible: Whether what is around two values is equal, or may be left out.
    """

    are_known: Callable[[Sequence[str]], bool]
    are_compatible: Callable[[Quantity, Quantity], bool]

    def answers(self, reference: Node, answer: Node) -> bool:
        """Return whether an answer equals the reference: a value may have a name, and a system be a tuple.

        Raises:
            TooLargeError: A number is too large to compute, or the comparison takes too long.
        """
        (name, expected), (other, found) = self._named(reference), self._named(answer)
        are_named = name is not None and other is not None
        if "system" in {each.kind for each in (name, other) if each}:  # `x = 2, y = 3` is `(2, 3)` and `2, 3`
            kinds = {expected.kind, found.kind}
            if not kinds <= {"()", "list"} or (are_named and name != other):
                return False
            return (self._in_any_order if "list" in kinds else self._in_order)(expected, found)
        is_of_x = Name("y") in (name, other) and "call " in {each.kind[:5] for each in (name, other) if each}
        if are_named and (name == other or is_of_x):  # `y` and `f(x)` both are a function's value
            return self._nodes(expected, found)
        lines = {_line(reference), _line(answer)} - {None}
        if lines and not {each.text for each in (name, other) if isinstance(each, Name)} <= lines:
            return False  # `x > 2` is not `y` in the interval
        are_relations = reference.is_relation and answer.is_relation
        if are_named or (are_relations and _is_equation(reference) == _is_equation(answer)):
            return self._nodes(reference, answer)
        values = expected, found  # `\{2\}` is 2
        sides = [each.parts[0] if each.kind == "set" and len(each.parts) == 1 else each for each in values]
        return self._nodes(*sides)

    def _named(self, node: Node) -> tuple[Node | None, Node]:
        """Return the name and the value of `x = 5`; of a system, its names in order and their values."""
        left, right = node.parts if node.kind == "=" and len(node.parts) == 2 else (Node(), Node())
        is_row = left.kind == right.kind == "()" and all(isinstance(each, Name) for each in left.parts)
        if is_row and len(left.parts) == len(right.parts):
            return _system(zip(left.parts, right.parts, strict=True))
        items = node.parts if node.kind in LISTS else (node,)
        found = [self._assignment(item) for item in items]
        pairs = [pair for pair in found if pair is not None]
        given = {name for name, _ in pairs}
        if len(given - {None}) == len(items) > 1:
            return _system(pairs)
        is_mixed = any(pair is None and item.is_relation for pair, item in zip(found, items, strict=True))
        if found[0] is None or len(given) > 1 or is_mixed:
            return None, node
        values = [item if pair is None else pair[1] for pair, item in zip(found, items, strict=True)]
        return found[0][0], values[0] if len(values) == 1 else Tree("list", tuple(values))

    def _assignment(self, node: Node) -> tuple[Node | None, Node] | None:
        """Return the name and the value of an equation that gives a value; in `2 + 3 = 5` without a name."""
        sides, relations = list(node.parts), node.kind.split()
        if not node.is_relation or set(relations) - {"=", "~"}:
            return None
        if relations[-1] == "~" and not sides[-2].names:
            rounded = sides.pop()
            relations.pop()
            if not isinstance(rounded, Number) or not rounds_to(sides[-1], rounded):
                return None
        first = sides[0]
        words = first.text[1:] if isinstance(first, Name) and first.text.startswith('"') else ""
        is_name = _is_only_names(first) and self.are_known(words.split())
        known = [side for side in sides if not side.names and not side.is_group]
        if "~" in relations[1:] or (not is_name and len(known) != len(sides)):
            return None
        if not all(self._nodes(known[0], side) for side in known[1:]):
            return None
        return (first if is_name else None), sides[-1]

    def _nodes(self, reference: Node, answer: Node) -> bool:
        if reference == answer:
            return True
        if isinstance(reference, Quantity) or isinstance(answer, Quantity):
            return self._quantities(reference, answer)
        is_same_region = _are_equal_regions(reference, answer)
        if is_same_region is not None:
            return is_same_region
        if reference.is_relation or answer.is_relation:
            return reference.is_relation and answer.is_relation and self._relations(reference, answer)
        if reference.is_group or answer.is_group:
            return self._groups(reference, answer)
        return are_equal(reference, answer)

    def _quantities(self, reference: Node, answer: Node) -> bool:
        """Compare values with words, units and marks around them."""
        one, other = (node if isinstance(node, Quantity) else Quantity(node) for node in (reference, answer))
        if not self.are_compatible(one, other):
            return False
        is_percent = [each.mark == "%" for each in (one, other)]
        size = approximate(one.value) if is_percent == [False, True] else Fraction(1)
        # a sign behind a fraction of one changes the value, otherwise it may be left out
        if size is not None and not 0 < abs(size) < 1 and self._nodes(one.value, other.value):
            return True
        if is_percent[0] == is_percent[1] or one.value.is_group or other.value.is_group:
            return False
        values = [
            Tree("/", (each.value, _HUNDRED)) if each.mark == "%" else each.value for each in (one, other)
        ]
        return self._nodes(*values)

    def _groups(self, reference: Node, answer: Node) -> bool:
        nodes = reference, answer
        one, other = (node if node.is_group or node.kind == "binom" else Tree("", (node,)) for node in nodes)
        kinds = {"list" if node.kind == "or" else node.kind for node in (one, other)}
        if kinds <= {"list", "set"} or kinds in ({"cup"}, {"cap"}):
            return self._in_any_order(one, other, can_repeat=kinds != {"list"})
        # two numbers above each other, as in `\\binom{1}{2}`, may be a column
        are_similar = len(kinds) == 1 or kinds in ({"list", "()"}, {"matrix", "binom"}, {"row", ""})
        return are_similar and self._in_order(one, other)

    def _in_order(self, expected: Node, found: Node) -> bool:
        return len(expected.parts) == len(found.parts) and all(map(self._nodes, expected.parts, found.parts))

    def _in_any_order(self, expected: Node, found: Node, *, can_repeat: bool = False) -> bool:
        sizes = len(expected.parts), len(found.parts)
        if max(sizes) > _MAX_ITEMS or 0 in sizes or (sizes[0] != sizes[1] and not can_repeat):
            return sizes == (0, 0)
        equal = [[self._nodes(item, other) for other in found.parts] for item in expected.parts]
        rows, columns = ([sum(line) for line in lines] for lines in (equal, zip(*equal, strict=True)))
        # items that are equal to each other are as many on both sides
        are_as_many = all(
            rows[i] == columns[j] for i in range(sizes[0]) for j in range(sizes[1]) if equal[i][j]
        )
        return all(rows) and all(columns) and (can_repeat or are_as_many)

    def _relations(self, reference: Node, answer: Node) -> bool:
        """Compare equations and inequalities: each difference is a constant times the other's."""
        expected, found = _pairs(reference), _pairs(answer)
        if len(expected) > 1 or len(found) > 1:
            return self._in_any_order(Tree("list", (*expected,)), Tree("list", (*found,)))
        one, other = expected[0], found[0]
        if any(node.is_group or isinstance(node, Quantity) for side in (one, other) for node in side.walk()):
            return one.kind == other.kind and self._in_order(one, other)
        is_equation = one.kind in ("=", "!=")
        first, second = (_difference(each, is_equation=is_equation) for each in (one, other))
        are_comparable = one.kind == other.kind and first.names and second.names
        return bool(are_comparable) and is_multiple(first, second, is_positive=not is_equation)


def _system(pairs: Iterable[tuple[Node | None, Node]]) -> tuple[Node, Node]:
    """Return the names of a system in alphabetical order, and their values."""
    given = sorted(((name, value) for name, value in pairs if name is not None), key=lambda pair: repr(pair[0]))
    return Tree("system", tuple(name for name, _ in given)), Tree("()", tuple(value for _, value in given))


def _is_equation(node: Node) -> bool:
    return bool({"=", "~"} & set(node.kind.split()))


def _is_only_names(node: Node) -> bool:
    r"""Return whether a side is just a name: `x`, `AB`, `f(2)`, `\frac{a}{b}`, `(x,y)`, `\cos A`."""
    if isinstance(node, Name):
        return bool(node.names)
    if node.kind.startswith("call "):
        return True
    is_value = node.kind in GROUPS - {"()"} or node.kind in ("", "-", "^", "root", "factorial", "binom")
    return not is_value and all(map(_is_only_names, node.parts))


def _pairs(node: Node) -> list[Node]:
    """Return each relation of a chain as `=`, `<`, `<=` or `!=` between two sides."""
    return [
        Tree(kind.replace(">", "<"), (right, left) if kind[0] == ">" else (left, right))
        for kind, (left, right) in zip(node.kind.split(), itertools.pairwise(node.parts), strict=True)
    ]


def _difference(relation: Node, *, is_equation: bool) -> Node:
    """Return the difference of two sides; of an equation, multiplied by all its denominators with variables."""
    difference: Node = Tree("+", (relation.parts[0], Tree("-", (relation.parts[1],))))
    for node in difference.walk() if is_equation else ():
        if node.kind == "/" and node.parts[1].names:
            difference = Tree("*", (difference, node.parts[1]))
    return difference


# Parts of the real line: intervals, inequalities of one variable, and unions of them


def _line(node: Node) -> str | None:
    """Return the only variable of inequalities if it is alone on its side, such as in `1 < x < 2`."""
    if node.kind == "or":
        lines = {_line(part) for part in node.parts}
        return lines.pop() if len(lines) == 1 else None
    if not node.is_relation or _is_equation(node):
        return None
    variables = [side.text for side in node.parts if isinstance(side, Name) and side.names]
    return variables[0] if len(variables) == 1 else None


def _are_equal_regions(reference: Node, answer: Node) -> bool | None:
    """Return whether two parts of the real line have the same points, or `None` if they are not two such parts.

    The ends of all intervals, and a point on each side of every end, represent all points.
    """
    kinds, lines = {reference.kind, answer.kind}, {_line(reference), _line(answer)} - {None}
    if len(lines) > 1 or not (lines or kinds & _REGIONS) or "set" in kinds or kinds <= BRACKETS:
        return None  # `x > 2` is not `y > 2`, and two sets or two intervals are compared by their items
    line, places, ranks = lines.pop() if lines else None, dict[Node, Fraction | float](), dict[Node, float]()

    def found_end(end: Node) -> float:
        infinity = math.inf if isinstance(end, Name) else -math.inf
        place = infinity if end in _EVERYTHING.parts else approximate(end)
        if place is None:
            raise UndefinedError
        places[end] = place
        return 0.0

    try:
        for node in (reference, answer):
            _points_in(node, line, (), found_end)
    except UndefinedError:
        return None
    rank, before = 0, None
    for end, place in sorted(places.items(), key=lambda item: item[1]):
        rank += 2 * (before is None or not are_equal(before, end))
        ranks[end], before = (place if isinstance(place, float) else rank), end
    points = -math.inf, *range(1, rank + 2), math.inf
    one, other = (_points_in(node, line, points, ranks.__getitem__) for node in (reference, answer))
    return one == other if one & other else None  # `(3,1)` is a point, and no empty interval


def _points_in(
    node: Node, line: str | None, points: Sequence[float], place: Callable[[Node], float]
) -> _Points:
    """Return which points are in a part of the real line, or raise `UndefinedError` if a tree is no such part.

    Inequalities are of the variable `line`, and `place` returns the point at an end.
    """
    if node == Name(r"\mathbb{R}"):
        node = _EVERYTHING
    if node.kind in BRACKETS and len(node.parts) == 2:
        start, end = ends = [place(end) for end in node.parts]
        open_ends = {end for end, bracket in zip(ends, node.kind, strict=True) if bracket in "()"}
        return {point for point in points if start <= point <= end} - open_ends
    if node.kind == "set":
        return {place(end) for end in node.parts}
    if node.kind in _OPERATIONS:
        return _OPERATIONS[node.kind](*[_points_in(part, line, points, place) for part in node.parts])
    if line is None or not node.is_relation or _is_equation(node):
        raise UndefinedError
    found = _points_in(_EVERYTHING, line, points, place)
    for pair in _pairs(node):
        left, right = pair.parts
        if Name(line) not in (left, right):
            raise UndefinedError
        end = place(right if left == Name(line) else left)
        beyond = {point for point in points if (point > end if left == Name(line) else point < end)}
        found -= {end} if pair.kind == "!=" else beyond if pair.kind == "<=" else beyond | {end}
    return found
