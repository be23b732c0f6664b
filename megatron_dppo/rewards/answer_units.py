"""Splits the unit off the end of an answer."""

import re
from collections.abc import Mapping
from types import MappingProxyType

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
