"""Rewards as users have them: numbers, coroutines, functions that fail at times, verl's and slime's."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dppo.data.prompts.prompts import PromptsDigest, load_prompts
from megatron_dppo.errors import DataError
from megatron_dppo.rewards import (
    RewardChoice,
    RewardFault,
    RewardPool,
    RewardRequest,
    RewardResult,
    problem_with,
)
from megatron_dppo.types import Prompt

METADATA = {"difficulty": 3, "tags": ["a", "b"], "nested": {"unit": None}}
PROMPT = Prompt("p7", "12", "gsm", text="3 * 4 =", metadata=METADATA)
MODULE = """
import asyncio, pathlib
import numpy as np
from megatron_dppo.errors import RewardError
from megatron_dppo.rewards import RewardResult

def number(prompt, response, finish_reason): return len(response)
def flag(prompt, response, finish_reason): return response == prompt.answer
def scalar(prompt, response, finish_reason): return np.float32(0.5)
async def waits(prompt, response, finish_reason):
    await asyncio.sleep(0.01)
    return 2 * prompt.metadata["difficulty"]
loops = []
async def one_loop(prompt, response, finish_reason):
    loops.append(asyncio.get_running_loop())
    return float(all(loop is loops[0] for loop in loops))
async def never(prompt, response, finish_reason): await asyncio.sleep(600)

def _count(name):
    file = pathlib.Path(f"calls_{name}")
    file.write_text(file.read_text() + "x" if file.exists() else "x")
    return len(file.read_text())
def fails_twice(prompt, response, finish_reason):
    if prompt.id == "never" or _count(response) % 3: raise ConnectionError("the judge is busy")
    return 1.0
async def fails_twice_later(*arguments): return fails_twice(*arguments)
def refuses(prompt, response, finish_reason):
    _count(response)
    raise RewardError("its label is no number")
def wrong_type(prompt, response, finish_reason):
    _count(response)
    return "1"

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, ground_truth) == ("gsm", "12")
    right = solution_str.endswith(ground_truth)
    return {"score": right - 0.5, "acc": right, "difficulty": extra_info["difficulty"], "pred": solution_str}
async def compute_score_later(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    await asyncio.sleep(0)
    return float(solution_str == ground_truth)
def no_score(data_source, solution_str, ground_truth, extra_info=None): return {"reward": 1}
async def rm(args, sample, **kwargs):
    assert sample.prompt == "3 * 4 =" and sample.metadata["tags"] == ["a", "b"]
    return (sample.response == sample.label) + (sample.status == type(sample).Status.TRUNCATED)

def ranks(prompts, responses, finish_reasons):
    assert len(prompts) == len(finish_reasons) == len(responses)
    return [sorted(responses).index(response) + finish_reasons.count("length") for response in responses]
async def ranks_later(*lists):
    await asyncio.sleep(0)
    return np.array(ranks(*lists), dtype=np.float32)
def first_is_nan(prompts, responses, finish_reasons): return [float("nan"), RewardResult(2.0, {"n": 1}), "x"]
def one_short(prompts, responses, finish_reasons): return [1.0] * (len(responses) - 1)
def a_number(prompts, responses, finish_reasons): return 1.0
def fails_once(prompts, responses, finish_reasons):
    if _count("group") == 1: raise ConnectionError("the judge is busy")
    return [float(len(response)) for response in responses]
async def never_done(prompts, responses, finish_reasons): await asyncio.sleep(600)
def compute_score_batch(data_sources, solution_strs, ground_truths, extra_infos):
    assert {*data_sources} == {"gsm"} and extra_infos[0] is not extra_infos[1]
    rows = zip(solution_strs, ground_truths, extra_infos)
    return [{"score": s == g, "n": e["difficulty"], "pred": s} for s, g, e in rows]
async def batched_rm(args, samples, **kwargs):
    best = max(len(sample.response) for sample in samples)
    return [{"score": len(sample.response) / best} for sample in samples]
"""


@pytest.fixture(autouse=True)
def rewards_of_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_users.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def score(
    name: str | dict[str, float],
    *responses: str,
    finish: Any = "stop",
    retries: int = 0,
    timeout_s: float = 300.0,
) -> list[RewardResult | RewardFault]:
    """Score in a worker, as a run does."""
    prefix, _, function = name.rpartition(":") if isinstance(name, str) else ("", "", "")
    path = name if isinstance(name, dict) else f"{prefix}{':' if prefix else ''}rewards_of_users:{function}"
    choice = RewardChoice(path, retries=retries)
    with RewardPool(choice, num_workers=1, timeout_s=timeout_s, memory_mb=0) as pool:
        requests = [RewardRequest(PROMPT, response, finish) for response in responses]
        return pool.score_together(requests) if choice.scores_groups else pool.score(requests)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("number", [2.0, 0.0, 5.0]),
        ("flag", [1.0, 0.0, 0.0]),
        ("scalar", [0.5, 0.5, 0.5]),
        ("waits", [6.0, 6.0, 6.0]),
        ("one_loop", [1.0, 1.0, 1.0]),
        ("verl:compute_score_later", [1.0, 0.0, 0.0]),
        ("slime:rm", [1.0, 0.0, 0.0]),
    ],
)
def test_a_number_or_a_coroutine_is_a_reward(name: str, expected: list[float]) -> None:
    assert score(name, "12", "", "is 12") == [RewardResult(value) for value in expected]


def test_the_numbers_of_verls_dict_are_reported_and_a_part_of_a_sum_may_be_any_form() -> None:
    info = {"acc": 1.0, "difficulty": 3.0}
    assert score("verl:compute_score", "is 12") == [RewardResult(0.5, info)]
    parts = {
        "verl:rewards_of_users:compute_score": 2.0,
        "rewards_of_users:waits": 0.25,
        "slime:rewards_of_users:rm": -1.0,
    }
    (found,) = score(parts, "is 12", finish="length")
    assert isinstance(found, RewardResult) and found.value == 2 * 0.5 + 0.25 * 6 - 1 * 1
    assert found.info["compute_score/acc"] == 1.0 and found.info["rm"] == 1.0
    (fault,) = score("verl:no_score", "12")
    assert isinstance(fault, RewardFault) and "prompt p7: found a dict with ['reward']" in fault.message


@pytest.mark.parametrize("name", ["fails_twice", "fails_twice_later"])
def test_failed_reward_calls_are_retried_and_counted(name: str) -> None:
    assert score(name, "a", "b", retries=2) == [RewardResult(1.0, {"num_retries": 2.0})] * 2
    (fault,) = score(name, "c", retries=1)
    assert isinstance(fault, RewardFault) and "the judge is busy" in fault.message
    assert Path("calls_c").read_text() == "xx"
    (found,) = score({f"rewards_of_users:{name}": 0.5, "math": 1.0}, "d", retries=2)
    assert isinstance(found, RewardResult) and found.info[f"{name}/num_retries"] == 2.0


@pytest.mark.parametrize("name", ["refuses", "wrong_type"])
def test_faults_that_stay_are_not_tried_again(name: str) -> None:
    (fault,) = score(name, "a", retries=5)
    assert isinstance(fault, RewardFault) and fault.kind == "reward_failed"
    assert Path("calls_a").read_text() == "x"


def test_all_calls_of_a_response_have_one_time_limit() -> None:
    for name, retries in (("never", 0), ("fails_twice", 9)):
        (fault,) = score(name, "a", retries=retries, timeout_s=0.25)
        assert isinstance(fault, RewardFault) and fault.kind == "reward_timed_out"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("batch:ranks", [2.0, 0.0, 1.0]),
        ("batch:ranks_later", [2.0, 0.0, 1.0]),
        ("slime-batch:batched_rm", [1.0, 0.5, 0.25]),
    ],
)
def test_a_reward_of_a_group_gets_all_responses_at_once(name: str, expected: list[float]) -> None:
    assert score(name, "dddd", "aa", "b") == [RewardResult(value) for value in expected]


def test_verls_batch_function_and_a_part_of_a_sum_that_is_of_a_group() -> None:
    right, wrong = RewardResult(1.0, {"n": 3.0}), RewardResult(0.0, {"n": 3.0})
    assert score("verl-batch:compute_score_batch", "12", "1", "12") == [right, wrong, right]
    parts = {"batch:rewards_of_users:ranks": 0.5, "rewards_of_users:number": -1.0}
    found = score(parts, "cc", "a", finish="length")
    assert found == [
        RewardResult(1.5 - 2.0, {"ranks": 3.0, "number": 2.0}),
        RewardResult(1.0 - 1.0, {"ranks": 2.0, "number": 1.0}),
    ]
    with_fault = score({"batch:rewards_of_users:first_is_nan": 1.0, "rewards_of_users:number": 1.0}, *"abc")
    assert [type(each).__name__ for each in with_fault] == ["RewardFault", "RewardResult", "RewardFault"]


def test_faults_of_a_group_name_the_response_or_the_group() -> None:
    nan, fine, text = score("batch:first_is_nan", "a", "b", "c")
    assert isinstance(nan, RewardFault) and "prompt p7, response 1 of 3: found {'value': nan}" in nan.message
    assert fine == RewardResult(2.0, {"n": 1.0})
    assert isinstance(text, RewardFault) and "response 3 of 3: found a str" in text.message
    for name, found in (("one_short", "found 1 scores; expected a list of 2"), ("a_number", "found a float")):
        faults = score(f"batch:{name}", "a", "b")
        assert [isinstance(each, RewardFault) and found in each.message for each in faults] == [True, True]
    late = score("batch:never_done", "a", "b", timeout_s=0.25)
    assert [isinstance(each, RewardFault) and each.kind for each in late] == ["reward_timed_out"] * 2
    assert isinstance(late[0], RewardFault) and "prompt p7, a group of 2" in late[0].message


def test_a_group_is_tried_again_as_one() -> None:
    found = score("batch:fails_once", "a", "bb", retries=2)
    assert found == [RewardResult(value, {"num_retries": 1.0}) for value in (1.0, 2.0)]
    assert Path("calls_group").read_text() == "xx"


@pytest.mark.parametrize(
    "name", ["verl:compute_score", "slime:no_such_module_of_anyone:rm", "verl:", "trl:a.b:c"]
)
def test_a_path_behind_a_prefix_is_checked(name: str) -> None:
    problem = problem_with(name)
    assert problem is not None and problem.where == "data.reward"
    assert problem_with("verl:rewards_of_users:compute_score") is None


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("column", "other"), [("metadata", "extra_info"), ("extra_info", None)])
@pytest.mark.parametrize(("suffix", "write"), [("parquet", write_parquet), ("jsonl", write_lines)])
def test_metadata_of_a_prompt_file(
    column: str,
    other: str | None,
    suffix: str,
    write: Callable[[Path, list[dict[str, Any]]], None],
    tmp_path: Path,
) -> None:
    file = tmp_path / f"p.{suffix}"
    cells = [{"index": 4, "split": "train", "more": [1.5]}, None, {"index": 5, "split": "x", "more": []}]
    rows = [{"prompt": f"{n} =", "answer": str(n), column: cell} for n, cell in enumerate(cells)]
    if other is not None:
        rows = [{**row, other: {"index": 9}} for row in rows]
    write(file, rows)
    found = load_prompts(file, "prompt", "answer")
    assert [prompt.metadata for prompt in found] == [
        cells[0],
        None if other is None else {"index": 9},
        cells[2],
    ]
    with_it, without = PromptsDigest(), PromptsDigest()
    for prompt in found:
        with_it.add(prompt)
        without.add(Prompt(prompt.id, prompt.answer, prompt.source, text=prompt.text))
    assert with_it.hexdigest() == without.hexdigest(), "runs of earlier versions resume"


def test_metadata_may_be_json_text_and_nothing_but_an_object(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    write_lines(file, [{"prompt": "1", "answer": "1", "metadata": '{"a": [1]}'}])
    assert load_prompts(file, "prompt", "answer")[0].metadata == {"a": [1]}
    for wrong in (3, [1], "plain", "[1]"):
        write_lines(file, [{"prompt": "1", "answer": "1"}, {"prompt": "2", "answer": "2", "metadata": wrong}])
        with pytest.raises(DataError, match=r"row 2: found .* as metadata"):
            load_prompts(file, "prompt", "answer")
    write_parquet(
        tmp_path / "t.parquet",
        [{"prompt": "1", "answer": "1", "metadata": {"at": datetime(2026, 11, 26)}}],
    )
    with pytest.raises(DataError, match=r"row 1: found .* as metadata"):
        load_prompts(tmp_path / "t.parquet", "prompt", "answer")
