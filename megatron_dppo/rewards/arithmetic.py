"""The reward of the sanity task: is the number after `#` the product?"""

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.base import RewardResult, register
from megatron_dppo.types import FinishReason, Prompt

_DIGITS = frozenset("0123456789")


@register("arithmetic")
def arithmetic_reward(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Return 1.0 if the response ends with `#` and the answer's digits, lowest first, otherwise 0.0.

    `w3 8 4 0 + w0 6 3 0 + w17 # 8 0 4 0` answers 408: zeros above the highest digit do not matter. Nothing may
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
