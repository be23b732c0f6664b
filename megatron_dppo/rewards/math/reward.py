r"""The reward of mathematics problems: is the content of the last box the reference answer?"""

import math
import re

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.base import RewardResult, register
from megatron_dppo.rewards.math.text import MAX_LENGTH, integer, is_small, spell_out, tidy, without_spaces
from megatron_dppo.rewards.math.tree import NotUnderstoodError
from megatron_dppo.rewards.math.words import (
    Parts,
    are_compatible,
    are_same_words,
    as_value,
    is_same_text,
    split_words,
)
from megatron_dppo.types import FinishReason, Prompt

_PIECE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)  # an escaped brace does not count
_RATIO = re.compile(r"[0-9.]+(?: ?: ?[0-9.]+)+")
_CLOCK = re.compile(r"0?([0-9]|1[0-9]|2[0-4]):([0-9]{2})")


@register("math", loads="megatron_dppo.rewards.math.compare", reads="boxed")
def math_reward(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    r"""Return 1.0 if the last complete `\boxed{...}` equals `prompt.answer`, otherwise 0.0.

    Any thread may call it. Info `has_answer` is 1.0 if the model ended the response and it has a box. Info
    `is_too_hard` is 1.0 if the box could not be compared within the limits of time and digits.

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
    is_right, is_too_hard = (False, False) if answer is None else _compare(reference, answer)
    info = {"has_answer": float(answer is not None), "is_too_hard": float(is_too_hard)}
    return RewardResult(float(is_right), info)


def is_matched_as_text(answer: str) -> bool:
    """Return whether `math` reads no value in a reference answer, so that only the same text is right.

    Words and letters of a choice count as readable. It takes about 0.2 ms, and never more than a few.
    """
    from megatron_dppo.rewards.math.parser import parse

    boxed = last_boxed(answer)
    reference = tidy(answer if boxed is None else boxed)
    if integer(reference) is not None or are_same_words(reference, reference):
        return False
    try:
        parts = split_words(as_value(reference))
        value = spell_out(parts.value)
        if not value:
            return not (parts.words or parts.unit or parts.letter)
        if _CLOCK.fullmatch(value) or _ratio(value) is not None:
            return False
        if not is_small(value):
            return True
        parse(value)
    except NotUnderstoodError:
        return True
    return False


def _compare(reference: str, answer: str) -> tuple[bool, bool]:
    """Return whether an answer is right, and whether it is too hard to compare."""
    from megatron_dppo.rewards.math.compare import TooHardError

    if len(answer) > MAX_LENGTH + len(reference):
        return False, True
    try:
        return _is_right(reference, tidy(answer)), False
    except NotUnderstoodError:
        return False, False
    except TooHardError:
        return False, True


def _is_right(reference: str, answer: str) -> bool:
    """Compare two tidy answers, by the cheapest comparison that applies."""
    if not answer or is_same_text(reference, answer):
        return bool(answer)
    numbers = integer(reference), integer(answer)
    if None not in numbers:
        return numbers[0] == numbers[1]
    are_same = are_same_words(reference, answer)
    if are_same is not None:
        return are_same
    wanted, found = split_words(as_value(reference)), split_words(as_value(answer))
    if wanted.letter and found.letter:
        is_letter_alone = not (_has_value(wanted) and _has_value(found))
        if wanted.letter != found.letter or is_letter_alone:
            return wanted.letter == found.letter
    if not are_compatible(wanted, found):
        return False
    if not wanted.value and not found.value:
        return wanted.words == found.words and bool(wanted.words)
    return _are_equal_values(wanted, found)


def _has_value(parts: Parts) -> bool:
    return re.sub(r"[(){} ]|\\[a-z]+", "", parts.value) != parts.letter


def _are_equal_values(reference: Parts, answer: Parts) -> bool:
    from megatron_dppo.rewards.math.compare import TooHardError, are_equal

    values = spell_out(reference.value), spell_out(answer.value)
    if not all(values):
        return False
    has_sign = reference.per_cents > 0, answer.per_cents > 0
    if has_sign[0] == has_sign[1]:
        if without_spaces(values[0]) == without_spaces(values[1]):
            return True
        numbers = integer(values[0]), integer(values[1])
        if None not in numbers:
            return numbers[0] == numbers[1]
    clocks = _CLOCK.fullmatch(values[0]), _CLOCK.fullmatch(values[1])
    if clocks[0] and clocks[1]:
        return clocks[0].groups() == clocks[1].groups()
    ratios = _ratio(values[0]), _ratio(values[1])
    if ratios[0] is not None and ratios[1] is not None:
        return ratios[0] == ratios[1]
    if not all(map(is_small, values)):
        raise TooHardError
    return are_equal(*values, per_cents=has_sign)


def _ratio(text: str) -> tuple[int, ...] | None:
    """Return a ratio of integers in lowest terms, or `None` if a text is not a ratio."""
    if not _RATIO.fullmatch(text) or "." in text:
        return None
    numbers = [int(number) for number in text.split(":")]
    divisor = math.gcd(*numbers) or 1
    return tuple(number // divisor for number in numbers)


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
