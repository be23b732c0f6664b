"""Compares the trees of two answers: quantities, lists, sets, intervals, relations, matrices, expressions."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_dppo.rewards.math.text import (
    BRACKETS,
    GROUPS,
    LISTS,
    SETS,
    Name,
    Node,
    Number,
    Quantity,
    Tree,
    is_group,
    is_relation,
    names,
    walk,
)
from megatron_dppo.rewards.math.values import (
    INFINITY,
    UndefinedError,
    approximate,
    are_equal_leaves,
    are_proportional,
    infinity_sign,
    rounds_to,
)

_MAX_ITEMS = 60
_HUNDRED = Number(Fraction(100))
_Interval = tuple[Node, Node, bool, bool]  # start, end, and whether each is included
_EVERYTHING: _Interval = (Tree("-", (Name(INFINITY),)), Name(INFINITY), False, False)


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
        if isinstance(name, tuple) or isinstance(other, tuple):
            return self._systems((name, expected), (other, found))
        if name is not None and other is not None:
            if name == other or _is_function_of_x(name, other):
                return self._nodes(expected, found)
            return self._nodes(reference, answer)
        lines = {_line(node) for node in (reference, answer)} - {None}
        if lines and not {each.text for each in (name, other) if isinstance(each, Name)} <= lines:
            return False  # `x > 2` is not `y` in the interval
        if is_relation(reference) and is_relation(answer) and _is_equation(reference) == _is_equation(answer):
            return self._nodes(reference, answer)
        single = [
            isinstance(node, Tree) and node.kind == "set" and len(node.parts) == 1 for node in (expected, found)
        ]
        if single[0] != single[1]:  # `\{2\}` is 2
            expected, found = (
                node.parts[0] if isinstance(node, Tree) and is_single else node
                for node, is_single in zip((expected, found), single, strict=True)
            )
        return self._nodes(expected, found)

    def _named(self, node: Node) -> tuple[Node | tuple[Node, ...] | None, Node]:
        """Return the name and the value of `x = 5`; of a system, its names in order and their values."""
        items = list(node.parts) if isinstance(node, Tree) and node.kind in LISTS else [node]
        if isinstance(node, Tree) and node.kind == "=" and len(node.parts) == 2:
            left, right = node.parts
            if isinstance(left, Tree) and isinstance(right, Tree) and _is_names_of(left, right):
                return _system(left.parts, right.parts)
        found = [self._assignment(item) for item in items]
        if found[0] is None:
            return None, node
        first, values = found[0][0], [each[1] for each in found if each is not None]
        given = [each[0] for each in found if each is not None and each[0] is not None]
        if len(set(given)) == len(found) > 1:
            return _system(given, values)
        if any(each is None and is_relation(item) for each, item in zip(found, items, strict=True)):
            return None, node
        if any(each is not None and each[0] != first for each in found):
            return None, node
        values = [item if each is None else each[1] for each, item in zip(found, items, strict=True)]
        return first, values[0] if len(values) == 1 else Tree("list", tuple(values))

    def _assignment(self, node: Node) -> tuple[Node | None, Node] | None:
        """Return the name and the value of an equation that gives a value; in `2 + 3 = 5` without a name."""
        if not isinstance(node, Tree) or not is_relation(node) or set(node.kind.split()) - {"=", "~"}:
            return None
        sides, relations = list(node.parts), node.kind.split()
        if relations[-1] == "~" and not names(sides[-2]):
            rounded = sides.pop()
            relations.pop()
            if not isinstance(rounded, Number) or not rounds_to(sides[-1], rounded):
                return None
        if "~" in relations[1:]:
            return None
        known = [side for side in sides if not names(side) and not is_group(side)]
        is_name = _is_only_names(sides[0]) and (
            not isinstance(sides[0], Name)
            or not sides[0].text.startswith('"')
            or self.are_known(sides[0].text[1:].split())
        )
        if not is_name and len(known) != len(sides):
            return None
        if not all(self._nodes(known[0], side) for side in known[1:]):
            return None
        return (sides[0] if is_name else None), sides[-1]

    def _systems(self, reference: tuple[object, Node], answer: tuple[object, Node]) -> bool:
        """Compare `x = 2, y = 3` with itself, and with `(2, 3)` and `2, 3`."""
        (name, expected), (other, found) = reference, answer
        if name is not None and other is not None and name != other:
            return False
        kinds = [node.kind if isinstance(node, Tree) else "" for node in (expected, found)]
        if not (isinstance(expected, Tree) and isinstance(found, Tree)) or not {*kinds} <= {"()", "list"}:
            return False
        return self._in_any_order(expected, found) if "list" in kinds else self._in_order(expected, found)

    def _nodes(self, reference: Node, answer: Node) -> bool:
        if reference == answer:
            return True
        if isinstance(reference, Quantity) or isinstance(answer, Quantity):
            return self._quantities(reference, answer)
        expected, found = _region(reference), _region(answer)
        if expected is not None and found is not None:
            lines = _line(reference), _line(answer)  # `x > 2` is `(2,\infty)`, and not `y > 2`
            return (None in lines or lines[0] == lines[1]) and _are_equal_regions(expected, found)
        if is_relation(reference) or is_relation(answer):
            return is_relation(reference) and is_relation(answer) and self._relations(reference, answer)
        kinds = [node.kind if isinstance(node, Tree) else "" for node in (reference, answer)]
        if "clock" in kinds:
            return False  # equal ones are equal as they stand
        if kinds == ["ratio", "ratio"]:
            return _lowest(reference) == _lowest(answer)
        if set(kinds) == {"matrix", "binom"}:  # a column of two numbers looks like `\binom{1}{2}`
            reference, answer = _plain(reference, is_column=True), _plain(answer, is_column=True)
        reference, answer = _plain(reference), _plain(answer)
        if is_group(reference) or is_group(answer):
            return self._groups(reference, answer)
        return are_equal_leaves(reference, answer)

    def _quantities(self, reference: Node, answer: Node) -> bool:
        """Compare values with words, units and marks around them."""
        one, other = (node if isinstance(node, Quantity) else Quantity(node) for node in (reference, answer))
        if not self.are_compatible(one, other):
            return False
        signs = one.mark == "%", other.mark == "%"
        if signs[0] == signs[1]:
            return self._nodes(one.value, other.value)
        if (signs[0] or not _is_below_one(one.value)) and self._nodes(one.value, other.value):
            return True
        if is_group(one.value) or is_group(other.value):
            return False
        expected = Tree("/", (one.value, _HUNDRED)) if signs[0] else one.value
        return self._nodes(expected, Tree("/", (other.value, _HUNDRED)) if signs[1] else other.value)

    def _groups(self, reference: Node, answer: Node) -> bool:
        one, other = (
            node if isinstance(node, Tree) and is_group(node) else Tree("", (node,))
            for node in (reference, answer)
        )
        kinds = ["list" if node.kind == "or" else node.kind for node in (one, other)]
        if kinds[0] in ("cup", "cap") and kinds[0] == kinds[1]:
            one, other = (Tree("set", _flatten(node, kinds[0])) for node in (one, other))
            kinds = ["set", "set"]
        if {*kinds} <= {"list", "set"}:
            return self._in_any_order(one, other, can_repeat="set" in kinds)
        return (kinds[0] == kinds[1] or {*kinds} == {"list", "()"}) and self._in_order(one, other)

    def _in_order(self, expected: Tree, found: Tree) -> bool:
        return len(expected.parts) == len(found.parts) and all(map(self._nodes, expected.parts, found.parts))

    def _in_any_order(self, expected: Tree, found: Tree, *, can_repeat: bool = False) -> bool:
        sizes = len(expected.parts), len(found.parts)
        if max(sizes) > _MAX_ITEMS or (sizes[0] != sizes[1] and (not can_repeat or 0 in sizes)):
            return False
        equal = [[self._nodes(item, other) for other in found.parts] for item in expected.parts]
        if can_repeat:
            return all(map(any, equal)) and all(map(any, zip(*equal, strict=True)))
        left = set(range(sizes[1]))
        for row in equal:
            place = next((place for place in left if row[place]), None)
            if place is None:
                return False
            left.remove(place)
        return True

    def _relations(self, reference: Node, answer: Node) -> bool:
        """Compare equations and inequalities: each difference is a constant times the other's."""
        expected, found = _pairs(reference), _pairs(answer)
        orders = itertools.permutations(found) if len(found) <= 3 else [found]
        return len(expected) == len(found) and any(
            all(map(self._one_relation, expected, order)) for order in orders
        )

    def _one_relation(self, one: Tree, other: Tree) -> bool:
        if one.kind != other.kind:
            return False
        if any(is_group(node) or isinstance(node, Quantity) for side in (one, other) for node in walk(side)):
            return self._in_order(one, other)
        first, second = (Tree("+", (each.parts[0], Tree("-", (each.parts[1],)))) for each in (one, other))
        if INFINITY in names(first) | names(second) or not (names(first) and names(second)):
            return False
        is_equation = one.kind in ("=", "!=")
        sides = (_numerator(each)[0] if is_equation else each for each in (first, second))
        return are_proportional(*sides, is_positive=not is_equation)


def _system(given: Sequence[Node], values: Sequence[Node]) -> tuple[tuple[Node, ...], Node]:
    """Return the names of a system in alphabetical order, and their values."""
    pairs = sorted(zip(given, values, strict=True), key=lambda pair: repr(pair[0]))
    return tuple(name for name, _ in pairs), Tree("()", tuple(value for _, value in pairs))


def _is_names_of(left: Tree, right: Tree) -> bool:
    """Return whether an equation of two tuples names each value, as in `(x,y) = (1,2)`."""
    is_pair = left.kind == right.kind == "()" and len(left.parts) == len(right.parts)
    return is_pair and all(isinstance(part, Name) for part in left.parts)


def _is_equation(node: Node) -> bool:
    return isinstance(node, Tree) and bool({"=", "~"} & set(node.kind.split()))


def _is_function_of_x(name: Node, other: Node) -> bool:
    """Return whether two names both denote a function's value, such as `y` and `f(x)`."""
    calls = [node for node in (name, other) if isinstance(node, Tree) and node.kind.startswith("call ")]
    return len(calls) == 1 and Name("y") in (name, other)


def _is_only_names(node: Node) -> bool:
    r"""Return whether a side is just a name: `x`, `AB`, `f(2)`, `\frac{a}{b}`, `(x,y)`, `\cos A`."""
    if isinstance(node, Name):
        return node.text not in SETS and node.text != INFINITY and bool(names(node))
    if not isinstance(node, Tree) or node.kind.startswith("call "):
        return isinstance(node, Tree)
    if node.kind in GROUPS - {"()"} or node.kind in ("-", "^", "root", "factorial", "binom"):
        return False
    return all(map(_is_only_names, node.parts))


def _is_below_one(node: Node) -> bool:
    """Return whether a number is a fraction of one, so that a per cent sign changes its value."""
    try:
        value = approximate(node)
    except UndefinedError:
        return True
    return value is not None and 0 < abs(value) < 1


def _lowest(ratio: Node) -> tuple[Fraction, ...]:
    values = [part.value for part in walk(ratio) if isinstance(part, Number)]
    total = sum(values) or Fraction(1)
    return tuple(value / total for value in values)


def _plain(node: Node, *, is_column: bool = False) -> Node:
    """Return a ratio as a quotient, and two numbers above each other as a column."""
    if is_column and isinstance(node, Tree) and node.kind == "binom":
        return Tree("matrix", tuple(Tree("row", (part,)) for part in node.parts))
    if isinstance(node, Tree) and node.kind == "ratio" and len(node.parts) == 2:
        return Tree("/", node.parts)
    return node


def _flatten(node: Node, kind: str) -> tuple[Node, ...]:
    if isinstance(node, Tree) and node.kind == kind:
        return tuple(part for side in node.parts for part in _flatten(side, kind))
    return (node,)


def _pairs(node: Node) -> list[Tree]:
    """Return each relation of a chain as `=`, `<`, `<=` or `!=` between two sides."""
    assert isinstance(node, Tree)
    sides = zip(node.kind.split(), node.parts, node.parts[1:], strict=False)
    return [
        Tree(kind.replace(">", "<"), (right, left) if kind[0] == ">" else (left, right))
        for kind, left, right in sides
    ]


def _numerator(node: Node) -> tuple[Node, Node]:
    """Return an expression as numerator and denominator without divisions by variables, if it is rational."""
    one = Number(Fraction(1))
    if not (isinstance(node, Tree) and node.kind in ("+", "-", "*", "/")):
        return node, one
    (above, below), *rest = fractions = [_numerator(part) for part in node.parts]
    if node.kind != "/" and all(each == one for _, each in fractions):
        return node, one
    if node.kind == "-":
        return Tree("-", (above,)), below
    for other, another in rest:
        if node.kind == "+":
            above = Tree("+", (Tree("*", (above, another)), Tree("*", (other, below))))
        else:
            other, another = (other, another) if node.kind == "*" else (another, other)
            above = Tree("*", (above, other))
        below = Tree("*", (below, another))
    return above, below


def _region(node: Node) -> list[_Interval] | None:
    """Return a part of the real line as intervals in order, or `None` if the tree is not one."""
    if node == Name(r"\mathbb{R}"):
        return [_EVERYTHING]
    if not isinstance(node, Tree):
        return None
    if node.kind in BRACKETS and len(node.parts) == 2:
        start, end = node.parts
        is_one = not any(
            is_group(each) or isinstance(each, Quantity) for part in node.parts for each in walk(part)
        )
        is_one = is_one and not (names(start) | names(end)) - {INFINITY}
        return [(start, end, node.kind[0] == "[", node.kind[1] == "]")] if is_one else None
    if node.kind == "setminus":
        whole, points = node.parts
        is_line = whole == Name(r"\mathbb{R}") and isinstance(points, Tree) and points.kind == "set"
        return _without(points.parts) if is_line and isinstance(points, Tree) else None
    if node.kind in ("cup", "or"):
        regions = [_region(part) for part in node.parts]
        if None in regions or (node.kind == "or" and _line(node) is None):
            return None
        return _sorted([piece for region in regions for piece in region or ()])
    return _region_of_relation(node) if _line(node) is not None else None


def _line(node: Node) -> str | None:
    """Return the only variable of inequalities if it is alone on its side, such as in `1 < x < 2`."""
    if isinstance(node, Tree) and node.kind == "or":
        lines = {_line(part) for part in node.parts}
        return lines.pop() if len(lines) == 1 else None
    if not isinstance(node, Tree) or not is_relation(node) or _is_equation(node):
        return None
    variables = [side for side in node.parts if isinstance(side, Name) and names(side) - {INFINITY}]
    others = frozenset[str]().union(*(names(side) for side in node.parts if side not in variables)) - {INFINITY}
    is_plain = not others and not any(isinstance(side, Quantity) for side in node.parts)
    return variables[0].text if len(variables) == 1 and is_plain else None


def _region_of_relation(node: Tree) -> list[_Interval] | None:
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
    start, starts_in = (sides[0], kinds[0] == "<=") if place == 1 else (_EVERYTHING[0], False)
    end, ends_in = (sides[-1], kinds[-1] == "<=") if place < len(sides) - 1 else (_EVERYTHING[1], False)
    return [(start, end, starts_in, ends_in)]


def _without(points: Sequence[Node]) -> list[_Interval] | None:
    ordered = _sorted([(point, point, True, True) for point in points])
    if not ordered:
        return None
    ends = [_EVERYTHING[0], *(point[0] for point in ordered), _EVERYTHING[1]]
    return [(start, end, False, False) for start, end in itertools.pairwise(ends)]


def _sorted(intervals: list[_Interval]) -> list[_Interval] | None:
    starts = [_place(start) for start, *_ in intervals]
    if None in starts:
        return None
    return [intervals[place] for place in sorted(range(len(intervals)), key=lambda place: starts[place] or 0)]


def _place(node: Node) -> Fraction | float | None:
    sign = infinity_sign(node)
    try:
        return approximate(node) if sign is None else math.inf * sign
    except UndefinedError:
        return None


def _are_equal_regions(expected: list[_Interval], found: list[_Interval]) -> bool:
    return len(expected) == len(found) and all(
        one[2:] == other[2:] and are_equal_leaves(one[0], other[0]) and are_equal_leaves(one[1], other[1])
        for one, other in zip(expected, found, strict=True)
    )
