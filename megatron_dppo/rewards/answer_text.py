r"""Answers as text: one spelling for what is written in several, and what can be told without algebra."""

import re
from collections.abc import Mapping
from types import MappingProxyType

_SPACING = re.compile(r"(\\\\)|\\!|(\\[,;:> ]|\\q?quad(?![a-zA-Z])|~|\s+)")
_SPELLINGS = (
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\(?:display|text)style(?![a-zA-Z])"), " "),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right)\s*(?=[()\[\]|]|\\[{}])"), ""),
    (re.compile(r"\\(?:text|mathrm|mbox)\s*\{ *per ?cent *\}|(?<=\d) ?per ?cent$|(?<!\\)%"), r"\\%"),
)
_WRAPPED = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}"
)
_ENDS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_INTEGER = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)")
_WORD = re.compile(r"[^\W\d_]+(?:[ '-]+[^\W\d_]+)*")
_CHOICE = re.compile(r"\(?([A-Z])\)?")
_FEWEST_LETTERS = 4  # of a plain word; fewer are taken for variables: `ab` is `ba`
_APART = re.compile(r"(?<!\\frac )(?<![\d.])\d+ \d+(?![\d ]*/)")


def tidy(text: str) -> str:
    r"""The same answer without what only sets it: spaces, `$`, `\left`, `\dfrac`, a full stop at the end."""
    text = _SPACING.sub(lambda match: match[1] or (" " if match[2] else ""), text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = text.strip()
    for start, end in _ENDS:
        if len(text) > len(start + end) and text.startswith(start) and text.endswith(end):
            text = text[len(start) : -len(end)].strip()
    return text if text.endswith("..") else text.removesuffix(".").rstrip()


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


_SPELLED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mm": ("millimeter", "millimeters", "millimetre", "millimetres"),
        "cm": ("centimeter", "centimeters", "centimetre", "centimetres"),
        "m": ("meter", "meters", "metre", "metres"),
        "km": ("kilometer", "kilometers", "kilometre", "kilometres"),
        "in": ("inch", "inches"),
        "ft": ("foot", "feet"),
        "yd": ("yard", "yards"),
        "mi": ("mile", "miles"),
        "s": ("sec", "second", "seconds"),
        "min": ("minute", "minutes"),
        "h": ("hr", "hrs", "hour", "hours"),
        "day": ("days",),
        "week": ("weeks",),
        "month": ("months",),
        "year": ("years",),
        "mg": ("milligram", "milligrams"),
        "g": ("gram", "grams"),
        "kg": ("kilogram", "kilograms"),
        "oz": ("ounce", "ounces"),
        "lb": ("lbs", "pound", "pounds"),
        "ml": ("milliliter", "milliliters"),
        "l": ("liter", "liters", "litre", "litres"),
        "mph": ("miles per hour",),
        "km/h": ("kph", "kilometers per hour"),
        "m/s": ("meters per second",),
        "degree": ("deg", "degrees"),
        "radian": ("rad", "radians"),
        "cent": ("cents",),
        "dollar": ("dollars",),
        "euro": ("euros",),
    }
)
_UNITS = {spelling: unit for unit, spellings in _SPELLED.items() for spelling in (unit, *spellings)}
_SQUARE = {"square ": "2", "sq ": "2", "cubic ": "3", "cu ": "3"}
_LAST_WORDS = re.compile(
    r"(?:\\(?:text|textrm|mathrm|mbox)\s*\{ ?([A-Za-z/ .]+?) ?\}|(?<= )([A-Za-z/]{2,}))"
    r"(?: ?\^ ?\{?([23])\}?)?$"
)
_DEGREES = re.compile(r" ?\^ ?\{? ?\\circ ?\}? ?([CF]?)$")
_BASE = re.compile(r"(?<=\d)\)?_ ?\{?(\d+)\}?$")


def split_unit(text: str) -> tuple[str, str | None]:
    r"""A tidy answer and its unit: `12\text{ cm}^2` is `12`, and `cm^2`; none where no known unit ends it.

    Degrees, dollars and the base of a number, as in `101_2`, count as units.
    """
    if text.startswith(r"\$"):
        return text.removeprefix(r"\$").lstrip(), "dollar"
    if degrees := _DEGREES.search(text):
        return text[: degrees.start()], f"degree {degrees[1]}".rstrip()
    if base := _BASE.search(text):
        return text[: base.start()].removeprefix("("), f"base {base[1]}"
    if words := _LAST_WORDS.search(text):
        name, power = (words[1] or words[2]).casefold().replace(".", "").strip(), words[3]
        for prefix, of_prefix in _SQUARE.items():
            if name.startswith(prefix):
                name, power = name.removeprefix(prefix), of_prefix
        unit, value = _UNITS.get(name), text[: words.start()].rstrip()
        if unit is not None and value:
            return value, f"{unit}^{power}" if power else unit
    return text, None
