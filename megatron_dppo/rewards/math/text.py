r"""Tidies answers as text: variants get one spelling. Decides which answers are small enough to compute."""

import math
import re

_SPACING = re.compile(r"(\\\\)|\\!\s*|(\\[,;:> ]|\\q?quad(?![a-zA-Z])|~|\s+)")
_CHARACTERS = str.maketrans(
    {
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        **{"π": r"\pi ", "√": r"\sqrt ", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "∙": r"\cdot "},
        **{"−": "-", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap "},
        **{"∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}"},
        **{"°": r"^\circ ", "º": r"^\circ ", "⁄": "/", "θ": r"\theta ", "∘": r"\circ ", "≈": r"\approx "},
        **{"’": "'", "′": "'", "（": "(", "）": ")", "，": ",", "。": ".", "：": ":"},
        **{"℃": r"^\circ C", "℉": r"^\circ F"},
    }
)
_FRACTIONS = {
    **{"½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5), "⅗": (3, 5)},
    **{"⅘": (4, 5), "⅙": (1, 6), "⅚": (5, 6), "⅐": (1, 7), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8), "⅞": (7, 8)},
    **{"⅑": (1, 9), "⅒": (1, 10)},
}
_FRACTION = re.compile(f"[{''.join(_FRACTIONS)}]")
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_SUPERSCRIPT = re.compile(f"(⁻?)([{_RAISED}]+)")
_STYLE = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|bfit)|[mh]box|boldsymbol|bm|underline)"
_SPELLINGS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<=[0-9])\{,\}(?=[0-9]{3}(?![0-9]))"), ""),
    (re.compile(r"\{([,:.])\}"), r"\1"),
    (re.compile(r"(?<=[0-9])['](?=[0-9]{3}(?![0-9]))"), ""),
    (re.compile(r"\\mathbb ?([A-Z])"), r"\\mathbb{\1}"),
    (re.compile(r",? ?(?:\\(?:ldots|cdots|dotsc|dotsb)(?![a-zA-Z])|…|\.\.\.) ?,?(?=.)"), r",\\dots ,"),
    (re.compile(r"\\(?:display|text|script)style(?![a-zA-Z])"), " "),
    (re.compile(r"\\(?:limits|nolimits|bigl?|Bigl?|bigr|Bigr|biggl?|biggr|Biggl?|Biggr)(?![a-zA-Z])"), " "),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![a-zA-Z])"), r"\\binom"),
    (re.compile(r"\\lbrace(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\lbrack(?![a-zA-Z])"), "["),
    (re.compile(r"\\rbrack(?![a-zA-Z])"), "]"),
    (
        re.compile(
            r"\\(?:left|right|middle)\s*(?=[()\[\]|.]|\\[{}]|\\[lr]?[vV]ert|\\[lr](?:floor|ceil|angle))"
        ),
        "",
    ),
    (re.compile(r"\\[lr]?vert(?![a-zA-Z])"), "|"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\(?:land|wedge)(?![a-zA-Z])"), ","),
    (re.compile(r"\\vee(?![a-zA-Z])"), r"\\lor "),
    (re.compile(r"\\var(phi|epsilon|theta)(?![a-zA-Z])"), r"\\\1"),
    (re.compile(r"\\cdotp(?![a-zA-Z])|\\ast(?![a-zA-Z])"), r"\\cdot "),
    (re.compile(r"\\(?:null|relax|nobreak|strut|hfill|centering)(?![a-zA-Z])"), ""),
    (
        re.compile(r"(?:\\(?:text|mathrm|mbox)\s*\{ *per ?cent(?:age)? *\}|(?<=[0-9}]) ?per ?cent$|(?<!\\)%)"),
        r"\\%",
    ),
    (
        re.compile(
            r"\\degrees?(?![a-zA-Z])|\\textdegree(?:\{\})?|\{\}\^ ?\{? ?\\circ ?\}?|\^ ?\{ ?\\circ ?\}"
            r"|\^ ?\{? ?\\(?:text|mathrm) ?\{ ?(?:o|\\circ|\^\\circ) ?\} ?\}?"
            r"|\\(?:text|mathrm) ?\{ ?\^\\circ ?\}"
        ),
        r"^\\circ ",
    ),
    (re.compile(r"\^ ?\\circ ?"), r"^\\circ "),
    (re.compile(r"\^ ?\{? ?\\(?:text|mathrm) ?\{ ?(th|st|nd|rd) ?\} ?\}?"), r"\\text{\1}"),
    (re.compile(r"\{\\(?:rm|bf|it|sf|tt) ?([^{}\\]*)\}"), r"\\mathrm{\1}"),
    (
        re.compile(r"\\(?:hat|vec|widehat)\s*\{\s*" + _STYLE + r"\s*\{\s*(\w)\s*\}\s*\}"),
        r"\\mathbf{\1}",
    ),
    (
        re.compile(r"\\(?:hat|vec)\s*\{?\s*\\([ij])math\s*\}?|\\(?:hat|vec)\s*\{\s*([ijk])\s*\}"),
        r"\\mathbf{\1\2}",
    ),
    (re.compile(r"\\([ij])math(?![a-zA-Z])"), r"\1"),
    (re.compile(r"(?<=[0-9]) ?([apAP])\. ?[mM]\.(?![a-zA-Z])"), r" \1m"),
)
WRAPPED = re.compile(_STYLE + r"\s*\{([^{}]*)\}")
_MIXED = re.compile(r"(?<![0-9A-Za-z.}/^_])([0-9]+) ([0-9]+)/([0-9]+)(?![0-9A-Za-z!^.({])")
_REPEATING = re.compile(
    r"(?<![0-9.])([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar|dot) ?(?:\{([0-9]{1,20})\}|([0-9]))(?![0-9!^])"
)
_SCIENTIFIC = re.compile(r"([+-]?(?:[0-9]{1,30}(?:\.[0-9]{1,30})?|\.[0-9]{1,30}))[eE]([+-]?[0-9]{1,4})")
_OPEN_ENDS = re.compile(
    r"(^|[=,]|\\(?:in|cup|cap)(?![a-zA-Z])) ?([\[\](]) ?([^\[\]()]+?[,;][^\[\]()]+?) ?([\[\])])"
)
_ENDS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_INTEGER = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)")
_THOUSANDS = re.compile(
    r"(?<![0-9.,])[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?![0-9,]|\.[0-9]*[, ][0-9])"
)
_LOOSE = re.compile(r"(?<![0-9A-Za-z]) +| +(?![0-9A-Za-z])|(?<=[0-9]) +(?=[A-Za-z])|(?<=[A-Za-z]) +(?=[0-9])")


def tidy(text: str) -> str:
    r"""Return the text with one spelling of spaces, signs, brackets, `\dfrac`, degrees and per cent."""
    text = _FRACTION.sub(lambda match: r"\frac{{{}}}{{{}}}".format(*_FRACTIONS[match[0]]), text)
    text = _SUPERSCRIPT.sub(_raised, text).translate(_CHARACTERS)
    text = _SPACING.sub(lambda match: match[1] or (" " if match[2] else ""), text)
    text = re.sub(r"(?<![0-9])–|–(?![0-9])", "-", text)  # an en dash between two numbers is a range
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = text.strip().removeprefix(r"\approx").removeprefix("=").lstrip()
    for start, end in _ENDS:
        if len(text) > len(start + end) and text.startswith(start) and text.endswith(end):
            inner = text[len(start) : -len(end)]
            text = inner.strip() if "$" not in inner else text
    return text if text.endswith("..") else text.removesuffix(".").rstrip()


def _raised(match: re.Match[str]) -> str:
    digits = "".join(str(_RAISED.index(digit)) for digit in match[2])
    return f"^{{{'-' if match[1] else ''}{digits}}}"


def spell_out(text: str) -> str:
    r"""Return a tidy value with one spelling of mixed numbers, decimals, brackets and thousands."""
    if found := _SCIENTIFIC.fullmatch(text):
        return rf"{found[1]}\cdot 10^{{{found[2]}}}"
    text = _REPEATING.sub(_repeating, text)
    text = _MIXED.sub(lambda m: rf"{m[1]}\frac{{{m[2]}}}{{{m[3]}}}", text)
    text = _OPEN_ENDS.sub(_half_open, text)
    if _stands_alone(text):
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", "").replace(" ", ""), text)
    return text


def _stands_alone(text: str) -> bool:
    """Return whether commas in the text can only separate thousands: there is no list and no bracket."""
    without = _THOUSANDS.sub("", text)
    return not ({",", ";"} & set(without) or re.search(r"[(\[]|\\\{", without))


def _repeating(match: re.Match[str]) -> str:
    whole, first, again = match[1], match[2], match[3] or match[4]
    numerator = int(whole + first + again) - int(whole + first or "0")
    return rf"\frac{{{numerator}}}{{{10 ** len(first) * (10 ** len(again) - 1)}}}"


def _half_open(match: re.Match[str]) -> str:
    before, opener, content, closer = match.groups()
    return before + ("[" if opener == "[" else "(") + content + ("]" if closer == "]" else ")")


def without_spaces(text: str) -> str:
    """Return the text without spaces, except between two letters or two digits."""
    return _LOOSE.sub("", text)


def integer(text: str) -> str | None:
    """Return a tidy integer as text without commas and leading zeros, or `None` if it is not an integer."""
    if not _INTEGER.fullmatch(text):
        return None
    digits = text.lstrip("+-").replace(",", "").replace(" ", "").lstrip("0")
    return ("-" if text.startswith("-") and digits else "") + (digits or "0")


# Python cannot be interrupted within one operation, and `9^{9^{9^9}}` and `(9!)!` are single operations.

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
    """Return whether a text has no astronomic power or factorial, and is neither too long nor too deep."""
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
