r"""The reward of mathematics problems: is what the last box holds the reference answer?"""

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.answer_bounds import MAX_LENGTH, is_small
from megatron_dppo.rewards.answer_text import (
    are_same_words,
    fraction,
    has_numbers_apart,
    integer,
    is_set_and_pair,
    tidy,
    without_spaces,
)
from megatron_dppo.rewards.answer_units import split_unit
from megatron_dppo.rewards.base import RewardResult, register
from megatron_dppo.rewards.boxed import last_boxed
from megatron_dppo.types import FinishReason, Prompt

_PER_CENT = r"\%"


@register("math", loads="megatron_dppo.rewards.math_compare", reads="boxed")
def math_reward(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    r"""1.0 where the last whole `\boxed{...}` equals `prompt.answer`; otherwise 0.0.

    Text and whole numbers are compared as such, the rest by math-verify. Info `has_answer` is 1.0 where the
    model ended a response that has a box, `is_too_hard` where it holds what is not computed with: it is wrong.

    Raises:
        RewardError: The prompt's own answer is empty.
    """
    boxed = last_boxed(prompt.answer)
    reference = tidy(prompt.answer if boxed is None else boxed)
    if not reference:
        raise RewardError(
            f"prompt {prompt.id}: found answer {prompt.answer!r}; expected text or LaTeX. "
            "Correct the answer column, or leave the prompt out."
        )
    answer = last_boxed(response) if finish_reason == "stop" else None
    is_right, is_too_hard = (False, False) if answer is None else _compared(reference, answer)
    info = {"has_answer": float(answer is not None), "is_too_hard": float(is_too_hard)}
    return RewardResult(float(is_right), info)


def _compared(reference: str, answer: str) -> tuple[bool, bool]:
    """Return whether an answer is right, and whether it is too hard to compare."""
    from megatron_dppo.rewards.math_compare import TooHardError

    if len(answer) > MAX_LENGTH + len(reference):
        return False, True
    try:
        return _is_right(reference, tidy(answer)), False
    except TooHardError:
        return False, True


def _is_right(reference: str, answer: str) -> bool:
    """Compare two tidy answers, by the cheapest comparison that can tell."""
    if not answer or without_spaces(reference) == without_spaces(answer):
        return bool(answer)
    numbers = integer(reference), integer(answer)
    if None not in numbers:
        return numbers[0] == numbers[1]
    are_same = are_same_words(reference, answer)
    if are_same is not None:
        return are_same
    (reference, unit), (answer, other) = split_unit(fraction(reference)), split_unit(fraction(answer))
    if (unit and other and unit != other) or has_numbers_apart(answer) or is_set_and_pair(reference, answer):
        return False
    are_percentages = reference.endswith(_PER_CENT), answer.endswith(_PER_CENT)
    if any(are_percentages):
        bare = reference.removesuffix(_PER_CENT).rstrip(), answer.removesuffix(_PER_CENT).rstrip()
        if all(are_percentages) or _are_equal(*bare):
            return _are_equal(*bare)
    return _are_equal(reference, answer)


def _are_equal(reference: str, answer: str) -> bool:
    from megatron_dppo.rewards.math_compare import TooHardError, are_equal

    numbers = integer(reference), integer(answer)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if not (is_small(reference) and is_small(answer)):
        raise TooHardError
    return are_equal(reference, answer)
