"""Decides which answers are small enough to compute.

Python cannot be interrupted within one operation, and `9^{9^{9^9}}` and `(9!)!` are single operations.
"""

import math
import re

MAX_LENGTH = 1000  # characters
_MAX_DEPTH = 12  # of brackets
_MAX_EXPONENT = 10_000
_MAX_FACTORIAL = 1_000
_OPENERS = {"(": ")", "[": "]", "{": "}"}
_CLOSERS = frozenset(_OPENERS.values())
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_SIGNS = re.compile(r"[ +-]*")
_ATOM = re.compile(r"(?P<command>\\[a-zA-Z]+)|\d+(?:\.\d+)?|[a-zA-Z]")
_SUBSCRIPT = re.compile(r"_\s*(?:\{[^{}]*\}|\w)")
_GROWS = re.compile(r"!|binom|choose")  # makes larger numbers than sums and products do
_POWER = re.compile(r"\^|\*\*|\\uparrow")


def is_small(text: str) -> bool:
    """Return whether an answer has no astronomic power or factorial, and is neither too long nor too deep."""
    if len(text) > MAX_LENGTH:
        return False
    text = _SUBSCRIPT.sub("", text.replace(r"\left", "").replace(r"\right", ""))
    groups = _groups(text)
    if groups is None:
        return False
    return _has_small_powers(text, groups) and _has_small_factorials(text, groups)


def _groups(text: str) -> dict[int, int] | None:
    """Return the position of each bracket's partner, or `None` if brackets nest too deep.

    The kinds of brackets do not matter: `[0,1)` is a pair.
    """
    partners: dict[int, int] = {}
    opened: list[int] = []
    for place, character in enumerate(text):
        if character in _OPENERS:
            opened.append(place)
            if len(opened) > _MAX_DEPTH:
                return None
        elif character in _CLOSERS and opened:
            start = opened.pop()
            partners[start], partners[place] = place, start
    return partners


def _has_small_powers(text: str, groups: dict[int, int]) -> bool:
    """Return whether all powers are small. Exponents of nested powers multiply."""
    of_groups, of_others = 1.0, 1.0
    for power in _POWER.finditer(text):
        end = _end_of_operand(text, power.end(), groups)
        exponent = text[power.end() : end]
        size = _size(exponent)
        goes_on = size > 1.0 and text[end:].lstrip().startswith(("^", "**", "!"))
        if size > _MAX_EXPONENT or _GROWS.search(exponent) or goes_on:
            return False
        if text[: power.start()].rstrip()[-1:] in _CLOSERS:
            of_groups *= max(size, 1.0)
        else:
            of_others = max(of_others, size)
    return of_groups * of_others <= _MAX_EXPONENT


def _has_small_factorials(text: str, groups: dict[int, int]) -> bool:
    for place in (match.start() for match in re.finditer("!", text)):
        before = text[:place].rstrip()
        if before.endswith("!"):
            return False
        start = groups.get(len(before) - 1)
        operand = before[start:] if start is not None else before[len(before.rstrip("0123456789.")) :]
        if _size(operand) > _MAX_FACTORIAL or "!" in operand:
            return False
    return True


def _end_of_operand(text: str, place: int, groups: dict[int, int]) -> int:
    """Return the end of a power's exponent: a number, a letter, a group, or a command with its groups."""
    signs = _SIGNS.match(text, place)
    place = signs.end() if signs else place
    atom = _ATOM.match(text, place)
    if atom is None:
        return groups.get(place, place - 1) + 1
    place = atom.end()
    while atom["command"] and groups.get(place, -1) > place:
        place = groups[place] + 1
    return place


def _size(text: str) -> float:
    """Return an upper bound of the values that a text's numbers can produce, powers included."""
    size = 1.0
    for number in _NUMBER.finditer(text):
        value = float(number.group()[:20])
        before = text[: number.start()].rstrip(" {(-+")
        exponent = value if before.endswith(("^", "**")) else 1.0
        if exponent > 1 and size > 1 and exponent * math.log(size) > math.log(2 * _MAX_EXPONENT):
            return math.inf
        size = size**exponent if exponent > 1 and size > 1 else size * max(value, 1.0)
        if size > _MAX_EXPONENT:
            return size
    return size
