"""The `math` reward: pairs that were labelled by hand, and strange texts of a policy."""

import itertools
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
from megatron_dppo.rewards.math.reward import last_boxed
from megatron_dppo.types import Message, Prompt
from tests.support.hostile_answers import HOSTILE

DATA = Path(__file__).parent / "data"
PAIRS = tomllib.loads((DATA / "math_pairs.toml").read_text())
DISAGREEMENTS = PAIRS.pop("disagreements")["right"]
PAIRS |= tomllib.loads((DATA / "math_spellings.toml").read_text())
RIGHT = RewardResult(1.0, {"has_answer": 1.0, "is_too_hard": 0.0})
WRONG = RewardResult(0.0, {"has_answer": 1.0, "is_too_hard": 0.0})
TOO_HARD = RewardResult(0.0, {"has_answer": 1.0, "is_too_hard": 1.0})
NO_ANSWER = RewardResult(0.0, {"has_answer": 0.0, "is_too_hard": 0.0})


def asked(answer: str, problem: str = "What is it?") -> Prompt:
    return Prompt("p", answer, "test", text=problem)


def scored(reference: str, answer: str, problem: str = "What is it?") -> RewardResult:
    response = answer if "boxed" in answer else rf"\boxed{{{answer}}}"
    return math_reward(asked(reference, problem), response, "stop")


@pytest.mark.parametrize("kind", PAIRS)
def test_agreement_with_hand_labels(kind: str) -> None:
    right, wrong = PAIRS[kind]["right"], PAIRS[kind]["wrong"]
    assert len(right) + len(wrong) >= 20 and len(wrong) >= (len(right) + len(wrong)) / 3
    results = {label: [scored(*pair) for pair in PAIRS[kind][label]] for label in ("right", "wrong")}
    assert [pair for pair, result in zip(right, results["right"], strict=True) if result != RIGHT] == []
    assert [pair for pair, result in zip(wrong, results["wrong"], strict=True) if result.value != 0.0] == []
    assert all(not result.info["is_too_hard"] for result in results["wrong"])


def test_known_disagreements_with_labels_score_0() -> None:
    assert [pair for pair in DISAGREEMENTS if scored(*pair).value != 0.0] == []


@pytest.mark.parametrize(
    ("reference", "answer", "problem"),
    [
        ("5", r"5\text{ red marbles}", "How many red marbles are left in the bag?"),
        ("12", r"12\text{ frogs}", "A pond has frogs. How many?"),
        (r"4\text{ grandmothers}", "4", "Two grandmothers meet two grandmothers."),
        ("5", r"\text{Area}=5", "What is the area?"),
        ("D", r"\text{(D) I and II only}", "(C) I only (D) I and II only"),
        ("B", r"\textbf{(B)}\ \text{a rhombus}", r"\textbf{(A) } a square \textbf{(B) } a rhombus"),
    ],
)
def test_words_of_the_problem_may_stand_behind_a_value(reference: str, answer: str, problem: str) -> None:
    assert scored(reference, answer, problem) == RIGHT
    assert scored(reference, answer).value == 0.0


@pytest.mark.parametrize(
    "before", ["twice", "half of the", "multiple of", "inverse of", "square of", "not", "under"]
)
def test_words_before_a_value_are_never_left_out(before: str) -> None:
    """They change the number, also if they occur in the problem."""
    assert scored("5", rf"\text{{{before} }}5", f"Is it {before} it?").value == 0.0


def test_messages_have_the_words_of_a_problem() -> None:
    messages = (Message(role="user", content="How many tulips are there?"),)
    prompt = Prompt("p", "5", "test", messages=messages)
    assert math_reward(prompt, r"\boxed{5\text{ tulips}}", "stop") == RIGHT
    assert math_reward(prompt, r"\boxed{5\text{ roses}}", "stop") == WRONG


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
    *("9^{9^{9^9}}", "(9!)!", "(9^{999})^{999}", r"9^\frac{99999}{1}", r"9^\binom{99}{50}", "2^{999999}"),
    *(
        "10000!!".removesuffix("!") + "^2",
        r"e^{9^{9}}",
        r"\pi^{10^9}",
        r"\sinh(10^{9})",
        r"\frac{1}{9^{99999}}",
    ),
]
NOT_UNDERSTOOD = ["9!!!!", "(" * 20 + "1", "9^9^9", "9^{9}^{9}", "9^9!", "9^{99}!", "9**9**9"]


REGIONS = [  # the same points, then other points
    (r"[1,2]\cup[2,4]", r"[1,4]", r"[1,2)\cup(2,4]"),
    (r"(0,5)", r"(0,3]\cup(2,5)", r"(0,3)\cup(3,5)"),
    (r"(0,1)\cup\{1\}\cup(1,6)", r"(0,6)", r"(0,6]"),
    (r"(-\infty,4)\cap(1,9)", r"1<x<4", r"1<x\le 4"),
    (r"x\ne 3", r"(3,\infty)\cup(-\infty,3)", r"\mathbb{R}"),
    (r"\mathbb{R}\setminus\{1,7\}", r"(-\infty,1)\cup(1,7)\cup(7,\infty)", r"(-\infty,1)\cup(7,\infty)"),
    (r"x\ge 6", r"[6,\infty)", r"[6,\infty]"),
    (r"\sqrt{8}<x<9", r"(2\sqrt{2},9)", r"(2\sqrt{2}+10^{-900},9)"),
]


@pytest.mark.parametrize(("reference", "same", "other"), REGIONS)
def test_parts_of_the_real_line_are_compared_by_their_points(reference: str, same: str, other: str) -> None:
    assert scored(reference, same) == scored(same, reference) == RIGHT
    assert scored(reference, other) == scored(other, reference) == WRONG


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("(5,2)", "(6,3)"),  # pairs of numbers, and no empty intervals
        ("(4,4)", "(7,7)"),
        (r"(7,\sqrt{7}\sqrt{7})", "(4,4)"),
        ("9<x<1", "8<x<1"),
        (r"x\in(1,3)", r"1<y<3"),
        (r"(-\infty,b)\cup(b,\infty)", r"(-\infty,b]\cup(b,\infty)"),
    ],
)
def test_similar_looking_points_are_wrong(reference: str, answer: str) -> None:
    assert scored(reference, answer) == WRONG


def test_both_signs_are_chosen_for_a_whole_item() -> None:
    assert scored(r"\frac{3\pm\sqrt{7}}{2}", r"\frac{(3\pm\sqrt7)}{2}") == RIGHT
    assert scored(r"(2\pm 1, 5)", "(1,5),(3,5)") == RIGHT
    assert scored(r"\{2\pm 1\}", r"\{3,1\}") == RIGHT
    assert scored(r"(2\pm 1, 5)", "(1,3,5)") == WRONG
    assert scored(r"x\pm 7\in\{4\pm 2\}", r"x+7\in\{6,2\}, x-7\in\{6,2\}") == RIGHT
    assert scored(r"x\pm 7\in\{4\pm 2\}", r"x+7\in\{6,2\}, x-7\in\{2\}") == WRONG
    assert scored(r"2\pm 3\mp 4", "1,3") == WRONG  # which signs belong together is not read


def test_items_in_any_order_are_counted() -> None:
    assert scored("4,6,6,4,9", r"\frac{12}{2},9,6,4,\sqrt{16}") == RIGHT
    assert scored("4,6,6", "4,4,6") == scored("4,6,6", "4,6") == scored("4,6", "4,6,6") == WRONG
    assert scored(r"\{4,6,6\}", r"\{6,4,4\}") == RIGHT
    assert scored(r"\emptyset", r"\{4,8\}") == scored(r"\{4,8\}", r"\emptyset") == WRONG


def test_a_base_may_be_left_out_by_the_answer_only() -> None:
    assert scored("2310_4", "2310_{4}") == scored("2310_4", "2310") == RIGHT
    assert scored("2310", "2310_4") == scored("2310_4", "2310_5") == scored("2310_4", "2311") == WRONG
    assert scored("2340_4", "2340") == WRONG  # a digit that base 4 does not have


def test_letters_of_a_figure_are_one_name() -> None:
    assert scored(r"m\angle KLM", r"m\angle K L M") == scored(r"\angle KLM=70^\circ", r"70^\circ") == RIGHT
    assert scored(r"\angle klm", r"\angle mlk") == scored(r"\triangle KLM", r"\angle KLM") == WRONG


def test_two_numbers_above_each_other_may_be_a_column() -> None:
    column = r"\begin{pmatrix}6\\8\end{pmatrix}"
    assert scored(column, r"\binom{6}{8}") == scored(r"\binom{12/2}{8}", column) == RIGHT
    assert scored(column, r"\binom{8}{6}") == scored(r"\binom{6}{8}", "(6,8)") == scored(column, "28") == WRONG
    assert scored(r"\begin{pmatrix}6&8\end{pmatrix}", r"\binom{6}{8}") == WRONG


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations("abkmnpqtxyz", 2), ("x_1", "x_2")])
def test_signs_of_variables_are_chosen_apart(one: str, other: str) -> None:
    product = rf"{one}\cdot {other}"
    assert scored(product, f"|{product}|") == scored(f"|{product}|", f"-{product}") == WRONG
    assert scored(rf"\max({one},{other})", rf"\frac{{{one}+{other}+|{other}-{one}|}}{{2}}") == RIGHT


def test_equations_that_hold_for_some_points_only_differ() -> None:
    assert scored(r"|xy|+xy=0", "3xy=0") == scored("3xy=0", r"|xy|+xy=0") == WRONG
    assert scored(r"|xy|+xy=0", r"3xy=-3|xy|") == RIGHT


@pytest.mark.parametrize("answer", [r"\frac{1}{0}\approx 7", r"x=\ln 0\approx 7", r"\frac{0}{0}<x"])
def test_an_approximation_of_nothing_is_wrong(answer: str) -> None:
    assert scored("7", answer) == WRONG


def test_limits_of_powers_roots_and_factorials() -> None:
    assert scored("0", r"\sqrt[5]{0}") == scored(r"-\sqrt[5]{9}", r"(-9)^{3/15}") == RIGHT
    assert (
        scored("0", r"\sqrt[5]{\sqrt{3}\sqrt{3}-3}").value == 0.0
    )  # a ball around 0 has no root with an index
    assert scored("1", "0^0") == scored("0", r"0^{-2}") == WRONG
    assert scored("-1", "(-1)^{777777777}") == TOO_HARD
    assert scored(r"\frac{\sqrt{\pi}}{2}", r"(\frac{1}{2})!") == scored("1", r"(\frac{1}{2})!") == WRONG
    assert scored("4", r"\lfloor 4+i\rfloor") == scored("7", r"\max(7,i)") == WRONG  # only of real numbers


def test_functions_without_a_definition_are_compared_as_written() -> None:
    assert scored("f(x)+2", " f(x) + 2") == RIGHT
    assert scored("f(x)+2", "2+f(x)") == WRONG


@pytest.mark.parametrize("answer", TOO_LARGE)
def test_numbers_with_too_many_digits_are_wrong_and_counted(answer: str) -> None:
    assert scored("5", answer) == TOO_HARD


@pytest.mark.parametrize("answer", NOT_UNDERSTOOD)
def test_ambiguous_powers_and_factorials_are_wrong(answer: str) -> None:
    assert scored("5", answer) == WRONG


def test_uncomputable_value_is_right_if_the_text_is_equal() -> None:
    for answer in ("2^{82589933}-1", "9^{9^{9^9}}", "2" * 2000):
        assert scored(answer, f" {answer} ") == RIGHT


# Values next to the limits: accepted ones, then refused ones.
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
    "what is approximated, rounded or cut off to the places that are written": (
        (
            r"\frac{2}{3}",
            r"\frac{2}{3}\approx0.67 \frac{2}{3}\approx0.66",
            r"\frac{2}{3}\approx0.68 \frac{2}{3}\approx0.8",
        ),
        ("200", r"200\approx200 200\approx200.0", r"200\approx201 200\approx199"),
    ),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_the_tolerances_of_numbers_from_both_sides(limit: str) -> None:
    for reference, accepted, refused in LIMITS[limit]:
        assert [text for text in accepted.split() if scored(reference, text) != RIGHT] == []
        assert [text for text in refused.split() if scored(reference, text) != WRONG] == []


def test_comparisons_with_too_much_work_are_given_up() -> None:
    assert scored(r"10^{-4000}(\frac{1}{3}+x)+\pi", r"\pi+10^{-4000}(x+\frac{1}{3})") == TOO_HARD
    assert scored(r"\sqrt{2}+x", "(a+b+c+d+e+f+g)^{60}") == WRONG
    assert scored(r"\sqrt{2}+x", r"x+\sqrt{2}") == RIGHT
    sines = [rf"\sin({place}+10^{{-2000}})" for place in range(45)]
    began = time.process_time()
    assert scored("+".join(reversed(sines)), "+".join(sines)) == TOO_HARD
    assert time.process_time() - began < 60.0


def test_any_thread_may_ask() -> None:
    """FLINT has one precision for the whole process."""
    pairs = [(r"\frac{1}{2}", "0.5", RIGHT), (r"\sqrt{8}", r"2\sqrt{2}", RIGHT), ("x^2", "x^3", WRONG)]
    pairs.append((r"\pi", r"\pi+10^{-1000}", WRONG))
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(scored, *zip(*[pair[:2] for pair in pairs * 20], strict=True))
        assert list(found) == [result for *_, result in pairs * 20]
    assert scored(r"\frac{1}{2}", "0.5") == RIGHT


@pytest.mark.parametrize("box", [r"\boxed{5}", r"\fbox{5}", r"\fbox{4}, no, \boxed{5}", r"\boxed{\fbox{5}}"])
def test_boxes_of_each_kind_count(box: str) -> None:
    assert math_reward(asked("5"), f"so {box}", "stop") == RIGHT


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
def test_text_before_the_last_box_is_ignored(before: str, content: str) -> None:
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
