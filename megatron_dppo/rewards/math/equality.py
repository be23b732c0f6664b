"""Compares the trees of two answers: numbers, expressions, lists, sets, intervals, relations, matrices."""

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

from megatron_dppo.rewards.math.exact import UndefinedError
from megatron_dppo.rewards.math.regions import are_equal_regions, region
from megatron_dppo.rewards.math.tree import (
    GROUPS,
    LISTS,
    SETS,
    Name,
    Node,
    Number,
    Tree,
    is_group,
    is_inequality,
    is_relation,
    names,
)
from megatron_dppo.rewards.math.value import INFINITY, are_equal_leaves, is_zero, numeric, sign_of

_MAX_ITEMS = 60


def are_equal_trees(reference: Node, answer: Node) -> bool:
    """Return whether an answer equals the reference.

    Raises:
        TooLargeError: A number is too large to compute.
    """
    answer = _with_case_of(reference, answer)
    if reference == answer:
        return True
    (name, expected), (other, found) = _split_name(reference), _split_name(answer)
    if name is not None and other is not None and _are_equal(name, other) and _are_equal(expected, found):
        return True
    if name is not None and other is not None and _are_names_of_functions(name, other):
        return _are_equal(expected, found)
    if is_inequality(reference) != is_inequality(answer):  # `x > 2` is `x \in (2, \infty)`
        return _are_equal(expected, found)
    if (name is not None and other is not None) or (is_relation(reference) and is_relation(answer)):
        return _are_equal(reference, answer)
    return _are_equal(*_without_braces(expected, found))


def _are_names_of_functions(name: Node, other: Node) -> bool:
    """Return whether two names both denote a function's value, such as `y` and `f(x)`."""
    calls = [node for node in (name, other) if isinstance(node, Tree) and node.kind.startswith("call ")]
    return len(calls) == 1 and Name("y") in (name, other)


def _without_braces(reference: Node, answer: Node) -> tuple[Node, Node]:
    """Return both trees. If only one is a set of one element, return its element instead."""
    is_single = [
        isinstance(node, Tree) and node.kind == "set" and len(node.parts) == 1 for node in (reference, answer)
    ]
    if is_single[0] == is_single[1]:
        return reference, answer
    one, other = (
        node.parts[0] if isinstance(node, Tree) and single else node
        for node, single in zip((reference, answer), is_single, strict=True)
    )
    return one, other


def _with_case_of(reference: Node, answer: Node) -> Node:
    """Return the answer with the reference's letters, if they differ only in upper and lower case."""
    wanted, found = names(reference), names(answer)
    folded = {name.casefold(): name for name in wanted}
    if len(folded) != len(wanted) or {name.casefold() for name in found} != folded.keys() or wanted == found:
        return answer
    if len(found) != len(folded):
        return answer
    return _rename(answer, lambda name: folded.get(name.casefold(), name))


def _rename(node: Node, rename: Callable[[str], str]) -> Node:
    if isinstance(node, Name):
        return Name(rename(node.text)) if names(node) else node
    if isinstance(node, Number):
        return node
    kind = f"call {rename(node.kind[5:])}" if node.kind.startswith("call ") else node.kind
    return Tree(kind, tuple(_rename(part, rename) for part in node.parts))


# Names: `x = 5` is 5, and `x = 1, x = 2` is 1, 2


def _split_name(node: Node) -> tuple[Node | None, Node]:
    """Split `x = 5` into the name and the value. `None` means no name or several names."""
    items = node.parts if isinstance(node, Tree) and node.kind in LISTS else (node,)
    found = [_assignment(item) for item in items]
    first = found[0]
    if first is None:
        return None, node
    values = list[Node]()
    for item, assignment in zip(items, found, strict=True):
        if assignment is None and is_relation(item):
            return None, node
        if assignment is not None and assignment[0] != first[0]:
            return None, node
        values.append(item if assignment is None else assignment[1])
    value = values[0] if len(values) == 1 else Tree("list", tuple(values))
    return first[0], value


def _assignment(node: Node) -> tuple[Node | None, Node] | None:
    """Return the name and the value of an equation that gives a value. In `2 + 3 = 5` the name is `None`."""
    if not isinstance(node, Tree) or set(node.kind.removesuffix("~").split()) - {"="} or not is_relation(node):
        return None
    sides = node.parts
    if node.kind.endswith("~") and not names(sides[-2]) and not is_group(sides[-2]):
        if not _are_close(*sides[-2:]):
            return None
        sides = sides[:-1]
    value = sides[-1]
    is_name = _is_only_names(sides[0])
    known = [side for side in sides if not names(side) and not is_group(side)]
    if not is_name and len(known) != len(sides):
        return None
    if not all(are_equal_leaves(known[0], side) for side in known[1:]):
        return None
    return (sides[0] if is_name else None), value


def _are_close(exact: Node, rounded: Node) -> bool:
    try:
        values = numeric(exact), numeric(rounded)
    except UndefinedError:
        return False
    value, other = values
    return value is not None and other is not None and abs(value - other) <= abs(value) / 100


def _is_only_names(node: Node) -> bool:
    r"""Return whether a side is just a name: `x`, `AB`, `f(2)`, `\frac{a}{b}`, `(x,y)`, `\cos A`."""
    if isinstance(node, Name):
        return node.text not in SETS and node.text != INFINITY and bool(names(node))
    if isinstance(node, Number):
        return False
    if node.kind.startswith("call "):
        return True
    if node.kind in GROUPS - {"()"} or node.kind in ("-", "^", "root", "factorial", "binom"):
        return False
    return all(map(_is_only_names, node.parts))


# Anything


def _are_equal(reference: Node, answer: Node) -> bool:
    if reference == answer:
        return True
    if is_relation(reference) and is_relation(answer):
        return _are_equal_relations(reference, answer)
    expected, found = region(reference), region(answer)
    if expected is not None and found is not None:
        return are_equal_regions(expected, found)
    if is_relation(reference) or is_relation(answer):
        return False
    if isinstance(reference, Tree) and isinstance(answer, Tree):
        kinds = {reference.kind, answer.kind}
        if kinds == {"matrix", "binom"}:
            return _are_equal_columns(reference, answer)
    if is_group(reference) or is_group(answer):
        return _are_equal_groups(reference, answer)
    return are_equal_leaves(reference, answer)


def _are_equal_columns(reference: Tree, answer: Tree) -> bool:
    r"""Compare a column of two numbers with `\binom{1}{2}`, which looks like it."""
    columns = [
        [entry for row in node.parts for entry in (row.parts if isinstance(row, Tree) else ())]
        if node.kind == "matrix"
        else list(node.parts)
        for node in (reference, answer)
    ]
    matrix = reference if reference.kind == "matrix" else answer
    return len(matrix.parts) == 2 and _are_equal_in_order(*columns)


def _are_equal_groups(reference: Node, answer: Node) -> bool:
    kinds = [
        node.kind if isinstance(node, Tree) and node.kind in GROUPS else "" for node in (reference, answer)
    ]
    kinds = ["list" if kind == "or" else kind for kind in kinds]
    expected, found = (
        list(node.parts) if isinstance(node, Tree) and node.kind in GROUPS else [node]
        for node in (reference, answer)
    )
    if kinds[0] == kinds[1]:
        if kinds[0] in ("list", "set"):
            return _are_equal_in_any_order(expected, found, can_repeat=kinds[0] == "set")
        if kinds[0] in ("cup", "cap"):
            parts = (_flatten(node, kinds[0]) for node in (reference, answer))
            return _are_equal_in_any_order(*parts, can_repeat=True)
        return _are_equal_in_order(expected, found)
    if set(kinds) == {"list", "set"}:
        return _are_equal_in_any_order(expected, found, can_repeat=True)
    return set(kinds) == {"list", "()"} and _are_equal_in_order(expected, found)


def _flatten(node: Node, kind: str) -> list[Node]:
    if isinstance(node, Tree) and node.kind == kind:
        return [part for side in node.parts for part in _flatten(side, kind)]
    return [node]


def _are_equal_in_order(expected: Sequence[Node], found: Sequence[Node]) -> bool:
    return len(expected) == len(found) and all(map(_are_equal, expected, found))


def _are_equal_in_any_order(expected: Sequence[Node], found: Sequence[Node], *, can_repeat: bool) -> bool:
    if max(len(expected), len(found)) > _MAX_ITEMS or (len(expected) != len(found) and not can_repeat):
        return False
    if not (expected and found):
        return not (expected or found)
    equal = [[_are_equal(item, other) for other in found] for item in expected]
    if can_repeat:
        return all(map(any, equal)) and all(map(any, zip(*equal, strict=True)))
    left = set(range(len(found)))
    for row in equal:
        place = next((place for place in left if row[place]), None)
        if place is None:
            return False
        left.remove(place)
    return True


# Equations and inequalities


def _are_equal_relations(reference: Node, answer: Node) -> bool:
    expected, found = _differences(reference), _differences(answer)
    if len(expected) != len(found):
        return False
    return any(
        all(
            one[0] == other[0] and _are_proportional(one, other)
            for one, other in zip(expected, order, strict=True)
        )
        for order in (itertools.permutations(found) if len(found) <= 3 else [found])
    )


def _differences(node: Node) -> list[tuple[str, Node]]:
    """Return each relation of a chain as `=`, `<`, `<=` or `!=`, and the difference compared with zero."""
    if not isinstance(node, Tree):
        return []
    found = list[tuple[str, Node]]()
    for kind, left, right in zip(node.kind.split(), node.parts, node.parts[1:], strict=False):
        if kind.startswith(">"):
            left, right = right, left
        found.append((kind.replace(">", "<"), Tree("+", (left, Tree("-", (right,))))))
    return found


def _are_proportional(reference: tuple[str, Node], answer: tuple[str, Node]) -> bool:
    """Return whether one difference is a constant times the other. In an inequality it must be positive."""
    (kind, first), (_, second) = reference, answer
    if any(is_group(node) for side in (first, second) for node in _all(side)):
        return _are_same_sides(first, second)
    if INFINITY in names(first) | names(second) or not (names(first) and names(second)):
        return False
    if kind in ("=", "!="):
        first, second = _numerator(first)[0], _numerator(second)[0]

    def moved(node: Node) -> Node:
        return _rename(node, lambda name: f"{name}, moved")

    try:
        crossed = Tree("*", (first, moved(second))), Tree("-", (Tree("*", (moved(first), second)),))
        if is_zero(first) or is_zero(second) or not is_zero(Tree("+", crossed)):
            return False
        return kind in ("=", "!=") or _have_one_sign(first, second)
    except UndefinedError:
        return False


def _have_one_sign(first: Node, second: Node) -> bool:
    signs = list[int]()
    for point in range(8):
        try:
            signs.append(sign_of(Tree("*", (first, second)), point))
        except UndefinedError:
            continue
    return bool(signs) and set(signs) == {1}


def _are_same_sides(first: Node, second: Node) -> bool:
    """Compare the left sides and the right sides of equations between groups, such as `(x,y) = (1,2)`."""
    if not (isinstance(first, Tree) and isinstance(second, Tree)):
        return False
    (left, right), (other, another) = first.parts, second.parts
    return _are_equal(left, other) and _are_equal(right, another)


def _all(node: Node) -> list[Node]:
    return [node, *(below for part in node.parts for below in _all(part))] if isinstance(node, Tree) else [node]


def _numerator(node: Node) -> tuple[Node, Node]:
    """Return an expression as numerator and denominator without divisions by variables, if it is rational."""
    one = Number(Fraction(1))
    if isinstance(node, Tree) and node.kind in ("+", "-", "*", "/"):
        fractions = [_numerator(part) for part in node.parts]
        if all(below == one for _, below in fractions) and node.kind != "/":
            return node, one
        (above, below), *rest = fractions
        if node.kind == "-":
            return Tree("-", (above,)), below
        for other_above, other_below in rest:
            if node.kind == "+":
                above = Tree("+", (Tree("*", (above, other_below)), Tree("*", (other_above, below))))
            else:
                pair = (other_above, other_below) if node.kind == "*" else (other_below, other_above)
                above, other_below = Tree("*", (above, pair[0])), pair[1]
            below = Tree("*", (below, other_below))
        return above, below
    return node, one
