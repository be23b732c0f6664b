"""Rewards that compare an answer with the reference as text: DAPO's, and the sanity task's."""

import re

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.base import RewardResult, register
from megatron_dppo.types import FinishReason, Prompt

_LAST = 300  # characters of the response that count
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

_UNITS = (
    *("degrees", "cm", "gm", "km", "inches", "feet", "meters", "mph", "hours", "minutes", "pounds", "units"),
    *("dollars", "cents", "square", "points", "digits", "integers", "ways", "edges", "meals", "students"),
    *("multiples", "sue", "childrentickets"),
)
_DROPPED = re.compile(
    r"""
    an?[ ]                              # articles, and words that end like them
    | \\(?:\$|[ ]|;|l?dots) | ,\\! | \{,\}
    | [ ] | "
    | \^(?:\\circ|\{\\circ\})
    | \\mathrm\{th\}
    """,
    re.VERBOSE,
)
_AND = re.compile(r",?\\text\{and\}")
_UNIT = re.compile("|".join(_UNITS))
_NO_TEXT = re.compile(r"\\text\{[sm.]?\}(?:\^[23])?")
_IN_DOLLARS = re.compile(r"\$(.*?)\$")
_WRAPPED = (re.compile(r"\\(?:text(?:bf)?|overline)\{(.*?)\}"), re.compile(r"\\boxed\{(.*)\}"))
_SHORT = ((re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"), (re.compile(r"sqrt([^{])"), r"sqrt{\1}"))


@register("dapo", reads="answer_line")
def dapo_reward(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Return 1.0 if the text after the last "Answer:" in the last 300 characters is the answer, otherwise 0.0.

    This is the rule of the DAPO paper (arXiv:2503.14476) and its code. Both texts are normalised like Minerva's
    evaluation (arXiv:2206.14858). A box without "Answer:" earns nothing. Info `has_answer` is 1.0 if the model
    ended the response and it contains "Answer:".

    Raises:
        RewardError: The prompt's reference answer is empty.
    """
    reference = normalize(prompt.answer)
    if not reference:
        raise RewardError(
            f"prompt {prompt.id}: found answer {prompt.answer!r}; expected text or LaTeX. "
            "Correct the answer column, or remove the prompt."
        )
    found = _ANSWER.findall(response[-_LAST:]) if finish_reason == "stop" else []
    is_right = bool(found) and normalize(found[-1]) == reference
    return RewardResult(float(is_right), {"has_answer": float(bool(found))})


def normalize(answer: str) -> str:
    r"""Return normalised text for the comparison.

    It keeps only the text after the last `=` and, if there are dollar signs, only the text between them. It
    drops articles, spaces, units and commands that only set text. It adds braces to `\frac12` and `\sqrt2`, and
    removes commas from digits.
    """
    text = _DROPPED.sub("", answer.rpartition("=")[2].replace(".$", "$")).replace("mbox", "text")
    text = _NO_TEXT.sub("", _UNIT.sub("", _AND.sub(",", text)))
    in_dollars = _IN_DOLLARS.search(text)
    text = in_dollars[1] if in_dollars else text
    for wrapped in _WRAPPED:
        text = wrapped.sub(r"\1", text)
    for short, whole in _SHORT:
        text = short.sub(whole, text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    return without_commas if without_commas.isdigit() else text.strip()


_DIGITS = frozenset("0123456789")


@register("arithmetic")
def arithmetic_reward(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Return 1.0 if the response ends with `#` and the answer's digits, lowest first, otherwise 0.0.

    `w3 8 4 0 + w0 6 3 0 + w17 # 8 0 4 0` means 408: zeros above the highest digit do not matter. Nothing may
    follow the digits after the first `#`, and the model must have ended the response itself. Info `has_answer`
    is 1.0 if there is such a number, right or wrong.

    Raises:
        RewardError: The prompt's reference answer is not a decimal number.
    """
    if not prompt.answer or not _DIGITS.issuperset(prompt.answer):
        raise RewardError(
            f"prompt {prompt.id}: found answer {prompt.answer!r}; expected a decimal number. "
            "Correct the answer column, or choose another data.reward."
        )
    tokens = response.split()
    digits = tokens[tokens.index("#") + 1 :] if "#" in tokens else []
    has_answer = bool(digits) and _DIGITS.issuperset(digits) and finish_reason == "stop"
    # Compare as text: a response may have more digits than int() accepts.
    is_right = has_answer and _significant("".join(reversed(digits))) == _significant(prompt.answer)
    return RewardResult(float(is_right), {"has_answer": float(has_answer)})


def _significant(number: str) -> str:
    return number.lstrip("0")
