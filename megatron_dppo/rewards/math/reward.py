r"""The reward of mathematics problems: is the content of the last box the reference answer?

An answer is right only if it is the same text, or if both answers are understood completely and are equal. What
is not understood is compared as text.
"""

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.base import RewardResult, register
from megatron_dppo.rewards.math.parser import MAX_LENGTH, parsed
from megatron_dppo.rewards.math.text import Quantity, integer, is_same_text, spellings, tidy, unwrap, words_of
from megatron_dppo.types import FinishReason, Prompt

_PIECE = re.compile(r"(?P<open>(?P<box>\\(?:boxed|fbox)\s*)?\{)|\\.|\}", re.DOTALL)  # no escaped brace
_CHOICE = re.compile(r"(?i:(?:option|choice|answer) )?\(?([A-Z])\)?[.:]?")
_LETTERED = re.compile(  # a choice's letter and a value: `\textbf{(C)}\ 12`, `\text{C. } 12`, `\textbf{C} 12`
    r"(?P<style>\\(?:text(?:bf|rm)?|math(?:rm|bf)) ?\{)? ?"
    r"(?:\(([A-J])\)|([A-J])[.):](?=[ }\\0-9(])|([A-J])(?= ?\}[.):]? [^ +!^_*/=<>]))"
    r" ?(?(style)(?P<end>\})?)(?(4)[.):]?) *(?P<rest>.+)",
    re.DOTALL,
)
_WORDS = re.compile(r"[^\W\d_]+(?:[ ,'-]+[^\W\d_]+)*")
_ARTICLE = re.compile(r"(?:an?|the) (?=.{4})")
_SENTENCE = re.compile(  # "yes, it does" and "no, it is not"
    r"(?:(yes|true)|no|false), (?:it|this|that|they|there|he|she) "
    r"(?:is|are|does|do|can|will)(?(1)|(?: not|n't|(?<=can)not))"
)
_ONE_AT_A_TIME = threading.Lock()  # FLINT's precision is a property of the process
_FEWEST_LETTERS = 4  # of a plain word; shorter ones are variables
_MEANING = spellings(r"""
    \emptyset no_solution no_solutions there_is_no_solution there_are_no_solutions empty_set the_empty_set
    \mathbb{R} all_real_numbers all_reals the_set_of_all_real_numbers
    \infty infinity; does_not_exist dne""")
_LAST_CHOICES = frozenset({"none of these", "none of the above", "all of these", "all of the above"})
_UNITS = spellings("""
    mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre; in inch inche
    ft foot feet; yd yard; mi mile; s sec second; min minute; h hr hour; day; week; month; year yr
    mg milligram; g gram gm; kg kilogram; oz ounce; lb pound; ml milliliter millilitre; l liter litre
    mph mi/h; km/h kph kmh; m/s; degree deg; radian rad; cent; dollar usd; euro eur; yen; rupee; sterling
    unit; degree_C; degree_F; degree_K""")
_NOUNS = words_of("""
    th st nd rd way student person people boy girl child children man men woman women player team game apple
    orange marble ball book card coin bead box page point piece triangle solution digit integer number step old
    different possible total exactly""")  # names of what is counted: they change no number
_SYNONYMS = spellings("bc bce; ad ce; less fewer; am; pm")


@register("math", loads="megatron_dppo.rewards.math.equality", reads="boxed")
def math_reward(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    r"""Return 1.0 if the last complete `\boxed{...}` equals `prompt.answer`, otherwise 0.0.

    Any thread may call it. Info `has_answer` is 1.0 if the model ended the response and it has a box. Info
    `is_too_hard` is 1.0 if the box could not be compared within the limits of work and digits.

    Raises:
        RewardError: The prompt's reference answer is empty.
    """
    reference = _reference(prompt.answer)
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
    reference = _reference(answer)
    letter, rest = _without_letter(reference)
    is_read = integer(reference) is not None or (letter and not rest) or _are_same_words(rest, rest)
    return not is_read and parsed(rest) is None


@lru_cache(maxsize=256)  # all responses to a prompt share the reference
def _reference(answer: str) -> str:
    boxed = last_boxed(answer)
    return tidy(answer if boxed is None else boxed)


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
    (wanted, expected), (letter, found) = _without_letter(reference), _without_letter(answer)
    if wanted and letter and wanted != letter:
        return False
    if expected and found:
        return _are_equal_values(expected, found, prompt)
    if wanted != letter or expected or not found:  # a letter alone, and the same one with something behind it
        return wanted == letter
    tree, words = parsed(found), _Words(_problem(prompt))
    if tree and all(words.are_known(each.words) for each in tree.walk() if isinstance(each, Quantity)):
        return True
    text = _plain(found)
    return text in _LAST_CHOICES or text in _plain(tidy(words.problem))


def _are_equal_values(reference: str, answer: str, prompt: Prompt) -> bool:
    from megatron_dppo.rewards.math.equality import Comparison

    reference, answer = (_MEANING.get(_plain(text).replace(" ", "_"), text) for text in (reference, answer))
    if is_same_text(reference, answer):
        return True
    are_same = _are_same_words(reference, answer)
    if are_same is not None:
        return are_same
    expected, found = parsed(reference), parsed(answer)
    if expected is None or found is None:
        return False
    words = _Words(_problem(prompt))
    with _ONE_AT_A_TIME:
        return Comparison(words.are_known, words.are_compatible).answers(expected, found)


def _plain(text: str) -> str:
    return " ".join(unwrap(text).casefold().split())


def _problem(prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return "\n".join(str(message.get("content")) for message in prompt.messages or ())


def _are_same_words(reference: str, answer: str) -> bool | None:
    r"""Return whether two tidy texts are the same words, else `None`.

    Words are letters inside `\text{...}` and similar commands, or four letters and more.
    """
    one, other = (_plain(text).removesuffix(".") for text in (reference, answer))
    if not _WORDS.fullmatch(one) or not _WORDS.fullmatch(other):
        return None
    is_text = any(unwrap(text) != text for text in (reference, answer))
    if (not is_text and min(len(one), len(other)) < _FEWEST_LETTERS) or max(len(one), len(other)) == 1:
        return None
    one, other = _ARTICLE.sub("", one), _ARTICLE.sub("", other)
    return one == other or (other.partition(", ")[0] == one and bool(_SENTENCE.fullmatch(other)))


def _without_letter(text: str) -> tuple[str | None, str]:
    r"""Split a choice: `\textbf{(C)}\ 12` and `\text{C. } 12` are C and 12. A letter alone has no rest."""
    if lone := _CHOICE.fullmatch(unwrap(text).strip()):
        return lone[1], ""
    found = _LETTERED.match(text)
    if not found or (found[4] and not found["style"]) or re.search(r"\([A-J]\)", unwrap(found["rest"])):
        return None, text
    rest = f"{'' if found['end'] else found['style'] or ''}{found['rest']}"
    return (None, text) if rest.count("{") != rest.count("}") else (found[2] or found[3] or found[4], rest)


# Words, units and marks around a value


@dataclass(frozen=True)
class _Words:
    """Decides which words may stand around a value: units, a few nouns, and the words of the problem."""

    problem: str

    def are_known(self, words: Sequence[str]) -> bool:
        """Return whether all words may be left out."""
        return all(map(self._may_be_left_out, _said(words)))

    def are_compatible(self, reference: Quantity, answer: Quantity) -> bool:
        """Return whether words and units are equal, or those that only one side has may be left out."""
        one, other = (_said(each.words) | ({each.mark} - {"", "%"}) for each in (reference, answer))
        has_unit = not (one | other).isdisjoint(_UNITS.values())
        is_part = not one or not other or one <= other or other <= one
        is_mixed = has_unit and "%" in (reference.mark, answer.mark)
        return is_part and not is_mixed and all(map(self._may_be_left_out, one ^ other))

    def _may_be_left_out(self, word: str) -> bool:
        return word.partition("^")[0] in _UNITS.values() or word in _NOUNS or word in _words_in(self.problem)


@lru_cache(maxsize=64)
def _words_in(text: str) -> frozenset[str]:
    return frozenset(map(_singular, re.findall(r"[^\W\d_]{3,}", text.casefold())))


def _singular(word: str) -> str:
    return word.removesuffix("s") if len(word) > 2 and not word.endswith("ss") and "/" not in word else word


def _said(words: Sequence[str]) -> frozenset[str]:
    """Return words in one spelling, with units by their symbols."""
    text = " ".join(map(_spelled, words))
    text = re.sub(r"(\S+) per (\S+)", lambda match: _UNITS.get(f"{match[1]}/{match[2]}", match[0]), text)
    text = re.sub(r"(?:square|sq) (\S+)", r"\1^2", text)
    return frozenset(re.sub(r"(?:cubic|cu) (\S+)", r"\1^3", text).split())


def _spelled(word: str) -> str:
    base, hat, power = word.partition("^")
    base = _singular(_SYNONYMS.get(base.casefold(), base))
    return f"{_UNITS.get(base, base)}{hat}{power}"


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}` or `\fbox{...}`, or `None` without one.

    It always takes one pass over the text. Braces pair as in TeX, `\{` and `\}` are text, and unpaired braces
    outside the box do not matter. If boxes are nested, it returns the innermost.
    """
    open_since: list[int | None] = []  # start of each open brace's content; None if it is not a box
    found: tuple[int, int] | None = None
    for piece in _PIECE.finditer(text):
        if piece["open"]:
            open_since.append(piece.end() if piece["box"] else None)
        elif piece[0] == "}" and open_since:
            start = open_since.pop()
            if start is not None and (found is None or start > found[0]):
                found = (start, piece.start())
    return None if found is None else text[slice(*found)]
