"""`what-if`: kept mini-batches, asked again, give what the run measured, and others their own masks."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from torch import Tensor

from megatron_dppo.actor.actor import Actor
from megatron_dppo.algorithms import PRESETS
from megatron_dppo.analysis.what_if.answer import answer
from megatron_dppo.analysis.what_if.question import question_of
from megatron_dppo.checkpoints.megatron_folder import load_weights
from megatron_dppo.data.batches.batch_file import read_share
from megatron_dppo.errors import MegatronDppoError
from megatron_dppo.mcore.groups import data_parallel_place
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.runtime.process import Runtime
from tests.support.commands import python
from tests.support.ranks import run_ranks
from tests.support.records import metrics_of
from tests.support.sanity_run import make_task, settings

ROOT = Path(__file__).parents[2]
OWN = "tests.support.own_rules:divergence_mask"


def command(*arguments: Any, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """`megatron-dppo ...`, in one process or more."""
    return python("-m", "megatron_dppo", *arguments, cwd=ROOT, processes=processes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two processes with one gradient step for each rollout, which keeps its mini-batches."""
    task = make_task(tmp_path_factory.mktemp("what_if"))
    tables = settings(
        task,
        "run",
        run={"num_rollouts": 2},
        parallel={"expert": 2},
        data={"reward": "tests.faults.rewards:digits"},
        rollout={
            "routing_replay": "replay",
            "num_topk_log_probs": 8,
            "transformers": {"weights": "bfloat16_fp8"},  # some routes differ on every machine
        },
        algorithm={"preset": "dppo_topk_tv", "top_k": 8, "delta": 0.001, "minibatches_per_rollout": 1},
        optimizer={"warmup_steps": 0, "lr": 4e-3},
        checkpoint={"every": 1},
        tracking={"batches_every": 1, "paired_routing_every": 1},
    )
    (task / "run.toml").write_text(tomli_w.dumps(tables))
    done = command("train", task / "run.toml", processes=2)
    assert done.returncode == 0, done.stderr
    return task / "run"


def test_the_weights_that_sampled_give_what_the_run_measured(run: Path, tmp_path: Path) -> None:
    before = run / "checkpoints" / "step_00000001"
    asked = ["what-if", run, "--checkpoint", before, "--rollout", 2, "--sweep", "delta=0.001,0.05,10.0"]
    asked += ["--sweep", "top_k=2", "-o", tmp_path / "alone"]
    done = command(*asked)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "alone" / "what_if.json").read_text())
    measured, step = metrics_of(run, "rollout")[1], metrics_of(run, "step")[1]  # of the second one
    assert found["rollouts"] == [2]
    for routes, values in found["mismatch"].items():
        for name, value in values.items():
            assert value == pytest.approx(measured[f"mismatch_{routes}/{name}"], rel=1e-4, abs=1e-9), name
    live, replayed = (found["mismatch"][routes]["kl_k3"] for routes in ("live", "replayed"))
    assert live != pytest.approx(replayed, rel=1e-2), "a swap of the two is seen"
    assert found["trained_routes"] == "replayed"
    own = next(row for row in found["rows"] if row["routes"] == "replayed")
    for sign in ("positive", "negative"):
        expected = step[f"trust_region/masked_fraction_{sign}"]
        assert own[f"masked_fraction_{sign}"] == pytest.approx(expected, abs=1e-9)
    assert own["masked_fraction"] > 0 and own["agreement"] == 1.0
    loosest = [row for row in found["rows"] if row.get("delta") == 10.0]
    assert len(loosest) == 2 and all(row["masked_fraction"] == 0.0 for row in loosest)
    for row in loosest:
        assert row["gradient_mass_kept"] == row["cosine_unmasked"] == pytest.approx(1.0)
    assert "dppo_topk_tv delta=0.05 top_k=2" in done.stdout and "live routes" in done.stdout

    asked[-1] = tmp_path / "two"
    done = command(*asked, "--set", "parallel.tensor=2", "--set", "parallel.expert=1", processes=2)
    assert done.returncode == 0, done.stderr
    two = json.loads((tmp_path / "two" / "what_if.json").read_text())
    assert two["num_tokens"] == found["num_tokens"]
    for name in ("masked_fraction", "gradient_mass_kept", "cosine_unmasked", "cosine_dppo_topk_tv"):
        values = [row[name] for row in found["rows"]]
        assert [row[name] for row in two["rows"]] == pytest.approx(values, rel=1e-4), name


def distances(runtime: Runtime, run: Path, now: Path, before: Path) -> dict[str, Any]:
    """What `what-if` finds with two checkpoints, and |pi - pi'| of each learning token, by two forwards."""
    options: dict[str, Any] = {"rollouts": ("1", "2"), "presets": ("dppo_binary_tv_decoupled",)}
    config, question = question_of(run, run / "asked", world_size=1, checkpoint=now, before=before, **options)
    found = answer(config, question, runtime)
    actor = Actor(config, runtime)
    steps = [step for number in (0, 1) for step in read_share(question.batches, number, data_parallel_place())]
    probs = list[Tensor]()
    for folder in (now, before):
        load_weights(actor.chunks, folder, actor.hf)
        columns = [actor.token_log_probs(step, Metrics(), is_replaying=False) for step in steps]
        microbatches = [m for step in steps for m in step.microbatches]
        every = zip([each for of_step in columns for each in of_step], microbatches, strict=True)
        probs.append(torch.cat([values[m.loss_mask][:, 0].double().exp() for values, m in every]))
    return {"found": found, "distances": (probs[0] - probs[1]).abs().numpy()}


def test_the_anchor_of_earlier_weights_is_what_these_weights_compute(run: Path, tmp_path: Path) -> None:
    """The last step has a learning rate of 0, so that only the first one changes the weights."""
    earlier, later = run.parent / "model", run / "checkpoints" / "step_00000001"
    for now, before in ((later, earlier), (earlier, later), (later, later)):
        (of_rank,) = run_ranks(distances, 1, tmp_path, run, now, before)
        rows = of_rank["found"]["rows"]
        (row,) = (r for r in rows if (r["preset"], r["routes"]) == ("dppo_binary_tv_decoupled", "live"))
        expected = np.percentile(of_rank["distances"], 99.9)
        assert row["divergence_p999"] == pytest.approx(expected, rel=1e-4, abs=1e-9)
        assert (expected > 1e-3) == (now != before)


def test_variants_that_cannot_be_evaluated_are_listed_before_a_model_loads(run: Path, tmp_path: Path) -> None:
    _, question = question_of(run, tmp_path, world_size=1, rollouts=("all",), is_all=True)
    assert question.rollouts == (1, 2)
    lacking = {"dppo_topk_tv", "dppo_topk_kl", "minirl", "gspo"}
    assert question.left_out.keys() & lacking == {"dppo_topk_tv", "dppo_topk_kl", "minirl"}
    assert "uses 20 columns of the rollout's top-K; expected at most the 8" in question.left_out["dppo_topk_kl"]
    assert "--before" in question.left_out["minirl"]
    assert len(question.variants) + len(question.left_out) == len(PRESETS) + 1
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        (
            dict(presets=("dppo_binary",)),
            "preset: found 'dppo_binary'; expected one of .* Did you mean 'dppo_binary_tv', 'dppo_binary_kl'",
        ),
        (
            dict(presets=("minirl",)),
            "Give the checkpoint that the rollout was sampled with as --before",
        ),
        (
            dict(presets=("dppo_topk_kl",)),
            "expected at most the 8 that were kept. Sweep a smaller top_k",
        ),
        (
            dict(presets=(OWN,)),
            f"--preset: found '{OWN}', which fails on a small batch: KeyError: 'delta'",
        ),
        (dict(rollouts=("7",)), "--rollout: found '7'; expected the number .* Kept are 1, 2."),
        (dict(rollouts=("0",)), "--rollout: found '0'; expected the number .* Kept are 1, 2."),
    )
    for asked, message in refused:
        with pytest.raises(MegatronDppoError, match=message):
            question_of(run, tmp_path, world_size=1, **asked)
    done = command("what-if", run, "--preset", OWN, "--rule-options", "delta=0.2", "-o", tmp_path)
    assert done.returncode == 2 and "--sweep rule_options.delta=0.2" in done.stderr


def test_all_presets_on_all_rollouts(run: Path, tmp_path: Path) -> None:
    asked = ["what-if", run, "--rollout", "all", "--all", "--preset", OWN, "--sweep", "rule_options.delta=0.15"]
    asked += ["--sweep", "top_k=8", "--before", run / "checkpoints" / "step_00000001", "-o", tmp_path]
    done = command(*asked, processes=2)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "what_if.json").read_text())
    assert {row["preset"] for row in found["rows"]} == {OWN, *PRESETS} and not found["left_out"]
    soft = {row["preset"] for row in found["rows"] if "weight_mean" in row}
    assert soft == {OWN, *(name for name in PRESETS if PRESETS[name].is_soft)} and "mean" in done.stdout
    assert "drpo" in soft and "grpo" not in soft
    assert all(0 < row["weight_mean"] < 2 for row in found["rows"] if row["preset"] in soft)
    of_gspo = next(row for row in found["rows"] if row["preset"] == "gspo")
    assert 0 < of_gspo["masked_fraction"] < 1
    assert [each["rollout"] for each in of_gspo["by_rollout"]] == [1, 2]
    for number in (1, 2):  # forwarded alone, by another number of processes
        of_one = command("what-if", run, "--rollout", number, "-o", tmp_path / f"{number}")
        assert of_one.returncode == 0, of_one.stderr
        alone = json.loads((tmp_path / f"{number}" / "what_if.json").read_text())
        assert alone["rollouts"] == [number]
        for row in alone["rows"]:
            both = next(
                r for r in found["rows"] if (r["variant"], r["routes"]) == (row["variant"], row["routes"])
            )
            of_rollout = both["by_rollout"][number - 1]
            for name in ("masked_fraction", "gradient_mass_kept", "cosine_unmasked"):
                assert of_rollout[name] == pytest.approx(row[name], rel=1e-4), (name, number)
    own_row = next(row for row in found["rows"] if row["routes"] == "replayed")
    assert len({each["masked_fraction"] for each in own_row["by_rollout"]}) == 2, "a swap of the two is seen"
    assert "standard deviation over rollouts" in done.stdout
    own, same = found["variants"].index(f"{OWN} delta=0.15"), found["variants"].index("dppo_binary_tv")
    assert found["agreement"]["replayed"]["same_decision"][own][same] == 1.0
    sampled = metrics_of(run, "rollout")[1]["mismatch/abs_prob_diff_mean"]  # by the weights of --before
    assert found["mismatch"]["replayed"]["abs_prob_diff_mean"] > 2 * sampled, "the latest weights are evaluated"
