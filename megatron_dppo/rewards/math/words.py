"""Splits an answer into its value and the words, units and letter of a choice around it.

Words matter. A unit, or a word that only names the things counted, may be left out. A word that can change the
meaning of the number may not be left out. Two answers with different words differ.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_dppo.rewards.math.text import WRAPPED, without_spaces
from megatron_dppo.rewards.math.tree import NotUnderstoodError


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
_UNITS = {
    form: unit
    for unit, spellings in _SPELLED.items()
    for spelling in (unit, *spellings)
    for form in (spelling, f"{spelling}s" if len(spelling) > 2 or spelling in ("yr", "hr", "lb") else spelling)
}
_SQUARE = {"square ": "2", "sq ": "2", "cubic ": "3", "cu ": "3"}
_CURRENCIES = MappingProxyType(
    {
        **{r"\$": "dollar", "$": "dollar", r"\text{€}": "euro", r"\euro": "euro", "€": "euro"},
        **{r"\pounds": "pound sterling", "£": "pound sterling", "¥": "yen", "₹": "rupee"},
    }
)
_POWERS = MappingProxyType(
    {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "thousands": 3, "millions": 6}
)
_NEUTRAL = _words("""
    a an the this that these is are was be will would of for it its so thus hence therefore we get have there
    our your final correct answer answers solution result results value values number total equals equal
    gives give given option choice exactly th st nd rd which such as has""")
_CHANGING = _words("""
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
_SAME = MappingProxyType(
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

_CURRENCY = re.compile("|".join(re.escape(sign) for sign in sorted(_CURRENCIES, key=len, reverse=True)))
_CHOICE = re.compile(r"\(?([A-Z])\)?")
_WORD = re.compile(r"[^\W\d_]+(?:[ '-]+[^\W\d_]+)*")
_LONGEST_SHORT = 3  # maximum letters of a word that is recognised only next to another word
_FEWEST_LETTERS = 4  # minimum letters of a plain word; shorter ones are variables: `ab` is `ba`
_ARTICLE = re.compile(r"(?:an?|the) (?=.{4})")
_OPTION = re.compile(r"(?:option|choice|answer) ", re.IGNORECASE)
_IN_TEXT = WRAPPED.pattern.removesuffix(r"([^{}]*)\}")
_LETTERED = re.compile(
    rf"(?:{_IN_TEXT} *(?:\(([A-J])\)|([A-J])[.):]) *([^{{}}]*)\}}(?![+!^_*/=<>')A-Za-z])"
    r"|(?:\(([A-J])\)|([A-J])[.):])(?= |\\text)) *"
)
_FURTHER = re.compile(
    r" *(?:[,;&]|\\(?:text|mathrm|&|lor)?\{? *(?:and|or)\b|and\b|or\b)|.*(?:\([A-J]\)|\{[A-J][.):]?\})",
    re.DOTALL,
)
_LETTER_STYLED = re.compile(r"\\(?:text(?:bf)?|math(?:rm|bf))\{([A-J])\}[.):]? (?=[^ +!^_*/=<>\\]|\\[a-z])")
_SHORT = (
    *sorted({re.escape(unit) for unit in _UNITS if 2 <= len(unit) <= 4}, key=len, reverse=True),
    *("am", "pm", "AM", "PM", "BCE", "BC", "AD", "CE", "men"),
)
_TOKEN = re.compile(
    r"(?P<skip>(?:\\(?:begin|end|operatorname|mathbb)\s*\{[^{}]*\})|_ ?\{[^{}]*\}|\\[a-zA-Z]+)"
    r"|(?P<word>(?<![A-Za-z0-9}'])[A-Z]?[a-z]{4,}(?![A-Za-z])"
    rf"|(?<=[0-9}}] )(?:{'|'.join(_SHORT)})(?![A-Za-z(_])"
    r"|(?<=[0-9])(?:th|st|nd|rd|cm|km|mm|kg|mph|am|pm)(?![A-Za-z]))"
)
_AND = re.compile(r",? *«(?:and)» *,?|,? +and +")
_OR = re.compile(r",? *«(?:or)» *,?|,? +or +")
_CONNECTING = "|".join(sorted(word for word in _NEUTRAL | _CHANGING if len(word) <= _LONGEST_SHORT))
_JOINED = re.compile(rf"»((?: (?:{_CONNECTING})(?![A-Za-z]))+)")
_BLOCK = re.compile(r"«([^«»]*)»")
_DEGREES = re.compile(r"\^\\circ ?([CFK])?$")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_BASE = re.compile(r"\(?([0-9]+)\)?_ ?(?:\{([0-9]{1,2})\}|([0-9]))")
_PER_CENT = re.compile(r" *\\% *(?=$|,|\\lor)")


@dataclass(frozen=True)
class Parts:
    """Parts of an answer.

    Attributes:
        value: LaTeX without words.
        words: Words with a meaning, without neutral words.
        unit: Unit in one spelling, with its power, or `None`.
        letter: Letter of a choice, or `None`.
        per_cents: Number of values with a per cent sign.
    """

    value: str
    words: frozenset[str] = frozenset()
    unit: str | None = None
    letter: str | None = None
    per_cents: int = 0


def are_same_words(reference: str, answer: str) -> bool | None:
    r"""Return whether two tidy texts are the same letter of a choice, or the same words, else `None`.

    Case matters only in a choice. Words are letters inside `\text{...}` and similar commands, or four letters
    and more.
    """
    texts = [" ".join(unwrap(text).removesuffix(".").split()) for text in (reference, answer)]
    choices = [_CHOICE.fullmatch(_OPTION.sub("", text, count=1)) for text in texts]
    if choices[0] and choices[1]:
        return choices[0][1] == choices[1][1]
    if not all(_WORD.fullmatch(text) for text in texts):
        return None
    is_text = any(WRAPPED.search(text) for text in (reference, answer))
    if not is_text and min(map(len, texts)) < _FEWEST_LETTERS:
        return None
    if max(map(len, texts)) == 1:  # `\mathrm{e}` is a letter, not a word
        return None
    one, other = (_ARTICLE.sub("", _SAME.get(text.casefold(), text.casefold())) for text in texts)
    return one == other


def unwrap(text: str) -> str:
    r"""Return a text with `\text{...}` and similar commands replaced by their contents."""
    return WRAPPED.sub(r"\1", text)


def as_value(text: str) -> str:
    r"""Return `\emptyset` for "no solution" and similar phrases, else the text."""
    words = " ".join(unwrap(text).casefold().split())
    value = _SAME.get(words, text)
    return value if value.startswith("\\") else text


def are_compatible(reference: Parts, answer: Parts) -> bool:
    """Return whether the words and units of two answers are equal, or may be left out."""
    if reference.unit and answer.unit:
        return reference.unit == answer.unit and _are_compatible_words(reference.words, answer.words)
    if (reference.unit and answer.per_cents) or (answer.unit and reference.per_cents):
        return False
    said = [{*parts.words, *([f"unit {parts.unit}"] if parts.unit else [])} for parts in (reference, answer)]
    return _are_compatible_words(*map(frozenset, said))


def _are_compatible_words(reference: frozenset[str], answer: frozenset[str]) -> bool:
    if reference and answer and not (reference <= answer or answer <= reference):
        return False
    return not (reference ^ answer) & _CHANGING


def split_words(text: str) -> Parts:
    r"""Return the parts of a tidy answer: `\textbf{(C)}\ 12\text{ cm}^2` is the choice C, 12 and `cm^2`.

    Degrees, currencies and the base of a number, as in `101_2`, count as units.

    Raises:
        NotUnderstoodError: Some words belong to no value.
    """
    text, letter = _without_letter(text)
    text, currency = _without_currency(text)
    text, power = _without_power(_with_blocks(text))
    words = list[str]()
    text = _without_blocks(text, words)
    unit = currency
    if words and (found := _unit_in(words, power)):
        if unit is not None and unit != found:
            raise NotUnderstoodError
        unit = found
    elif power:
        raise NotUnderstoodError
    if not _TRIGONOMETRIC.search(text) and (degrees := _DEGREES.search(text)):
        text = text[: degrees.start()].rstrip()
        unit = _one(unit, f"degree {(degrees[1] or '').lower()}".rstrip())
    if base := _BASE.fullmatch(text):
        text, number = base[1], base[2] or base[3]
        if int(max(text)) >= int(number):
            raise NotUnderstoodError
        unit = _one(unit, f"base {number}")
    text, per_cents = _PER_CENT.subn("", text)
    said = [_word(word) for phrase in words for word in re.findall(r"[^\W\d_]+", _said(phrase))]
    scale = [power for word, power in _POWERS.items() if word in said]
    if scale and not re.search(r"[,;]", text):
        text = rf"({text})\cdot 10^{{{sum(scale)}}}"
        said = [word for word in said if word not in _POWERS]
    content = frozenset(word for word in said if word not in _NEUTRAL)
    return Parts(text.strip(), content, unit, letter, per_cents)


def _one(first: str | None, second: str) -> str:
    if first is not None and first != second:
        raise NotUnderstoodError
    return second


def _without_letter(text: str) -> tuple[str, str | None]:
    r"""Take the letter of a choice off the front, as in `\textbf{(C)}\ 12` and `\text{C. } 12`."""
    if lone := _CHOICE.fullmatch(_OPTION.sub("", unwrap(text).strip(), count=1)):
        return lone[1], lone[1]
    found = _LETTERED.match(text)
    if found and _FURTHER.match((found[3] or "") + text[found.end() :]):
        return text, None  # several letters
    if found and (found[3] or found.end() < len(text)):
        letter = found[1] or found[2] or found[4] or found[5]
        rest = (found[3] or "").strip()
        return (rf"\text{{{rest}}} " if rest else "") + text[found.end() :], letter
    if found := _LETTER_STYLED.match(text):
        return text[found.end() :], found[1]
    return text, None


def _without_currency(text: str) -> tuple[str, str | None]:
    signs = {_CURRENCIES[sign] for sign in _CURRENCY.findall(text)}
    if len(signs) > 1:
        raise NotUnderstoodError
    return (_CURRENCY.sub(" ", text).strip(), signs.pop()) if signs else (text, None)


def _with_blocks(text: str) -> str:
    """Put words between « and »; single letters and numbers in text are mathematics."""
    if "«" in text or "»" in text:
        raise NotUnderstoodError
    text = WRAPPED.sub(_block, text)
    pieces, place = list[str](), 0
    for block in _BLOCK.finditer(text):
        pieces += [_with_plain_words(text[place : block.start()]), block[0]]
        place = block.end()
    text = "".join([*pieces, _with_plain_words(text[place:])])
    text = _JOINED.sub(r"\1»", text)
    return re.sub(r"» *«", " ", _OR.sub(r"\\lor ", _AND.sub(",", text)))


def _block(match: re.Match[str]) -> str:
    content = match[1].strip()
    before = match.string[: match.start()].rstrip()
    if before.endswith("_"):
        return f"{{{content}}}"
    is_unit_letter = content in _UNITS and (before[-1:].isdigit() or before.endswith("}"))
    if len(content) == 1 and content.isalpha() and not is_unit_letter:
        return f" {content} "
    if not re.search(r"[^\W\d_]{2}", _said(content)) and not is_unit_letter:
        return f" {content} "
    if re.search(r"[0-9=+^\\$<>*]", content):
        return f" {content} "
    return f"«{content.replace(',', ' , ').strip(' ,')}»" if content.strip(" ,") else " "


def _with_plain_words(text: str) -> str:
    def block(match: re.Match[str]) -> str:
        return match[0] if match["word"] is None else f"«{match[0]}»"

    return _TOKEN.sub(block, text)


def _without_power(text: str) -> tuple[str, str | None]:
    found = re.search(r"» ?\^ ?\{?([23])\}?$", text)
    return (text[: found.start() + 1], found[1]) if found else (text, None)


def _without_blocks(text: str, words: list[str]) -> str:
    """Remove words from the ends of values and collect them."""
    text = re.sub(r"«[^«»]*»", lambda match: match[0] if _said(match[0]).strip() else " ", text).strip()
    pieces, place = list[str](), 0
    for block in _BLOCK.finditer(text):
        before = "".join([*pieces, text[place : block.start()]]).rstrip()
        after = text[block.end() :].lstrip()
        is_first = not before or before.endswith((",", ";", r"\lor"))
        is_last = not after or after.startswith((",", ";", r"\lor", ".", ":"))
        if not (is_first or is_last or after.startswith(("=", r"\%"))):
            raise NotUnderstoodError
        words.append(block[1])
        pieces, place = [before, " "], block.end()
        if not before and after.startswith((":", "=")):
            place += len(text[place:]) - len(after) + 1
    text = "".join([*pieces, text[place:]])
    return text.strip().removesuffix(".").removesuffix(",").strip()


def _said(phrase: str) -> str:
    """Return a phrase in lower case without full stops: `p.m.` becomes `pm`."""
    return phrase.casefold().replace(".", "").replace(":", "").replace("'s ", " ")


def _word(word: str) -> str:
    word = _SAME.get(word, word)
    is_plural = word.endswith("s") and len(word) >= _FEWEST_LETTERS and not word.endswith("ss")
    return word if not is_plural or word in _CHANGING else word.removesuffix("s")


def _unit_in(words: list[str], power: str | None) -> str | None:
    """Remove the unit from the words and return it, if all values have the same unit."""
    found = set[str]()
    for place, phrase in enumerate(words):
        name, of_power = " ".join(_said(phrase).split()), power
        for prefix, of_prefix in _SQUARE.items():
            if name.startswith(prefix):
                name, of_power = name.removeprefix(prefix), of_prefix
        unit = _UNITS.get(name)
        if unit is not None:
            found.add(f"{unit}^{of_power}" if of_power else unit)
            words[place] = ""
    if len(found) > 1:
        raise NotUnderstoodError
    return found.pop() if found else None


def is_same_text(reference: str, answer: str) -> bool:
    r"""Return whether two tidy texts are the same, apart from spaces and `\text{...}`."""
    one, other = (without_spaces(" ".join(unwrap(text).split())) for text in (reference, answer))
    return one == other and bool(one)
