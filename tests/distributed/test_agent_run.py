"""A whole run of the real loop in which an agent with a tool responds, with Top-K masks and R3."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from megatron_dppo.analysis.report.report import compare
from megatron_dppo.runtime.files import write_jsonl
from tests.distributed.test_training_run import train
from tests.faults.cases import at
from tests.faults.starting import start_ranks
from tests.support.lookup_run import GUESSING, STEPS, lookup_settings, make_lookup_task, require_learned
from tests.support.ranks import ended, run_ranks
from tests.support.records import lines_of, metrics_of
from tests.support.sanity_run import settings, without_clocks
from tests.support.tiny import write_model

ROOT = Path(__file__).parents[2]
KINDS = ["first", "tools", "continues", "branch"]
EPISODES = {
    "agent": {"harness": "tests.support.harnesses:adding"},
    "max_turn_tokens": 4,
    "max_response_tokens": 24,
    "prompts_per_rollout": 2,
    "samples_per_prompt": 3,
    "transformers": {"weights": "float32"},
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template, and sums."""
    folder = tmp_path_factory.mktemp("agent")
    tokenizer = runpy.run_path(str(ROOT / "examples" / "make_tiny.py"))["chat_tokenizer"]()
    size = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    write_model(folder / "model", num_hidden_layers=2, **size)
    tokenizer.save_pretrained(folder / "model")
    rows: list[dict[str, Any]] = [
        {"id": str(n), "prompt": [{"role": "user", "content": f"{n % 5} 4"}], "answer": str(n % 5 + 4)}
        for n in range(16)
    ]
    write_jsonl(folder / "prompts.jsonl", rows)
    return folder


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_each_branch_of_an_episode_trains(task: Path, tmp_path: Path, shares_prefixes: bool) -> None:
    """On two ranks, which may train on each other's samples."""
    name = f"branches_{shares_prefixes}"
    rollout = EPISODES | {"agent": {"harness": "tests.support.harnesses:branching"}}
    tables = settings(
        task,
        name,
        run={"folder": str(task / name), "num_rollouts": 1},
        data={"reward": "environment", "max_prompt_tokens": 8},
        rollout=rollout,
        parallel={"share_prefixes": shares_prefixes},
        algorithm={"aggregation": "seq_mean_token_mean"},
        tracking={"samples_every": 1},
    )
    run_ranks(train, 2, tmp_path, tables)
    (row,) = (row for row in metrics_of(task / name) if row["kind"] == "rollout")
    assert row["rollout/dropped_samples"] == 0
    assert (row["agents/calls"], row["agents/branches"]) == (24, 6), "two leaves of each episode"
    assert row["agents/untrained_tokens"] > 0, "the titles"
    assert row["mismatch/abs_prob_diff_mean"] < 1e-5 and row["routing/agreement_mean"] > 0.999
    rows = lines_of(task / name / "samples" / "rollout_000000.jsonl")
    assert len(rows) == 6 and sum("#" in each["id"] for each in rows) == 3, "of the first rank"
    for each in rows:
        kinds = [call["kind"] for call in each.get("calls", ())]
        assert kinds == ([] if "#" in each["id"] else KINDS), each["id"]
    compare([task / name], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("0 first, ") == page.count("3 branch, ") == 3, "a tree of each episode"
    by_id = {each["id"]: (each["reward"], each["advantage"]) for each in rows}
    assert all(by_id[name] == by_id[name.partition("#")[0]] for name in by_id)


def test_episodes_are_trained_on_and_a_resumed_run_is_bitwise_equal(task: Path, tmp_path: Path) -> None:
    def tables(name: str) -> dict[str, Any]:
        run = {"folder": str(task / name), "num_rollouts": 2}
        data = {"reward": "environment", "max_prompt_tokens": 8}
        return settings(task, name, run=run, data=data, rollout=EPISODES)

    whole = run_ranks(train, 1, tmp_path, tables("whole"))[0]
    stopped = run_ranks(train, 1, tmp_path, tables("halved"), 3)[0]
    assert stopped["state"].step == 3
    resumed = run_ranks(train, 1, tmp_path, tables("halved"))[0]
    assert whole["weights"].keys() == resumed["weights"].keys() and whole["state"] == resumed["state"]
    assert all(torch.equal(tensor, resumed["weights"][name]) for name, tensor in whole["weights"].items())
    assert len(whole["moments"]) == len(resumed["moments"]) > 0
    assert all(torch.equal(x, y) for x, y in zip(whole["moments"], resumed["moments"], strict=True))
    rows = metrics_of(task / "whole")
    assert without_clocks(rows) == without_clocks(metrics_of(task / "halved"))
    rollouts = [row for row in rows if row["kind"] == "rollout"]
    for row in rollouts:
        assert row["rollout/num_turns_mean"] == 2.0 and row["rollout/dropped_samples"] == 0
        assert (row["agents/calls"], row["agents/forks"], row["agents/untrained_tokens"]) == (12, 0, 0)
        assert row["mismatch/abs_prob_diff_mean"] < 1e-5, "measured by the trainer, too"
        assert row["routing/agreement_mean"] > 0.999


def test_a_policy_learns_to_use_a_tool_and_a_killed_run_continues_bitwise(tmp_path: Path) -> None:
    """Killed in rollout 16, it begins again with rollout 12, and repeats the rows that it had written."""
    rollout: dict[str, Any] = {"samples_per_prompt": 3, "transformers": {"weights": "float32"}}
    tables = lookup_settings(make_lookup_task(tmp_path), "run", 44, **rollout)
    tables["run"]["seed"], tables["checkpoint"] = 1, {"every": 12, "asynchronous": False}
    tables.setdefault("parallel", {})["share_prefixes"] = True
    run, config, log = tmp_path / "run", tmp_path / "run.toml", tmp_path / "train.log"
    config.write_text(tomli_w.dumps(tables))
    killed = start_ranks(1, config, [at("SIGKILL", "step", 16 * STEPS + 3)], log)
    assert ended(killed, 300) == [-9], log.read_text()[-3000:]
    before, samples = metrics_of(run), samples_of(run)
    assert before[-1]["kind"] == "step" and before[-1]["rollout"] == 16

    assert ended(start_ranks(1, config, (), log), 300) == [0], log.read_text()[-3000:]
    rows = metrics_of(run)
    assert without_clocks(rows[: len(before)]) == without_clocks(before)
    assert samples.items() <= samples_of(run).items()
    rollouts = metrics_of(run, "rollout")
    assert [row["rollout"] for row in rollouts] == list(range(44))
    require_learned(rollouts, above=GUESSING)
    for row in rollouts:
        assert row["mismatch/abs_prob_diff_mean"] < 1e-5 and row["routing/agreement_mean"] > 0.999
        assert row["batch/forwarded_fraction"] < 0.95, "each prompt has three conversations"


def samples_of(run: Path) -> dict[str, bytes]:
    """Return the conversations of each rollout."""
    return {file.name: file.read_bytes() for file in (run / "samples").glob("*.jsonl")}
