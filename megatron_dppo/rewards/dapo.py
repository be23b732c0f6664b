r"""DAPO's reward: is what follows the last "Answer:" the reference answer, letter for letter?

The rule of the DAPO paper (arXiv:2503.14476) and its code: the last 300 characters, the last line that says
"Answer:", and equality of texts once both are spelled as Minerva's evaluation (arXiv:2206.14858) spells them.
"""

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
    """1.0 where the text after the last "Answer:" among the last 300 characters is the answer; otherwise 0.0.

    A box alone earns nothing. Info `has_answer` is 1.0 where the model ended a response that says "Answer:".

    Raises:
        RewardError: The prompt's own answer is empty.
    """
    reference = normalized(prompt.answer)
    if not reference:
        raise RewardError(
            f"prompt {prompt.id}: found answer {prompt.answer!r}; expected text or LaTeX. "
            "Correct the answer column, or leave the prompt out."
        )
    found = _ANSWER.findall(response[-_LAST:]) if finish_reason == "stop" else []
    is_right = bool(found) and normalized(found[-1]) == reference
    return RewardResult(float(is_right), {"has_answer": float(bool(found))})


def normalized(answer: str) -> str:
    r"""Return the spelling in which answers are compared.

    What follows the last `=`; of that, what stands between dollar signs, if any; without articles, spaces,
    units and the commands that only set text; `\frac12` and `\sqrt2` with braces; digits without commas.
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
