"""The `dapo` reward: the last "Answer:" of the last 300 characters."""

import pytest

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards import RewardResult, dapo_reward
from megatron_dppo.rewards.text import normalize
from megatron_dppo.types import Prompt
from tests.support.hostile_answers import HOSTILE

RIGHT = RewardResult(1.0, {"has_answer": 1.0})
WRONG = RewardResult(0.0, {"has_answer": 1.0})
NO_ANSWER = RewardResult(0.0, {"has_answer": 0.0})


def asked(answer: str) -> Prompt:
    return Prompt("p", answer, "test", text="What is it?")


@pytest.mark.parametrize(
    "response",
    [
        "Answer: 34",
        "so it is.\n\nANSWER :34",
        "Answer: 33\nno,\nanswer: 34",
        "Answer: $34$",
        "Answer: $34$.",
        r"Answer: \boxed{34}",
        r"Answer: $\boxed{34}$",
        r"Answer: 34^\circ",
        "Answer: x = 34",
        "Answer: 34 degrees",
        "Answer:\n34",
        "x" * 1000 + "Answer: 34",
        "Answer: 34\n" + "x" * 280,
    ],
)
def test_right(response: str) -> None:
    assert dapo_reward(asked("34"), response, "stop") == RIGHT


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("Answer: 35", WRONG),
        ("Answer: 34\nAnswer: 35", WRONG),
        ("Answer: 34.", WRONG),  # letter for letter, as in DAPO
        ("Answer: 34.0", WRONG),
        ("Answer: 034", WRONG),
        ("Answer: **34**", WRONG),
        ("34", NO_ANSWER),
        (r"\boxed{34}", NO_ANSWER),
        ("The answer is 34", NO_ANSWER),
        ("Answer:", NO_ANSWER),
        ("Answer: 34\n" + "x" * 300, NO_ANSWER),
        ("", NO_ANSWER),
    ],
)
def test_wrong(response: str, expected: RewardResult) -> None:
    assert dapo_reward(asked("34"), response, "stop") == expected


def test_a_response_that_was_cut_off_earns_nothing() -> None:
    assert dapo_reward(asked("34"), "Answer: 34", "length") == NO_ANSWER


@pytest.mark.parametrize(
    ("answer", "spelling"),
    [
        ("1,234", "1234"),
        (r"1{,}234", "1234"),
        (r"1,\!234", "1234"),
        (r"\$ 5", "5"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"3\sqrt{5}", r"3\sqrt{5}"),
        ("(1, 2)", "(1,2)"),
        (r"x \text{ and } 2", "x,2"),
        (r"\text{east}", "east"),
        (r"\textbf{A}", "A"),
        (r"12 \text{ cm}^2", "12"),
        (r"12 \mbox{ m}", "12"),
        ("a = b = 7", "7"),
        ("in words $5$ and more", "5"),
        ("an apple", "apple"),
        ("  5  ", "5"),
    ],
)
def test_spelling(answer: str, spelling: str) -> None:
    assert normalize(answer) == spelling
    assert dapo_reward(asked(spelling), f"Answer: {answer}", "stop") == RIGHT


def test_a_prompt_without_an_answer_is_at_fault() -> None:
    with pytest.raises(RewardError, match="prompt p: found answer ''"):
        dapo_reward(asked(""), "Answer: 5", "stop")


def test_hostile_responses_are_wrong() -> None:
    assert {dapo_reward(asked("408"), response, "stop").value for response in HOSTILE} == {0.0}
