"""The tree of an answer (numbers, names, and operators on them), and the tokens that it is parsed from."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Union

Node = Union["Number", "Name", "Tree"]


class NotUnderstoodError(Exception):
    """A text is not an expression, list, set, interval, relation or matrix, or it is ambiguous."""


@dataclass(frozen=True)
class Number:
    """A number, with its count of decimal places if it is a decimal."""

    value: Fraction
    places: int | None = None


@dataclass(frozen=True)
class Name:
    r"""A variable, a constant (`\pi`, `e`, `i`, `\infty`) or a set of numbers (`\mathbb{R}`)."""

    text: str


@dataclass(frozen=True)
class Tree:
    """An operator, a function, a list or a relation, with its operands."""

    kind: str
    parts: tuple[Node, ...]


RELATIONS = {
    "=": "=",
    r"\in": "=",
    r"\approx": "~",
    "<": "<",
    r"\lt": "<",
    ">": ">",
    r"\gt": ">",
    r"\le": "<=",
    r"\leq": "<=",
    r"\leqslant": "<=",
    r"\ge": ">=",
    r"\geq": ">=",
    r"\geqslant": ">=",
    r"\ne": "!=",
    r"\neq": "!=",
}
SETS = frozenset({r"\mathbb{R}", r"\mathbb{Z}", r"\mathbb{N}", r"\mathbb{Q}", r"\mathbb{C}"})
EMPTY = Tree("set", ())
TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
FUNCTIONS = frozenset(
    {
        *TRIGONOMETRIC,
        *(f"arc{name}" for name in TRIGONOMETRIC),
        *(f"{name}h" for name in TRIGONOMETRIC),
        *("ln", "lg", "log", "exp"),
    }
)
OF_MANY = frozenset({"gcd", "lcm", "max", "min"})
ACCENTS = frozenset(
    f"\\{name}"
    for name in (
        *("overline", "bar", "vec", "hat", "widehat", "tilde", "widetilde", "dot", "ddot"),
        *("overrightarrow", "overleftarrow", "mathcal", "mathfrak", "mathscr"),
    )
)
LETTERS = frozenset(
    f"\\{name}"
    for name in (
        *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda"),
        *("mu", "nu", "xi", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"),
        *("Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega"),
        *("infty", "angle", "triangle", "ell", "partial", "prime", "star", "dots"),
    )
)
CONSTANTS = frozenset({r"\pi", "e", "i"})
BRACKETS = frozenset({"()", "[]", "(]", "[)"})
LISTS = frozenset({"list", "or"})
GROUPS = frozenset({*BRACKETS, *LISTS, "set", "matrix", "row", "cup", "cap", "minus"})
_MAX_SIGNS = 4  # maximum plus-minus signs in one item


def negative(node: Node) -> Node:
    """Return a tree with a minus before it."""
    if isinstance(node, Number):
        return Number(-node.value, node.places)
    return Tree("-", (node,))


def with_both_signs(node: Node) -> list[Node]:
    r"""Return an item once for each choice of the signs `\pm`. With `\mp`, all its signs are one choice."""
    kinds = list(_signs(node))
    if not kinds:
        return [node]
    if len(kinds) > _MAX_SIGNS:
        raise NotUnderstoodError
    count = 1 if r"\mp" in kinds else len(kinds)
    choices = [[bool(number >> place & 1) for place in range(count)] for number in range(2**count)]
    return [_apply_signs(node, iter(choice * (len(kinds) // count))) for choice in choices]


def _signs(node: Node) -> Iterator[str]:
    if isinstance(node, Tree):
        if node.kind in (r"\pm", r"\mp"):
            yield node.kind
        for part in node.parts:
            yield from _signs(part)


def _apply_signs(node: Node, choices: Iterator[bool]) -> Node:
    if not isinstance(node, Tree):
        return node
    if node.kind in (r"\pm", r"\mp"):
        is_minus = next(choices) != (node.kind == r"\mp")
        part = _apply_signs(node.parts[0], choices)
        return negative(part) if is_minus else part
    return Tree(node.kind, tuple(_apply_signs(part, choices) for part in node.parts))


def is_relation(node: Node) -> bool:
    """Return whether a tree is an equation, an inequality or a chain of them."""
    return isinstance(node, Tree) and all(kind in RELATIONS.values() for kind in node.kind.split())


def is_inequality(node: Node) -> bool:
    """Return whether a tree is an inequality or a chain of inequalities."""
    return isinstance(node, Tree) and is_relation(node) and not {"=", "~"} & set(node.kind.split())


def is_group(node: Node) -> bool:
    """Return whether a tree is a list, a set, an interval, a union or a matrix, and so not a number."""
    return isinstance(node, Tree) and node.kind in GROUPS


def names(node: Node) -> frozenset[str]:
    """Return the variables of a tree, and its functions with unknown values."""
    if isinstance(node, Name):
        return frozenset() if node.text in CONSTANTS else frozenset({node.text})
    if isinstance(node, Number):
        return frozenset()
    own = {node.kind.removeprefix("call ")} if node.kind.startswith("call ") else set[str]()
    return frozenset(own.union(*(names(part) for part in node.parts)))


def first_factor(node: Node) -> Node:
    """Return the first factor of a product."""
    while isinstance(node, Tree) and node.kind == "*":
        node = node.parts[0]
    return node


_TOKEN = re.compile(r"\s+|\\\\|\\[a-zA-Z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[a-zA-Z]|.", re.DOTALL)
_NUMBER = r"(?:\{([0-9]+)\}|([0-9]))"
_COMBINATIONS = re.compile(rf"\(([0-9]+),([0-9]+)\)|_{_NUMBER}\^{_NUMBER}")
_MAX_TOKENS = 8


class Tokens:
    """Tokens of a text without its spaces, and the position of the next token."""

    def __init__(self, text: str) -> None:
        """Cut a text into tokens: commands, numbers, single letters and other characters."""
        self.tokens = [token for token in _TOKEN.findall(text) if not token.isspace()]
        self.place = 0

    @property
    def next(self) -> str:
        """Next token, or an empty string at the end."""
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    @property
    def last(self) -> str:
        """Token before the next one."""
        return self.tokens[self.place - 1]

    def take(self, token: str | None = None) -> str:
        """Return the next token and advance.

        Raises:
            NotUnderstoodError: The text ends, or the next token is not the expected one.
        """
        found = self.next
        if not found or (token is not None and found != token):
            raise NotUnderstoodError
        self.place += 1
        return found

    def has(self, token: str) -> bool:
        """Take the next token if it equals the given one. Return whether it does."""
        is_next = self.next == token
        self.place += is_next
        return is_next

    def raw_group(self) -> str:
        """Take a group in braces as text, or one token."""
        if not self.has("{"):
            return self.take()
        pieces, depth = list[str](), 1
        while True:
            token = self.take()
            depth += {"{": 1, "}": -1}.get(token, 0)
            if depth == 0:
                return "".join(pieces)
            pieces.append(token)

    def combinations(self) -> tuple[int, int] | None:
        """Take `(10,3)` or `_{10}^{3}` after a C, a number of combinations, and return both numbers."""
        text, end = "", self.place
        while end < len(self.tokens) and end < self.place + _MAX_TOKENS:
            text, end = text + self.tokens[end], end + 1
            if found := _COMBINATIONS.fullmatch(text):
                upper, lower = (int(group) for group in found.groups() if group is not None)
                if upper < lower:
                    return None
                self.place = end
                return upper, lower
        return None

    def starts_new_number(self) -> bool:
        """Return whether the next number is certainly a factor, such as in `2^{3}5^{2}` and `3!4!`."""
        after = self.tokens[self.place + 1] if self.place + 1 < len(self.tokens) else ""
        return (self.last, after) in (("}", "^"), ("!", "!"))

    def has_inverse(self) -> bool:
        """Take `^{-1}` if a bracket follows. Return whether it does: `f^{-1}(x)` is not a power."""
        is_next = self.tokens[self.place : self.place + 6] == ["^", "{", "-", "1", "}", "("]
        self.place += 5 * is_next
        return is_next
