r"""Tidies answers as text: one spelling for what is written in several, and what can be told without algebra.

math-verify's own normalisation is no substitute. Of the 538 pairs in `tests/unit/data/math_pairs.toml` it
alone rejects 18 right answers and accepts 11 wrong ones; with what stands here and in `answer_units` none.
"""

import re

_SPACING = re.compile(r"(\\\\)|\\!|(\\[,;:> ]|\\q?quad(?![a-zA-Z])|~|\s+)")
_SPELLINGS = (
    (re.compile(r"\{([,:])\}"), r"\1"),
    (re.compile(r"\\mathbb ?([A-Z])"), r"\\mathbb{\1}"),
    (re.compile(r"\\ldots(?![a-zA-Z])"), r"\\dots"),
    (re.compile(r"(?<=\d)i(?![a-zA-Z])"), " i"),  # math-verify sees the imaginary unit where it stands alone
    (re.compile(r"\\(?:display|text)style(?![a-zA-Z])"), " "),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right)\s*(?=[()\[\]|]|\\[{}])"), ""),
    (re.compile(r"\\(?:text|mathrm|mbox)\s*\{ *per ?cent *\}|(?<=\d) ?per ?cent$|(?<!\\)%"), r"\\%"),
)
_WRAPPED = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}"
)
_MIXED = re.compile(r"(-?\d+) (\d+)/(\d+)")
_REPEATING = re.compile(r"(-?)(\d*)\.(\d*)\\overline ?\{(\d+)\}")
_ENDS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_INTEGER = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)")
_WORD = re.compile(r"[^\W\d_]+(?:[ '-]+[^\W\d_]+)*")
_CHOICE = re.compile(r"\(?([A-Z])\)?")
_LOOSE = re.compile(r"(?<!\d) +| +(?!\d)")
_LONGEST_DECIMAL = 60  # characters
_FEWEST_LETTERS = 4  # of a plain word; fewer are taken for variables: `ab` is `ba`
_APART = re.compile(r"(?<!\\frac )(?<![\d.])\d+ \d+(?![\d ]*/)")


def tidy(text: str) -> str:
    r"""The same answer without what only sets it: spaces, `$`, `\left`, `\dfrac`, a full stop at the end."""
    text = _SPACING.sub(lambda match: match[1] or (" " if match[2] else ""), text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = text.strip().removeprefix(r"\approx").removeprefix("=").lstrip()
    for start, end in _ENDS:
        if len(text) > len(start + end) and text.startswith(start) and text.endswith(end):
            text = text[len(start) : -len(end)].strip()
    return text if text.endswith("..") else text.removesuffix(".").rstrip()


def fraction(text: str) -> str:
    r"""A tidy mixed number or repeating decimal, `3 1/2` or `0.\overline{3}`, as a fraction; else the text."""
    if mixed := _MIXED.fullmatch(text):
        return rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    repeating = _REPEATING.fullmatch(text)
    if repeating is None or len(text) > _LONGEST_DECIMAL:
        return text
    sign, whole, first, again = repeating.groups()
    numerator = int(whole + first + again) - int(whole + first or "0")
    return rf"{sign}\frac{{{numerator}}}{{{10 ** len(first) * (10 ** len(again) - 1)}}}"


def without_spaces(text: str) -> str:
    """The text without spaces, but for those between two digits."""
    return _LOOSE.sub("", text)


def is_set_and_pair(reference: str, answer: str) -> bool:
    r"""Whether one of two lists stands in the braces of a set, and the other in brackets that keep an order."""
    if "," not in reference or "," not in answer:
        return False
    return {_brackets(reference), _brackets(answer)} == {"set", "pair"}


def _brackets(text: str) -> str | None:
    """What the one pair of brackets around all of a text makes of it."""
    if text.startswith(r"\{") and text.find(r"\}") == len(text) - 2:
        return "set"
    ends = [place for place, character in enumerate(text) if character in ")]"]
    return "pair" if text[:1] in ("(", "[") and ends == [len(text) - 1] else None


def integer(text: str) -> str | None:
    """A tidy whole number without commas and leading zeros, as text; none where it is no number."""
    if not _INTEGER.fullmatch(text):
        return None
    digits = text.lstrip("+-").replace(",", "").replace(" ", "").lstrip("0")
    return ("-" if text.startswith("-") and digits else "") + (digits or "0")


def are_same_words(reference: str, answer: str) -> bool | None:
    r"""Whether two tidy texts are the same letter of a choice, or the same words; none where they are neither.

    Case matters in a choice only. Words are letters inside `\text{...}` and its like, or four and more of them.
    """
    texts = [" ".join(_WRAPPED.sub(r"\1", text).removesuffix(".").split()) for text in (reference, answer)]
    choices = [_CHOICE.fullmatch(text) for text in texts]
    if choices[0] and choices[1]:
        return choices[0][1] == choices[1][1]
    if not all(_WORD.fullmatch(text) for text in texts):
        return None
    is_text = any(_WRAPPED.search(text) for text in (reference, answer))
    if not is_text and min(map(len, texts)) < _FEWEST_LETTERS:
        return None
    return texts[0].casefold() == texts[1].casefold()


def has_numbers_apart(text: str) -> bool:
    r"""Whether two numbers stand side by side, as in `5 6`, which is no one number; `3 1/2` is."""
    return _APART.search(text) is not None
