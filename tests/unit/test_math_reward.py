"""The `math` reward: pairs that were labelled by hand, and whatever a policy may write instead of an answer."""

import math
import re
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards import RewardPool, RewardRequest, RewardResult, math_reward, reward
from megatron_dppo.rewards.math.compare import OutOfTimeError, within
from megatron_dppo.rewards.math.reward import last_boxed
from megatron_dppo.rewards.math.text import is_small
from megatron_dppo.types import Prompt
from tests.support.hostile_answers import HOSTILE

DATA = Path(__file__).parent / "data"
PAIRS = tomllib.loads((DATA / "math_pairs.toml").read_text())
DISAGREEMENTS = PAIRS.pop("disagreements")["right"]
PAIRS |= tomllib.loads((DATA / "math_spellings.toml").read_text())
RIGHT = RewardResult(1.0, {"has_answer": 1.0, "is_too_hard": 0.0})
WRONG = RewardResult(0.0, {"has_answer": 1.0, "is_too_hard": 0.0})
TOO_HARD = RewardResult(0.0, {"has_answer": 1.0, "is_too_hard": 1.0})
NO_ANSWER = RewardResult(0.0, {"has_answer": 0.0, "is_too_hard": 0.0})


def asked(answer: str) -> Prompt:
    return Prompt("p", answer, "test", text="What is it?")


def scored(reference: str, answer: str) -> RewardResult:
    return math_reward(asked(reference), answer if "boxed" in answer else rf"\boxed{{{answer}}}", "stop")


@pytest.mark.parametrize("kind", PAIRS)
def test_agreement_with_hand_labels(kind: str) -> None:
    right, wrong = PAIRS[kind]["right"], PAIRS[kind]["wrong"]
    assert len(right) + len(wrong) >= 20 and len(wrong) >= (len(right) + len(wrong)) / 3
    results = {label: [scored(*pair) for pair in PAIRS[kind][label]] for label in ("right", "wrong")}
    assert [pair for pair, result in zip(right, results["right"], strict=True) if result != RIGHT] == []
    assert [pair for pair, result in zip(wrong, results["wrong"], strict=True) if result.value != 0.0] == []
    assert all(not result.info["is_too_hard"] for result in results["wrong"])


def test_where_labels_and_reward_disagree_is_known() -> None:
    assert [pair for pair in DISAGREEMENTS if scored(*pair).value != 0.0] == []


def test_a_response_that_was_cut_off_earns_nothing() -> None:
    assert math_reward(asked("5"), r"\boxed{5}", "stop") == RIGHT
    assert math_reward(asked("5"), r"\boxed{5}", "length") == NO_ANSWER


@pytest.mark.parametrize("answer", ["", "  ", "$ $", r"\boxed{}"])
def test_a_prompt_without_an_answer_is_at_fault(answer: str) -> None:
    with pytest.raises(RewardError, match="prompt p: found answer "):
        math_reward(asked(answer), r"\boxed{5}", "stop")


def test_a_reference_may_stand_in_a_box_and_in_dollars() -> None:
    for reference in (r"$\frac{1}{2}$", r"\boxed{\frac{1}{2}}", r"$\boxed{\frac12}$", r"\(\frac{1}{2}\)"):
        assert scored(reference, "0.5") == RIGHT


TOO_LARGE = [
    *("9^{9^{9^9}}", "(9!)!", "9!!!!", "(9^{999})^{999}", "2^{99999}", "(" * 20 + "1"),
    *("9^9^9", "9^{9}^{9}", "9^9!", "9^{99}!", r"9^\frac{99999}{1}", r"9^\binom{99}{50}", "9**9**9"),
    r"10^\frac{3^{2023}-1}{2\cdot 3^{2023}}",
]


@pytest.mark.parametrize("answer", TOO_LARGE)
def test_what_cannot_be_computed_is_wrong_and_counted(answer: str) -> None:
    assert scored("5", answer) == TOO_HARD


def test_what_cannot_be_computed_is_still_right_as_it_stands() -> None:
    for answer in ("2^{82589933}-1", "9^{9^{9^9}}", "2" * 2000):
        assert scored(answer, f" {answer} ") == RIGHT


# The values beside the limits: accepted ones, then refused ones.
LIMITS = {
    "half a unit or a cut-off at the sixth place": (
        (r"\frac{2}{3}", "0.666666 0.666667", "0.666665 0.666668"),
        (r"\frac{1}{3}", "0.333333", "0.333332 0.333334"),
        (r"\sqrt{2}", "1.414213 1.414214", "1.414212 1.414215"),
        ("1.2345678", "1.234568", "1.234567 1.234569"),
    ),
    "six places at least": ((r"\frac{1}{3}", "0.333333", "0.33333"), (r"\sqrt{2}", "1.414214", "1.41421")),
    "six digits at least": ((r"\frac{1}{300000}", "0.00000333333", "0.0000033333 0.000003333 0.000003"),),
    "a hundred places at most": ((r"\frac{1}{3}", f"0.{'3' * 100}", f"0.{'3' * 101}"),),
    "a hundredth of what is approximated": (
        (r"\frac{1}{3}", r"\frac{1}{3}\approx0.3366", r"\frac{1}{3}\approx0.337 \frac{1}{3}\approx0.31"),
        ("200", r"200\approx201 200\approx199", r"200\approx203 200\approx197"),
    ),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_the_tolerances_of_numbers_from_both_sides(limit: str) -> None:
    for reference, accepted, refused in LIMITS[limit]:
        assert [text for text in accepted.split() if scored(reference, text) != RIGHT] == []
        assert [text for text in refused.split() if scored(reference, text) != WRONG] == []


TOO_SLOW = r"\pi+10^{-4000}(x+\frac{1}{3})!"  # Gamma to fifty thousand bits


def test_a_comparison_that_takes_a_second_is_given_up() -> None:
    began = time.process_time()
    assert scored(r"10^{-4000}(\frac{1}{3}+x)!+\pi", TOO_SLOW) == TOO_HARD
    assert time.process_time() - began < 5.0
    assert scored(r"\sqrt{2}+x", "(a+b+c+d+e+f+g)^{60}") == WRONG
    assert scored(r"\sqrt{2}+x", r"x+\sqrt{2}") == RIGHT


def test_any_thread_may_ask() -> None:
    """Signals, which end a long comparison in the main thread, are delivered nowhere else."""
    pairs = [(r"\frac{1}{2}", "0.5", RIGHT), (r"\sqrt{8}", r"2\sqrt{2}", RIGHT), ("x^2", "x^3", WRONG)]
    slow = r"10^{-4000}(\frac{1}{3}+x)!+\pi"
    with ThreadPoolExecutor(4) as threads:
        too_slow = threads.submit(scored, slow, TOO_SLOW)
        found = threads.map(scored, *zip(*[pair[:2] for pair in pairs * 20], strict=True))
        assert list(found) == [result for *_, result in pairs * 20]
        assert too_slow.result() == TOO_HARD
    assert scored(r"\frac{1}{2}", "0.5") == RIGHT


@pytest.mark.parametrize("is_main", [True, False])
def test_a_time_limit_holds_in_every_thread(is_main: bool) -> None:
    def spin() -> None:
        while True:
            pass

    def end() -> str:
        with pytest.raises(OutOfTimeError):
            within(0.2, spin)
        return within(60.0, lambda: "done")

    if is_main:
        assert end() == "done"
    else:
        with ThreadPoolExecutor(2) as threads:
            assert [found.result() for found in [threads.submit(end) for _ in range(2)]] == ["done", "done"]


@pytest.mark.parametrize("box", [r"\boxed{5}", r"\fbox{5}", r"\fbox{4}, no, \boxed{5}", r"\boxed{\fbox{5}}"])
def test_boxes_of_each_kind_count(box: str) -> None:
    assert math_reward(asked("5"), f"so {box}", "stop") == RIGHT


@pytest.mark.parametrize(
    "text", ["2^{10}", "(n+1)!", "x^{2}+y^{2}", "2^{n+1}", "(x-1)^2(x+2)^3", "10^{-9}", "6!"]
)
def test_what_answers_look_like_is_small(text: str) -> None:
    assert is_small(text)


def test_hostile_responses_end_in_time_in_one_worker() -> None:
    """None takes the worker with it, so none is a sample lost."""
    assert len(HOSTILE) >= 100
    requests = [RewardRequest(asked("408"), response, "stop") for response in HOSTILE]
    began = time.monotonic()
    with RewardPool("math", num_workers=1, timeout_s=300.0, memory_mb=512) as pool:
        results = pool.score(requests)
    assert [
        (place, result) for place, result in enumerate(results) if not isinstance(result, RewardResult)
    ] == []
    assert {result.value for result in results if isinstance(result, RewardResult)} == {0.0}
    assert time.monotonic() - began < 1200.0


PIECES = st.sampled_from([r"\boxed{", r"\boxed {", "{", "}", r"\{", r"\}", "\\", "5", "x", " ", r"\boxed"])


@given(st.lists(PIECES).map("".join))
def test_a_box_is_found_where_braces_balance(text: str) -> None:
    found = last_boxed(text)
    if found is None:
        assert not any(_balances(text[start:]) for start in _opened(text))
    else:
        start = max(start for start in _opened(text) if _balances(text[start:]))
        assert text[start:].startswith(found + "}")


def _opened(text: str) -> list[int]:
    """Where contents of boxes start; a backslash takes the next character with it."""
    return [match.end() for match in re.finditer(r"\\boxed\s*\{|\\.", text) if "boxed" in match.group()]


def _balances(rest: str) -> bool:
    depth = 1
    for piece in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(piece.group(), 0)
        if depth == 0:
            return True
    return False


CONTENT = st.recursive(st.sampled_from(["5", "x", r"\{", r"\}"]), lambda inner: inner.map("{{{}}}".format))


@given(st.text(max_size=60), CONTENT)
def test_whatever_stands_before_the_last_box_does_not_matter(before: str, content: str) -> None:
    assert last_boxed(f"{before} \\boxed{{{content}}} so be it") == content


@pytest.mark.parametrize("piece", ["{", "}", r"\boxed{", r"\boxed{}", "\\", r"\boxed"])
def test_a_box_is_found_in_a_megabyte_in_one_pass(piece: str) -> None:
    began = time.process_time()
    last_boxed(piece * ((1 << 20) // len(piece)))
    assert time.process_time() - began < 3.0


@given(st.integers(-(10**30), 10**30), st.integers(-(10**30), 10**30))
def test_whole_numbers_of_any_size(reference: int, answer: int) -> None:
    assert scored(str(reference), f"{answer:,}").value == float(reference == answer)
    assert scored(f"{reference:,}", str(reference)) == RIGHT


def test_the_worker_imports_the_algebra_before_its_memory_is_limited() -> None:
    assert reward("math") is math_reward
    with RewardPool("math", num_workers=1, timeout_s=300.0, memory_mb=64) as pool:
        (result,) = pool.score([RewardRequest(asked(r"\frac{\sqrt{2}}{2}"), r"\boxed{1/\sqrt{2}}", "stop")])
    assert result == RIGHT


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 60), st.integers(2, 60), st.integers(1, 200), st.integers(1, 200))
def test_powers_and_factorials_are_compared_exactly(base: int, other: int, power: int, count: int) -> None:
    reference = rf"\frac{{{base}^{{{power}}}}}{{{count}!}}"
    same = rf"\frac{{{count + 1}\cdot {base}^{{{power}}}}}{{{count + 1}!}}"
    assert scored(reference, same).value == 1.0
    near = Fraction(other**power, math.factorial(count))
    is_equal = near == Fraction(base**power, math.factorial(count))
    assert scored(reference, rf"\frac{{{other}^{{{power}}}}}{{{count}!}}").value == float(is_equal)
    assert scored(rf"1-{reference}", rf"1-\frac{{{base}^{{{power + 1}}}}}{{{count}!}}").value == 0.0


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 1000), st.sampled_from([r"\pi", "e", r"\sqrt{2}", r"\ln 3", "x", r"\sin y"]))
def test_a_difference_of_any_size_counts(places: int, term: str) -> None:
    assert scored(term, rf"{term}+10^{{-{places}}}").value == 0.0
    assert scored(rf"{term}\cdot 10^{{-{places}}}", rf"2{term}\cdot 10^{{-{places}}}").value == 0.0
    assert scored(rf"{term}+10^{{-{places}}}", rf"10^{{-{places}}}+{term}").value == 1.0
