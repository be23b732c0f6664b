r"""Finds the answer of a response in LaTeX: the last whole `\boxed{...}` or `\fbox{...}`."""

import re

_PIECE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)  # an escaped brace is no brace


def last_boxed(text: str) -> str | None:
    r"""Return the content of the closed `\boxed{...}` or `\fbox{...}` that opens last; none if there is none.

    One pass over the text, whatever it is: braces pair as TeX pairs them, `\{` and `\}` are text, and a brace
    without a partner outside of the box does not matter. Of boxes within boxes it is the innermost.
    """
    open_since: list[int | None] = []  # where the content of each open brace starts; none where it is no box
    found: tuple[int, int] | None = None
    for piece in _PIECE.finditer(text):
        if piece.group().startswith(("\\boxed", "\\fbox")):
            open_since.append(piece.end())
        elif piece.group() == "{":
            open_since.append(None)
        elif piece.group() == "}" and open_since:
            start = open_since.pop()
            if start is not None and (found is None or start > found[0]):
                found = (start, piece.start())
    return None if found is None else text[slice(*found)]
