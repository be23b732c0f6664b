"""Rewards in `[data]`: sums, the values of right and wrong, thinking, and long responses."""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.config.load import dump_config, load_config
from megatron_dppo.config.sections import DataConfig
from megatron_dppo.environments import Episode
from megatron_dppo.errors import ConfigError, RewardError
from megatron_dppo.rewards import (
    REWARDS,
    RewardChoice,
    RewardFault,
    RewardPool,
    RewardRequest,
    RewardResult,
    problems_with,
)
from megatron_dppo.rewards.choice import after_thinking, build_reward
from megatron_dppo.rollout.scoring import Fault, OverlongShaping, RewardPools, ScoredTimeOuts, Scorer
from megatron_dppo.runtime.concurrency import all_of
from megatron_dppo.types import FinishReason, Prompt, Sample
from tests.support.samples import InProcessScorer, make_sample
from tests.support.word_tokenizers import TOKENIZER

PROMPT = Prompt("p", "34", "test", text="What is it?")
MINE = "rewards_of_mine:brevity"


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's module in the working directory, where workers find it too."""
    (tmp_path / "rewards_of_mine.py").write_text(
        "from megatron_dppo.rewards import RewardResult\n"
        "def brevity(prompt, response, finish_reason):\n"
        "    return RewardResult(1.0 / (1 + len(response)), {'length': len(response)})\n"
        "def broken(prompt, response, finish_reason):\n"
        "    raise KeyError('lost')\n"
        "def text(prompt, response, finish_reason):\n"
        "    return '1.0'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def problems(choice: RewardChoice) -> list[str]:
    return [str(problem) for problem in problems_with(choice)]


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_a_reward_alone_is_the_registered_one(name: str) -> None:
    assert build_reward(RewardChoice(name)) is REWARDS[name]
    assert RewardChoice(name).text == name


def test_right_and_wrong_are_worth_what_the_run_says() -> None:
    dapo = build_reward(RewardChoice("dapo", values=(-1.0, 1.0)))
    assert dapo(PROMPT, "Answer: 34", "stop") == RewardResult(1.0, {"has_answer": 1.0})
    assert dapo(PROMPT, "Answer: 35", "stop") == RewardResult(-1.0, {"has_answer": 1.0})
    assert dapo(PROMPT, "Answer: 34", "length") == RewardResult(-1.0, {"has_answer": 0.0})


@settings(deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_the_two_values_come_out_exactly(wrong: float, right: float) -> None:
    dapo = build_reward(RewardChoice("dapo", values=(wrong, right)))
    assert [dapo(PROMPT, f"Answer: {n}", "stop").value for n in (35, 34)] == [wrong, right]


def test_a_function_of_the_users_has_no_rules() -> None:
    function = build_reward(RewardChoice({MINE: 1.0, "dapo": 1.0}, values=(-1.0, 1.0), thinking="require"))
    assert function(PROMPT, "x</think>", "stop").info[MINE.partition(":")[2]] == 0.1


@pytest.mark.parametrize(
    ("response", "rest"),
    [
        ("so</think>Answer: 34", "Answer: 34"),
        ("<think>so</think>Answer: 34", "Answer: 34"),
        ("</think>", ""),
        ("Answer: 34", None),
        ("Answer: 34</think>", ""),
        ("a</think>b</think>Answer: 34", None),
        ("</ think>Answer: 34", None),
        ("", None),
    ],
)
def test_only_what_follows_the_one_end_of_thinking_counts(response: str, rest: str | None) -> None:
    assert after_thinking(response) == rest
    dapo = build_reward(RewardChoice("dapo", thinking="require"))
    is_right = rest == "Answer: 34"
    info = {"has_answer": float(is_right), "ends_thinking": float(rest is not None)}
    assert dapo(PROMPT, response, "stop") == RewardResult(float(is_right), info)


def test_a_weighted_sum_and_its_parts() -> None:
    function = build_reward(RewardChoice({"math": 1.0, "dapo": 0.25, MINE: -2.0}, values=(-1.0, 1.0)))
    response = r"\boxed{34} 456789"
    value, info = function(PROMPT, response, "stop").value, function(PROMPT, response, "stop").info
    assert value == pytest.approx(1.0 - 0.25 - 2.0 / (1 + len(response)))
    assert info == {
        "math": 1.0,
        "math/has_answer": 1.0,
        "math/is_too_hard": 0.0,
        "dapo": -1.0,
        "dapo/has_answer": 0.0,
        "brevity": 1.0 / (1 + len(response)),
        "brevity/length": len(response),
    }


def test_a_part_that_fails_is_the_failure_of_the_sum() -> None:
    with pytest.raises(
        RewardError, match=r"prompt p: the reward raised KeyError: 'lost' \(in broken, rewards_of"
    ):
        build_reward(RewardChoice({"dapo": 1.0, "rewards_of_mine:broken": 0.0}))(PROMPT, "", "stop")
    with pytest.raises(RewardError, match=r"prompt p: .*str; expected .*RewardResult"):
        build_reward(RewardChoice({"rewards_of_mine:text": 1.0}))(PROMPT, "", "stop")


CHOICES = [
    RewardChoice("math"),
    RewardChoice(MINE),
    RewardChoice("dapo", (-1.0, 1.0), "require"),
    RewardChoice({"math": 1.0, MINE: 0.5}),
    RewardChoice({"dapo": 1.0}, (-0.1, 1e-9), "require"),
    RewardChoice({"math": 1.0, MINE: 0.5}, retries=3),
    RewardChoice(f"verl:{MINE}", retries=1),
]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_reaches_its_workers(choice: RewardChoice) -> None:
    assert RewardChoice.read(choice.text) == choice
    assert problems(choice) == []


def test_a_sum_is_scored_in_workers() -> None:
    choice = RewardChoice({"dapo": 1.0, MINE: 0.5}, values=(-1.0, 1.0), thinking="require")
    request = RewardRequest(PROMPT, "so</think>Answer: 34", "stop")
    with RewardPool(choice, num_workers=1, timeout_s=300.0, memory_mb=64) as pool:
        (result,) = pool.score([request])
    assert result == build_reward(choice)(PROMPT, request.response, "stop")


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (RewardChoice({}), r"data.reward: found {}; expected at least one reward"),
        (RewardChoice({"math": 0.0}), "expected at least one reward with a weight that is not 0"),
        (RewardChoice({"maths": 1.0}), "data.reward: found 'maths'; .*Did you mean 'math'"),
        (RewardChoice({MINE: 1.0, "b:brevity": 1.0}), "two rewards called 'brevity'"),
        (
            RewardChoice("math", (1.0, 0.0)),
            r"data.reward_values: found \[1.0, 0.0\]; expected two increasing",
        ),
        (RewardChoice("math", (0.0, float("nan"))), "expected two increasing numbers"),
        (
            RewardChoice(MINE, (-1.0, 1.0)),
            "data.reward_values: found .*; expected no such setting without one of",
        ),
        (RewardChoice(MINE, thinking="require"), "data.thinking: found 'require'; expected no such setting"),
    ],
)
def test_a_choice_that_cannot_serve(choice: RewardChoice, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        raise ConfigError(list(problems_with(choice)))


def test_choices_in_a_config_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[data]\nreward = {math = 1, "my.rewards:brevity" = 0.5}\nreward_values = [-1, 1]\n')
    config = load_config([file], ["data.thinking=require"])
    assert config.data.reward == {"math": 1.0, "my.rewards:brevity": 0.5}
    assert (config.data.reward_values, config.data.thinking) == ((-1.0, 1.0), "require")
    file.write_text(dump_config(config))
    assert load_config([file]) == config
    assert load_config([file], ["data.reward=dapo"]).data.reward == "dapo"
    json.dumps(config.model_dump(mode="json"))


@pytest.mark.parametrize("value", ["3", "true", "['math']", "{math = '1'}", "{math = true}"])
def test_invalid_reward_choice_has_one_problem(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], [f"data.reward={value}"])
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].where == "data.reward"
    assert caught.value.problems[0].expected == "a name in quotes, or a table of names and their finite weights"


def scored_by(
    scorer: Scorer, answered: Sequence[tuple[Prompt, Sample, Episode | None]]
) -> list[Sample | Fault]:
    return asyncio.run(all_of(scorer.score(*each) for each in answered))


def test_the_environment_alone_gives_the_rewards() -> None:
    """No worker starts, and a response that its environment left without a reward is dropped by name."""
    choice = RewardChoice("environment")
    assert problems(choice) == [] and RewardChoice.read(choice.text).is_environment
    with closing(RewardPools(DataConfig(reward_workers=1), [choice.text])) as pools:
        pools.start({})
        scorer = Scorer(TOKENIZER, pools.of(choice.text), needs_routes=False, validate_routes=None)
        sample = dataclasses.replace(make_sample([1] * 4, 2), reward=None)
        episodes = [Episode("so", reward=0.25), Episode("so", reward=None), None]
        rewarded, *dropped = scored_by(scorer, [(PROMPT, sample, episode) for episode in episodes])
    assert isinstance(rewarded, Sample) and rewarded.reward == 0.25
    for fault in dropped:
        assert isinstance(fault, Fault) and fault.reason == "reward_failed"
        assert "prompt p: found no reward of its environment; expected one, since data.reward =" in fault.found


@pytest.mark.parametrize(
    ("num_tokens", "added"),
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)],
)
def test_overlong_penalty_by_length(num_tokens: int, added: float) -> None:
    assert OverlongShaping(20480, 4096, 1.0)(num_tokens) == added  # as the paper has it
    assert OverlongShaping(20480, 4096, 0.5)(num_tokens) == added / 2


def test_long_responses_are_lowered_where_they_are_scored() -> None:
    def always(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        return RewardResult(1.0, {"x": 2.0})

    def rewarded(scorer: Scorer) -> list[tuple[float | None, dict[str, float]]]:
        unscored = [dataclasses.replace(make_sample([1] * length, 2), reward=None) for length in (4, 10, 12)]
        answered = [(PROMPT, sample, None) for sample in unscored]
        samples = [each for each in scored_by(scorer, answered) if isinstance(each, Sample)]
        return [(sample.reward, dict(sample.reward_info)) for sample in samples]

    plain = Scorer(TOKENIZER, InProcessScorer(always), False, None)
    assert rewarded(plain) == [(1.0, {"x": 2.0})] * 3
    shaped = rewarded(dataclasses.replace(plain, overlong=OverlongShaping(10, 4, 2.0)))
    assert shaped == [(1.0 + added, {"x": 2.0, "overlong_penalty": added}) for added in (0.0, -1.0, -2.0)]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("value", [None, -0.25, 0.0])
def test_a_time_out_gets_the_value_that_is_set_and_is_dropped_else(value: float | None) -> None:
    """Other faults are dropped in any case, and so is a trial whose reward times out."""
    name = "tests.unit.bad_rewards:told"
    options = DataConfig(reward=name, reward_timeout_s=3.0, reward_if_timed_out=value)
    with closing(RewardPools(options, [name])) as pools:

        async def scored() -> list[RewardResult | RewardFault]:
            responses = ("ab", "sleep", "raise")
            return [await pools.of(name).score_one(RewardRequest(PROMPT, each, "stop")) for each in responses]

        sound, late, failed = asyncio.run(scored())
        with pytest.raises(RewardError, match="scores no response"):
            pools.start({name: dataclasses.replace(PROMPT, answer="sleep")})
    assert isinstance(failed, RewardFault) and failed.kind == "reward_failed"
    parts = {"has_prompt": 1.0, "is_cut": 0.0}
    if value is None:
        assert isinstance(late, RewardFault) and late.kind == "reward_timed_out"
        assert sound == RewardResult(2.0, parts)
    else:
        assert late == RewardResult(value, {"timed_out": 1.0})
        assert sound == RewardResult(2.0, parts | {"timed_out": 0.0})


def test_the_time_outs_of_a_group_get_the_value_and_pay_for_their_length() -> None:
    class Late:
        async def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
            none, late = RewardFault("reward_out_of_memory", "full"), RewardFault("reward_timed_out", "late")
            return [RewardResult(1.0, {"x": 2.0}), late, none, late]

        async def score_one(self, request: RewardRequest) -> RewardResult | RewardFault:
            raise AssertionError("the reward gets groups")

    overlong = OverlongShaping(10, 4, 2.0)
    scorer = Scorer(TOKENIZER, ScoredTimeOuts(Late(), -0.5), False, None, overlong, scores_groups=True)
    answers = [
        (dataclasses.replace(make_sample([1] * length, 2), reward=None), None) for length in (4, 4, 4, 10)
    ]
    one, two, dropped, four = asyncio.run(scorer.score_group(PROMPT, answers))
    assert isinstance(dropped, Fault) and dropped.reason == "reward_out_of_memory"
    found = [(each.reward, dict(each.reward_info)) for each in (one, two, four) if isinstance(each, Sample)]
    no_penalty, late = {"overlong_penalty": 0.0}, {"timed_out": 1.0}
    assert found == [
        (1.0, {"x": 2.0, "timed_out": 0.0} | no_penalty),
        (-0.5, late | no_penalty),
        (-1.5, late | {"overlong_penalty": -1.0}),
    ]
