"""Evaluation of real runs: it changes nothing that is learned, and says the same on any number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from sanity_run import make_task, settings, without_clocks
from test_training_run import train

from megatron_dppo.rollout.scores import metric_names
from megatron_dppo.runtime import Runtime

REWARD = "tests.faults.rewards:digits"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the sanity task's tokenizer, and prompts; one of them too long to be asked."""
    task = make_task(tmp_path_factory.mktemp("evaluation"))
    long = {"prompt": "<bos> " + "1 " * 20 + "=", "answer": "1", "id": "long"}
    with (task / "held_out.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    (task / "few.jsonl").write_text("".join((task / "prompts.jsonl").read_text().splitlines(keepends=True)[:3]))
    return task


def tables_of(task: Path, name: str, **changes: dict[str, Any]) -> dict[str, Any]:
    """A run of two rollouts that is evaluated on two sets, before each and at the end."""
    evaluation = {
        "every": 1,
        "samples_per_prompt": 4,
        "sets": {
            "held-out": {"prompts": str(task / "held_out.jsonl")},
            "few": {
                "prompts": str(task / "few.jsonl"),
                "samples_per_prompt": 2,
                "max_response_tokens": 6,
                "reward": "arithmetic",
            },
        },
    }
    changes = {"run": {"num_rollouts": 2}, "evaluation": evaluation, "data": {"reward": REWARD}} | changes
    return settings(task, name, **changes)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [row for row in lines(run / "metrics.jsonl") if row["kind"] == "evaluation"]


def train_both(runtime: Runtime, *runs: dict[str, Any]) -> None:
    """One run after the other."""
    for tables in runs:
        train(runtime, tables)


@pytest.fixture(scope="module")
def evaluated(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two ranks with two sets; beside it, "without", one that has no evaluation."""
    split: Any = {"parallel": {"expert": 2}}
    runs = tables_of(task, "two", **split), tables_of(task, "without", evaluation={}, **split)
    run_ranks(train_both, 2, tmp_path_factory.mktemp("two"), *runs)
    return task / "two"


def test_every_metric_and_every_response_of_two_sets(evaluated: Path) -> None:
    rows = evaluations(evaluated)
    assert [row["rollout"] for row in rows] == [0, 1, 2]
    names = [*metric_names("held-out", 4, (1, 2, 4)), *metric_names("few", 2, (1, 2))]
    assert all(set(names) == row.keys() - {"kind", "rollout"} for row in rows)
    files = sorted(file.name for file in (evaluated / "evaluations").iterdir())
    assert files == sorted(f"{name}_{n:06d}.jsonl" for name in ("held-out", "few") for n in range(3))
    for row in rows:
        responses = lines(evaluated / "evaluations" / f"held-out_{row['rollout']:06d}.jsonl")
        assert [(r["index"], r["sample"]) for r in responses] == [(i, k) for i in range(4) for k in range(4)]
        earned = sum(response["reward"] for response in responses)
        assert row["eval/held-out/avg_at_4"] == pytest.approx(earned / 20), "the prompt that is too long counts"
        assert row["eval/held-out/dropped"] == 4
        mean = sum(response["response_length"] for response in responses) / 16
        assert row["eval/held-out/response_length_mean"] == pytest.approx(mean)
        assert (
            row["eval/held-out/avg_at_4_low"]
            < row["eval/held-out/avg_at_4"]
            < row["eval/held-out/avg_at_4_high"]
        )
        short = lines(evaluated / "evaluations" / f"few_{row['rollout']:06d}.jsonl")
        assert len(short) == 6 and all(response["response_length"] <= 6 for response in short)
        assert row["eval/few/truncated_fraction"] == sum(r["finish_reason"] == "length" for r in short) / 6


def test_a_run_learns_the_same_bits_without_evaluation(task: Path, evaluated: Path) -> None:
    rows, others = (lines(run / "metrics.jsonl") for run in (evaluated, task / "without"))
    assert without_clocks([row for row in rows if row["kind"] != "evaluation"]) == without_clocks(others)
