"""Reads the tokens of LaTeX one after another."""

import re

from megatron_dppo.rewards.math.tree import NotUnderstoodError

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
