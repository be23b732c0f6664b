r"""The reward of mathematics problems: is the content of the last box the reference answer?

An answer is right only if it is the same text, or if both answers are understood completely and are equal. What
is not understood is compared as text.
"""

import re
import threading
from collections.abc import Sequence
from functools import lru_cache

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.base import RewardResult, register
from megatron_dppo.rewards.math.parser import parse
from megatron_dppo.rewards.math.text import (
    MAX_LENGTH,
    Node,
    NotUnderstoodError,
    Quantity,
    integer,
    is_regrouped,
    is_same_text,
    spell_out,
    tidy,
    unwrap,
    walk,
    words_of,
)
from megatron_dppo.types import FinishReason, Prompt

_PIECE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)  # an escaped brace does not count
_CHOICE = re.compile(r"\(?([A-Z])\)?[.:]?")
_LETTERED = re.compile(r"(?:\(([A-J])\)|([A-J])[.):](?= ?\\| ?[0-9(]| )) *(?=.)", re.DOTALL)
_STYLED_LETTER = re.compile(r"\\(?:text(?:bf|rm)?|math(?:rm|bf))\{ ?([A-J]) ?\}[.):]? (?=[^ +!^_*/=<>])")
_OPTION = re.compile(r"(?:option|choice|answer) ", re.IGNORECASE)
_WORDS = re.compile(r"[^\W\d_]+(?:[ ,'-]+[^\W\d_]+)*")
_ARTICLE = re.compile(r"(?:an?|the) (?=.{4})")
_DATE = re.compile(r"[0-9]{1,2}([/-])[0-9]{1,2}\1[0-9]{2,4}|[0-9]{4}([/-])[0-9]{1,2}\2[0-9]{1,2}")  # 1/2/2020
_ONE_AT_A_TIME = threading.Lock()  # FLINT's precision is a property of the process
_FEWEST_LETTERS = 4  # of a plain word; shorter ones are variables
_SAME = {
    **dict.fromkeys(
        ("no solution", "no solutions", "there is no solution", "there are no solutions"), r"\emptyset"
    ),
    **dict.fromkeys(("empty set", "the empty set"), r"\emptyset"),
    **dict.fromkeys(("all real numbers", "all reals", "the set of all real numbers"), r"\mathbb{R}"),
    **{"infinity": r"\infty", "dne": "does not exist"},
}
_ANSWERED = {
    **dict.fromkeys(
        ("yes", "true"), re.compile(r"(?:it|this|that|they|there|he|she) (?:is|are|does|do|can|will)")
    ),
    **dict.fromkeys(
        ("no", "false"),
        re.compile(
            r"(?:it|this|that|they|there|he|she) (?:(?:is|are|does|do|will) not|isn't|aren't|doesn't|cannot)"
        ),
    ),
}
_LAST_CHOICES = frozenset({"none of these", "none of the above", "all of these", "all of the above"})


_UNITS = {
    spelling: line.split()[0]
    for line in (
        *("mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre"),
        *(
            "in inch inche",
            "ft foot feet",
            "yd yard",
            "mi mile",
            "s sec second",
            "min minute",
            "h hr hour",
            "day",
        ),
        *("week", "month", "year yr", "mg milligram", "g gram gm", "kg kilogram", "oz ounce", "lb pound"),
        *("ml milliliter millilitre", "l liter litre", "mph mi/h", "km/h kph kmh", "m/s", "degree deg", "cent"),
        *("radian rad", "dollar usd", "euro eur", "yen", "rupee", "sterling", "unit"),
    )
    for spelling in line.split()
}
_PHRASES = {
    **{"mile per hour": "mph", "kilometer per hour": "km/h", "kilometre per hour": "km/h"},
    **{"meter per second": "m/s", "metre per second": "m/s"},
}
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_NOUNS = words_of("""
    th st nd rd way student person people boy girl child children man men woman women player team game apple
    orange marble ball book card coin bead box page point piece triangle solution digit integer number step old
    different possible total exactly""")  # names of what is counted: they change no number
_SYNONYMS = {"bce": "bc", "ce": "ad", "fewer": "less", "am": "am", "pm": "pm", "bc": "bc", "ad": "ad"}


@register("math", loads="megatron_dppo.rewards.math.equality", reads="boxed")
def math_reward(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    r"""Return 1.0 if the last complete `\boxed{...}` equals `prompt.answer`, otherwise 0.0.

    Any thread may call it. Info `has_answer` is 1.0 if the model ended the response and it has a box. Info
    `is_too_hard` is 1.0 if the box could not be compared within the limits of work and digits.

    Raises:
        RewardError: The prompt's reference answer is empty.
    """
    boxed = last_boxed(prompt.answer)
    reference = tidy(prompt.answer if boxed is None else boxed)
    if not reference:
        raise RewardError(
            f"prompt {prompt.id}: found answer {prompt.answer!r}; expected text or LaTeX. "
            "Correct the answer column, or remove the prompt."
        )
    answer = last_boxed(response) if finish_reason == "stop" else None
    is_right, is_too_hard = (False, False) if answer is None else _compare(reference, answer, prompt)
    info = {"has_answer": float(answer is not None), "is_too_hard": float(is_too_hard)}
    return RewardResult(float(is_right), info)


def is_matched_as_text(answer: str) -> bool:
    """Return whether `math` reads no value in a reference answer, so that only the same text is right.

    Words and letters of a choice count as readable. It takes about 0.2 ms, and never more than a few.
    """
    boxed = last_boxed(answer)
    reference = tidy(answer if boxed is None else boxed)
    if integer(reference) is not None or _are_same_words(reference, reference):
        return False
    letter, rest = _without_letter(reference)
    return _parsed(rest) is None and not (letter and _are_same_words(rest, rest))


def _compare(reference: str, answer: str, prompt: Prompt) -> tuple[bool, bool]:
    """Return whether an answer is right, and whether it is too hard to compare."""
    from megatron_dppo.rewards.math.values import TooLargeError

    if len(answer) > MAX_LENGTH + len(reference):
        return False, True
    try:
        return _is_right(reference, tidy(answer), prompt), False
    except (TooLargeError, RecursionError):
        return False, True


def _is_right(reference: str, answer: str, prompt: Prompt) -> bool:
    """Compare two tidy answers, by the cheapest comparison that applies."""
    if not answer or is_same_text(reference, answer):
        return bool(answer)
    numbers = integer(reference), integer(answer)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if is_regrouped(reference, answer):
        return True
    are_same = _are_same_words(reference, answer)
    if are_same is not None:
        return are_same
    return _are_equal_choices(reference, answer, prompt)


def _are_equal_choices(reference: str, answer: str, prompt: Prompt) -> bool:
    """Compare two answers, of which each may be a choice: a letter, a value, or a letter and its value."""
    (wanted, expected), (letter, found) = _without_letter(reference), _without_letter(answer)
    if wanted and letter and wanted != letter:
        return False
    if not expected or not found:
        if not wanted or not letter:
            return False
        rest = expected or found  # a letter alone, and a letter with something behind it
        return bool(expected) or _Words(prompt).are_known_in(_parsed(rest)) or _is_in_problem(rest, prompt)
    return _are_equal_values(expected, found, prompt)


def _are_equal_values(reference: str, answer: str, prompt: Prompt) -> bool:
    from megatron_dppo.rewards.math.equality import Comparison

    if is_same_text(reference, answer):
        return True
    are_same = _are_same_words(reference, answer)
    if are_same is not None:
        return are_same
    expected, found = _parsed(_as_value(reference)), _parsed(_as_value(answer))
    if expected is None or found is None:
        return False
    words = _Words(prompt)
    with _ONE_AT_A_TIME:
        return Comparison(words.are_known, words.are_compatible).answers(expected, found)


def _is_in_problem(rest: str, prompt: Prompt) -> bool:
    text = " ".join(unwrap(rest).casefold().split())
    return text in _LAST_CHOICES or text in " ".join(unwrap(tidy(_problem(prompt))).casefold().split())


def _problem(prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return "\n".join(str(message.get("content")) for message in prompt.messages or ())


@lru_cache(maxsize=256)  # all responses to a prompt share the reference
def _parsed(text: str) -> Node | None:
    value = spell_out(text)
    if _DATE.fullmatch(value) or len(value) > MAX_LENGTH:
        return None
    try:
        return parse(value)
    except (NotUnderstoodError, RecursionError):
        return None


def _are_same_words(reference: str, answer: str) -> bool | None:
    r"""Return whether two tidy texts are the same letter of a choice, or the same words, else `None`.

    Case matters only in a choice. Words are letters inside `\text{...}` and similar commands, or four letters
    and more.
    """
    texts = [" ".join(unwrap(text).removesuffix(".").split()) for text in (reference, answer)]
    choices = [_CHOICE.fullmatch(_OPTION.sub("", text, count=1)) for text in texts]
    if choices[0] and choices[1]:
        return choices[0][1] == choices[1][1]
    if not all(_WORDS.fullmatch(text) for text in texts):
        return None
    is_text = any(unwrap(text) != text for text in (reference, answer))
    if (not is_text and min(map(len, texts)) < _FEWEST_LETTERS) or max(map(len, texts)) == 1:
        return None
    one, other = (_ARTICLE.sub("", _SAME.get(text.casefold(), text.casefold())) for text in texts)
    first, _, rest = other.partition(", ")
    return one == other or (first == one and one in _ANSWERED and bool(_ANSWERED[one].fullmatch(rest)))


def _as_value(text: str) -> str:
    r"""Return `\emptyset` for "no solution" and similar phrases, else the text."""
    value = _SAME.get(" ".join(unwrap(text).casefold().split()), text)
    return value if value.startswith("\\") else text


def _without_letter(text: str) -> tuple[str | None, str]:
    r"""Split a choice: `\textbf{(C)}\ 12` and `\text{C. } 12` are C and 12. A letter alone has no rest."""
    plain = unwrap(text).strip()
    if lone := _CHOICE.fullmatch(_OPTION.sub("", plain, count=1)):
        return lone[1], ""
    if found := _STYLED_LETTER.match(text):
        return found[1], text[found.end() :].strip()
    if (found := _LETTERED.match(plain)) and not re.search(r"\([A-J]\)", plain[found.end() :]):
        return found[1] or found[2], _rest_of(text, plain[found.end() :])
    return None, text


def _rest_of(text: str, plain: str) -> str:
    r"""Return the end of a text whose content without `\text{...}` is given, with its commands if possible."""
    for start in range(len(text)):
        if text[start] == "\\" and unwrap(text[start:]).strip() == plain.strip():
            return text[start:].strip()
    return plain.strip() if not re.search(r"[a-z]{2}", plain) else rf"\text{{{plain.strip()}}}"


# Words, units and marks around a value


class _Words:
    """Decides which words may stand around a value: units, a few nouns, and the words of the problem."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt

    def are_known(self, words: Sequence[str]) -> bool:
        """Return whether all words may be left out."""
        return all(map(self._may_be_left_out, _said(words)))

    def are_known_in(self, node: Node | None) -> bool:
        """Return whether a tree is understood, with all words in it."""
        return node is not None and all(
            self.are_known(each.words) for each in walk(node) if isinstance(each, Quantity)
        )

    def are_compatible(self, reference: Quantity, answer: Quantity) -> bool:
        """Return whether words and units are equal, or those that only one side has may be left out."""
        if answer.mark.startswith("base") and not reference.mark:
            return False  # 101 is not 101_2
        one, other = (_said(each.words) | ({each.mark} - {"", "%"}) for each in (reference, answer))
        if one and other and not (one <= other or other <= one):
            return False
        if "%" in (reference.mark, answer.mark) and any(word in _UNITS.values() for word in one | other):
            return False
        return all(map(self._may_be_left_out, one ^ other))

    def _may_be_left_out(self, word: str) -> bool:
        is_mark = word in ("degree C", "degree F", "degree K") or word.startswith("base ")
        is_unit = is_mark or word.partition("^")[0] in _UNITS.values()
        return is_unit or word in _NOUNS or word in _words_in(_problem(self._prompt))


@lru_cache(maxsize=64)
def _words_in(text: str) -> frozenset[str]:
    return frozenset(map(_singular, re.findall(r"[^\W\d_]{3,}", text.casefold())))


def _singular(word: str) -> str:
    return word.removesuffix("s") if len(word) > 2 and not word.endswith("ss") and "/" not in word else word


def _said(words: Sequence[str]) -> frozenset[str]:
    """Return words in one spelling, with units by their symbols."""
    parts = [word.partition("^") for word in words]
    text = " ".join(_singular(_SYNONYMS.get(word.casefold(), word)) + hat + power for word, hat, power in parts)
    for phrase, unit in _PHRASES.items():
        text = text.replace(phrase, unit)
    said, power = list[str](), ""
    for word in text.split():
        base, _, given = word.partition("^")
        if word in _POWERS and not power:
            power = _POWERS[word]
        else:
            said.append(_UNITS.get(base, base) + f"^{given or power}" * bool(given or power))
            power = ""
    return frozenset([*said, *(["squared"] if power else [])])


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}` or `\fbox{...}`, or `None` without one.

    It always takes one pass over the text. Braces pair as in TeX, `\{` and `\}` are text, and unpaired braces
    outside the box do not matter. If boxes are nested, it returns the innermost.
    """
    open_since: list[int | None] = []  # start of each open brace's content; None if it is not a box
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
