r"""Tidies answers as text: variants get one spelling."""

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
    r"""Return the same answer in one spelling of spaces, signs, brackets, `\dfrac`, degrees and per cent."""
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


def spelled_out(text: str) -> str:
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
