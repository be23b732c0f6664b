"""Units and words around the value of an answer."""

from collections.abc import Mapping
from types import MappingProxyType


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SPELLED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mm": ("millimeter", "millimetre"),
        "cm": ("centimeter", "centimetre"),
        "m": ("meter", "metre"),
        "km": ("kilometer", "kilometre"),
        "in": ("inch", "inches"),
        "ft": ("foot", "feet"),
        "yd": ("yard",),
        "mi": ("mile",),
        "s": ("sec", "second"),
        "min": ("minute",),
        "h": ("hr", "hour"),
        "day": (),
        "week": (),
        "month": (),
        "year": ("yr",),
        "mg": ("milligram",),
        "g": ("gram", "gm"),
        "kg": ("kilogram",),
        "oz": ("ounce",),
        "lb": ("pound",),
        "ml": ("milliliter", "millilitre"),
        "l": ("liter", "litre"),
        "mph": ("miles per hour", "mile per hour", "mi/h"),
        "km/h": ("kph", "kmh", "kilometers per hour", "kilometres per hour"),
        "m/s": ("meters per second", "metres per second"),
        "degree": ("deg",),
        "degree c": ("degrees celsius", "degree celsius"),
        "degree f": ("degrees fahrenheit", "degree fahrenheit"),
        "radian": ("rad",),
        "cent": (),
        "dollar": ("usd",),
        "euro": ("eur",),
        "pound sterling": ("gbp",),
        "yen": ("jpy",),
        "rupee": ("rs",),
        "unit": (),
    }
)
UNITS = {
    form: unit
    for unit, spellings in _SPELLED.items()
    for spelling in (unit, *spellings)
    for form in (spelling, f"{spelling}s" if len(spelling) > 2 or spelling in ("yr", "hr", "lb") else spelling)
}
SQUARE = {"square ": "2", "sq ": "2", "cubic ": "3", "cu ": "3"}
CURRENCIES = MappingProxyType(
    {
        **{r"\$": "dollar", "$": "dollar", r"\text{€}": "euro", r"\euro": "euro", "€": "euro"},
        **{r"\pounds": "pound sterling", "£": "pound sterling", "¥": "yen", "₹": "rupee"},
    }
)
POWERS = MappingProxyType(
    {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "thousands": 3, "millions": 6}
)
NEUTRAL = _words("""
    a an the this that these is are was be will would of for it its so thus hence therefore we get have there
    our your final correct answer answers solution result results value values number total equals equal
    gives give given option choice exactly th st nd rd which such as has""")
CHANGING = _words("""
    more less fewer greater smaller larger bigger least most not no never none neither nor without except
    only another other am pm noon midnight morning evening afternoon night bc bce ad ce north south east
    west left right up down above below under over before after ago later earlier late early increase
    decrease increased decreased increases decreases rise fall loss profit gain lost gained won half halves
    quarter quarters third thirds fourth fourths fifth fifths double twice triple thrice squared cubed dozen
    dozens hundred hundreds thousand thousands million millions billion billions trillion tenth tenths
    hundredth hundredths thousandth thousandths negative minus plus times divided per percent or and to
    between from through until inclusive exclusive infinite infinity infinitely mod modulo factorial choose
    root sqrt remainder pi one two three four five six seven eight nine ten eleven twelve zero true false
    yes unknown impossible undefined cannot if when unless otherwise every any either both maybe perhaps
    possibly about around nearly almost approximately wrong incorrect odd even away within up off short
    behind ahead outside inside positive base degrees radians does exist exists different by in at on into
    first second last next previous real complex imaginary higher lower taller shorter older younger faster
    slower heavier lighter forward backward forwards backwards extra missing wins losses clockwise
    counterclockwise""")
SAME = MappingProxyType(
    {
        "bce": "bc",
        "ce": "ad",
        "fewer": "less",
        "no solutions": r"\emptyset",
        "no solution": r"\emptyset",
        "there is no solution": r"\emptyset",
        "there are no solutions": r"\emptyset",
        "empty set": r"\emptyset",
        "the empty set": r"\emptyset",
        "infinity": r"\infty",
        "dne": "does not exist",
    }
)
