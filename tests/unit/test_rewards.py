import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.errors import ConfigError, RewardError
from megatron_dppo.rewards import REWARDS, RewardResult, arithmetic_reward, problem_with, register, reward
from megatron_dppo.types import FinishReason, Prompt
from tests.support.refusals import refused

PROMPT = Prompt("12*34", "408", "test", text="<bos> 2 1 * 4 3 =")
FINISH_REASONS: list[FinishReason] = ["stop", "length", "abort"]


@pytest.mark.parametrize(
    "response",
    ["w3 8 4 0 + w0 6 3 0 + w17 # 8 0 4 0", "# 8 0 4", "# 8 0 4 0 0 0 0", "  #\t8\n0 4 0 "],
)
def test_the_right_number_at_the_end(response: str) -> None:
    assert arithmetic_reward(PROMPT, response, "stop") == RewardResult(1.0, {"has_answer": 1.0})


@pytest.mark.parametrize(
    ("response", "has_answer"),
    [
        ("# 8 0 4 1", 1.0),
        ("# 4 0 8", 1.0),  # highest digit first
        ("", 0.0),
        ("#", 0.0),
        ("8 0 4 0", 0.0),
        ("# 8 0 4 0 +", 0.0),
        ("# 8 0 4 0 # 8 0 4 0", 0.0),
        ("# 8 0 4 0 w3", 0.0),
        ("# 804 0", 0.0),  # not a token of one digit
        ("#8 0 4 0", 0.0),
        ("# ² ٣", 0.0),
    ],
)
def test_anything_else_is_wrong(response: str, has_answer: float) -> None:
    assert arithmetic_reward(PROMPT, response, "stop") == RewardResult(0.0, {"has_answer": has_answer})


@pytest.mark.parametrize("finish_reason", ["length", "abort"])
def test_a_response_that_the_model_did_not_end_is_wrong(finish_reason: FinishReason) -> None:
    assert arithmetic_reward(PROMPT, "# 8 0 4 0", finish_reason).value == 0.0


def test_zero() -> None:
    prompt = Prompt("0*7", "0", "test", text="x")
    assert arithmetic_reward(prompt, "# 0 0 0 0", "stop").value == 1.0
    assert arithmetic_reward(prompt, "# 0 0 1 0", "stop").value == 0.0
    assert arithmetic_reward(prompt, "#", "stop").value == 0.0


def test_more_digits_than_int_takes() -> None:
    assert arithmetic_reward(PROMPT, "# 8 0 4" + " 0" * 9000, "stop").value == 1.0


@pytest.mark.parametrize("answer", ["", "four", "-3", "4.0"])
def test_an_answer_that_is_no_number(answer: str) -> None:
    with pytest.raises(RewardError, match="prompt x: found answer"):
        arithmetic_reward(Prompt("x", answer, "test", text="x"), "# 1", "stop")


@given(st.integers(0, 9999), st.integers(0, 9999))
def test_right_means_equal(answer: int, given_number: int) -> None:
    response = "# " + " ".join(reversed(f"{given_number:04d}"))
    result = arithmetic_reward(Prompt("x", str(answer), "test", text="x"), response, "stop")
    assert result.value == float(answer == given_number)


@pytest.mark.parametrize("name", sorted(REWARDS))
@settings(deadline=None)  # the first call loads the reward's libraries
@given(response=st.text(max_size=40), finish_reason=st.sampled_from(FINISH_REASONS))
def test_every_reward_takes_garbage(name: str, response: str, finish_reason: FinishReason) -> None:
    result = reward(name)(PROMPT, response, finish_reason)
    assert math.isfinite(result.value)
    assert all(math.isfinite(value) for value in result.info.values())


def test_the_registry() -> None:
    assert reward("arithmetic") is arithmetic_reward is REWARDS["arithmetic"]


def test_an_unknown_name_lists_the_options() -> None:
    with refused("data.reward", "'aritmetic'", "'arithmetic'?"):
        reward("aritmetic")
    with refused("data.reward", "'zzz'", "'arithmetic'"):
        reward("zzz")


def test_a_function_is_named_by_its_module() -> None:
    assert reward("megatron_dppo.rewards.text:arithmetic_reward") is arithmetic_reward
    for name, words in {
        "no_such_package.rewards:score": "no module 'no_such_package'; expected a module of an installed",
        "megatron_dppo.no_such_module:score": "no module 'megatron_dppo.no_such_module'",
        "megatron_dppo.errors.deeper:score": "no module 'megatron_dppo.errors.deeper'",
        "megatron_dppo.rewards.text:nothing": "'nothing' is not there; expected a function of megatron",
        "megatron_dppo.rewards.text:_DIGITS": "'_DIGITS' is no function",
        "megatron_dppo:a.b": "expected 'package.module:function'. Correct the name.",
        "megatron_dppo:": "expected 'package.module:function'",
        ":score": "expected 'package.module:function'",
        ".relative:score": "expected 'package.module:function'",
    }.items():
        with pytest.raises(ConfigError, match=f"^data.reward: found .*{words}"):
            reward(name)


def test_missing_dependency_of_a_reward_module_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_dependency'"):
        reward("needs_more:score")


def test_a_name_is_checked_without_running_the_users_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_mine.py").write_text("raise AssertionError('it ran')")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])  # as a console script has it
    assert problem_with("of_mine:score") is problem_with("folder.inner:score") is None
    assert problem_with("of_yours:score") is not None


def test_importing_rewards_loads_no_tensor_library_and_no_algebra() -> None:
    program = (
        "import megatron_dppo.rewards, sys; sys.exit(bool({'torch', 'numpy', 'sympy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ConfigError, match="'arithmetic'"):
        register("arithmetic")(lambda prompt, response, finish_reason: RewardResult(1.0))
    assert reward("arithmetic") is arithmetic_reward
    with pytest.raises(ConfigError, match="'environment'"):
        register("environment")(lambda prompt, response, finish_reason: RewardResult(1.0))


def test_the_registry_is_read_only() -> None:
    with pytest.raises(TypeError):
        REWARDS["mine"] = arithmetic_reward  # pyright: ignore[reportIndexIssue]
