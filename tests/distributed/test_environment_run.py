"""A whole run of the real loop whose responses are conversations, with Top-K masks and R3."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.runtime.files import write_jsonl
from tests.distributed.test_training_run import train
from tests.support.ranks import run_ranks
from tests.support.records import metrics_of
from tests.support.sanity_run import settings, without_clocks
from tests.support.tiny import write_model

ROOT = Path(__file__).parents[2]
CONVERSATIONS = {
    "environment": "sudoku",
    "max_turns": 2,
    "max_turn_tokens": 3,
    "max_response_tokens": 26,
    "transformers": {"weights": "float32"},
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the sudoku's tokenizer, and puzzles."""
    folder = tmp_path_factory.mktemp("sudoku")
    example = runpy.run_path(str(ROOT / "examples" / "sudoku" / "make_model.py"))
    words = example["IDS"]
    write_model(folder / "model", vocab_size=len(words), eos_token_id=words["<eos>"], num_hidden_layers=2)
    example["make_tokenizer"]().save_pretrained(folder / "model")
    rows = [{"id": str(i), "prompt": "<bos>", "answer": "2"} for i in range(16)]
    write_jsonl(folder / "prompts.jsonl", rows)
    return folder


def test_conversations_are_trained_on_and_a_resumed_run_is_bitwise_equal(task: Path, tmp_path: Path) -> None:
    def tables(name: str) -> dict[str, Any]:
        run = {"folder": str(task / name), "num_rollouts": 2}
        return settings(task, name, run=run, data={"max_prompt_tokens": 20}, rollout=CONVERSATIONS)

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
    before = HFWeights(task / "model").tensor("lm_head.weight")
    assert not torch.equal(before, whole["weights"]["lm_head.weight"]), "the run learns"
    rollouts = [row for row in rows if row["kind"] == "rollout"]
    for row in rollouts:
        assert row["rollout/num_turns_mean"] == 2.0 and row["rollout/dropped_samples"] == 0
        assert row["rollout/response_length_mean"] > 19 + 2  # a board, and two responses
        assert row["mismatch/abs_prob_diff_mean"] < 1e-5, "measured by the trainer, too"
        assert row["routing/agreement_mean"] > 0.999
