"""Whole runs of the real loop on the sanity task: a few steps, resumed runs, and what a run writes."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.algorithms import PRESETS
from megatron_dppo.checkpoints.convert.stored_tensors import StoredTensors
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.checks.facts import model_facts
from megatron_dppo.checks.run_rules import checkpoint_bytes
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.batch_file import read_batches
from megatron_dppo.runtime.files import read_jsonl
from megatron_dppo.runtime.process import Runtime
from tests.support.commands import python
from tests.support.ranks import run_ranks
from tests.support.records import lines_of, metrics_of
from tests.support.sanity_run import settings, without_clocks


def train(
    runtime: Runtime,
    tables: dict[str, Any],
    stop_after: int | None = None,
    watch: Callable[[Any], object] = lambda training: None,
) -> dict[str, Any]:
    """Run the loop in this rank, with a reward that varies, and return its final weights and moments.

    If `stop_after`, rank 0 gets SIGTERM in the middle of that gradient step, or at the start if it is 0.
    `watch` gets the loop before it starts.
    """
    import megatron_dppo.train as loop
    from megatron_dppo.config.schema import Config
    from megatron_dppo.run.logger import RunLogger
    from megatron_dppo.run.preemption import Preempted, StopRequests
    from megatron_dppo.run.session import RunSession

    config = Config.model_validate(tables)
    with StopRequests().handle_signals() as requests, RunLogger.open(config, runtime) as logger:
        training = loop.Training.prepare(config, RunSession(runtime, logger, requests))
        forwards = count_forwards(training.actor)
        if stop_after == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        elif stop_after is not None and runtime.is_main:
            signal_at_step(training.actor, stop_after)
        watch(training)
        with contextlib.suppress(Preempted) if stop_after is None else pytest.raises(Preempted):
            training.run()
    weights = {name: tensor.clone() for name, tensor in training.actor.weights()}
    moments = [
        state[key].clone()
        for member in getattr(training.actor.optimizer, "chained_optimizers", [training.actor.optimizer])
        for state in member.optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    return {"weights": weights, "moments": moments, "forwards": forwards, "state": training.state.run_state}


def signal_at_step(actor: Any, number: int) -> None:
    """Send this process SIGTERM while it takes that gradient step, counted from 1."""
    accumulate, count = actor.accumulate_gradients, itertools.count(1)

    def accumulate_and_signal(*args: Any, **options: Any) -> Any:
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return accumulate(*args, **options)

    actor.accumulate_gradients = accumulate_and_signal


def count_forwards(actor: Any) -> list[bool]:
    """One entry per forward pass of the model: whether it kept a graph."""
    seen: list[bool] = []
    actor.chunks[0].register_forward_hook(lambda module, inputs, output: seen.append(output.requires_grad))
    return seen


def with_data(task: Path, name: str, **changes: dict[str, Any]) -> dict[str, Any]:
    """Settings with the reward that varies."""
    data = {"reward": "tests.faults.rewards:digits"} | changes.get("data", {})
    return settings(task, name, **changes | {"data": data})


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by its path."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def require_paired_names(rows: list[dict[str, Any]], *, trained_with: str, every: int = 1) -> None:
    """Require that the paired forward with the routes that train repeats the mismatch, the other not."""
    other = {"live": "replayed", "replayed": "live"}[trained_with]
    for row in rows:
        names = [name.partition("/")[2] for name in row if name.startswith(f"mismatch_{trained_with}/")]
        assert bool(names) == ((row["rollout"] + 1) % every == 0)
        for name in names:
            same = row[f"mismatch_{trained_with}/{name}"]
            assert same == pytest.approx(row[f"mismatch/{name}"], rel=1e-4, abs=1e-7), name
    tv = "abs_prob_diff_mean"
    paired = [
        (row[f"mismatch_{other}/{tv}"], row[f"mismatch/{tv}"])
        for row in rows
        if f"mismatch_{other}/{tv}" in row
    ]
    assert any(found != pytest.approx(trained, rel=1e-2) for found, trained in paired)


_REFILLED = {"samples_per_prompt": 2, "refill_zero_variance": True}


@pytest.mark.parametrize(
    ("dtype", "world_size", "stop_after", "rollout"),
    [
        ("float32", 1, 3, {"routing_replay": "measure"}),
        pytest.param("bfloat16", 1, 4, {}, marks=pytest.mark.slow),
        pytest.param("float32", 2, 3, {}, marks=pytest.mark.slow),  # the next one with more to lose
        ("float32", 2, 4, _REFILLED),
        ("float32", 2, 3, _REFILLED | {"lag": 2}),
    ],
)
def test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(
    task: Path, tmp_path: Path, dtype: str, world_size: int, stop_after: int, rollout: dict[str, Any]
) -> None:
    """An odd number of steps ends in the middle of a rollout, an even one between two."""
    whole_name, halved_name = (f"{name}_{tmp_path.name}" for name in ("whole", "halved"))  # no other case's
    has_kl = stop_after == 3
    parallel = {"expert": world_size, "share_prefixes": has_kl}
    changes: Any = {"model": {"dtype": dtype}, "parallel": parallel, "rollout": rollout}
    if has_kl:
        changes["algorithm"] = {"ref_kl_coef": 0.2, "ref_kl": "k3" if world_size == 1 else "k1"}
    else:  # two files in unequal shares; the small one begins again every few prompts
        files = [{"path": task / "prompts.jsonl", "weight": 1, "name": "many"}]
        changes["data"] = {"prompts": [*files, {"path": task / "held_out.jsonl", "weight": 3}]}
    whole = run_ranks(train, world_size, tmp_path, with_data(task, whole_name, **changes))[0]
    stopped = run_ranks(train, world_size, tmp_path, with_data(task, halved_name, **changes), stop_after)[0]
    assert stopped["state"].step == stop_after
    with (task / halved_name / "metrics.jsonl").open("a") as metrics:
        metrics.write(
            '{"kind": "step", "rollout": 2, "step": 4}\n'
        )  # written after the checkpoint, then killed
    saved = files_of(task / halved_name / "checkpoints")
    again = run_ranks(train, world_size, tmp_path, with_data(task, halved_name, **changes), 0)[0]
    assert again["state"].rollout == 2, "a second stop ends the open rollout at most"
    if stop_after == 4:  # between two rollouts
        assert again["state"] == stopped["state"]
        assert files_of(task / halved_name / "checkpoints") == saved, "a second stop changes nothing"
    resumed = run_ranks(train, world_size, tmp_path, with_data(task, halved_name, **changes))[0]
    assert resumed["state"] == whole["state"]
    assert whole["weights"].keys() == resumed["weights"].keys()
    assert all(torch.equal(tensor, resumed["weights"][name]) for name, tensor in whole["weights"].items())
    assert all(torch.equal(x, y) for x, y in zip(whole["moments"], resumed["moments"], strict=True))
    before = HFWeights(task / "model").tensor("lm_head.weight").to(whole["weights"]["lm_head.weight"].dtype)
    assert not torch.equal(before, whole["weights"]["lm_head.weight"]), "the run learns"
    rows = metrics_of(task / whole_name)
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(8))
    assert [row["rollout"] for row in rows if row["kind"] == "rollout"] == list(range(4))
    if has_kl:  # from the weights that the run began with, by their own routes
        first, *later = [row["policy/ref_kl"] for row in rows if row["kind"] == "step"]
        assert min(later[1:]) > 1e-4
        assert first < 1e-9 or "routing_replay" not in rollout
    assert without_clocks(metrics_of(task / halved_name)) == without_clocks(rows)
    for row in (row for row in rows if row["kind"] == "rollout"):
        own = [step for step in rows if step["kind"] == "step" and step["rollout"] == row["rollout"]]
        assert row["mismatch/prob_diff_max"] == max(step["drift/prob_diff_max"] for step in own)
        assert row["mismatch/prob_diff_min"] == min(step["drift/prob_diff_min"] for step in own)
    for row in rows if not has_kl else ():
        if row["kind"] == "rollout":
            drawn = row["source/many/epochs"] * 64, row["source/held_out/epochs"] * 4
            assert sum(drawn) >= 4 * (row["rollout"] + 1) and abs(3 * drawn[0] - drawn[1]) <= 2
            trained = [row.get(f"source/{name}/num_prompts", 0) for name in ("many", "held_out")]
            assert sum(trained) + row["rollout/dropped_groups"] == 4
            rewards = [row.get(f"source/{name}/reward_mean", 0) for name in ("many", "held_out")]
            total = sum(count * reward for count, reward in zip(trained, rewards, strict=True))
            assert row["reward/mean"] == pytest.approx(total / sum(trained), rel=0.3)
    replaced = [row["rollout/replaced_groups"] for row in rows if row["kind"] == "rollout"]
    assert (
        any(replaced[:2]) == any(replaced[2:]) == ("refill_zero_variance" in rollout)
    )  # before it was stopped, and after


def train_and_sample_again(runtime: Runtime, tables: dict[str, Any]) -> dict[str, Any]:
    """Train, then sample each rollout once more by kept weights of the version that it was due to.

    Returns:
        What `train` does; "trained": the weights' version and the samples' rollouts, for each gradient step;
        "sampled" and "expected": the samples of each rollout.
    """
    from megatron_dppo.config.schema import Config
    from megatron_dppo.rollout.rollouts import Rollouts, build_engine

    kept: dict[int, list[tuple[str, torch.Tensor]]] = {}
    sampled: dict[int, Any] = {}
    trained: list[tuple[int, set[str]]] = []

    def watch(training: Any) -> None:
        draw, step = training.rollouts.next, training.actor.train_step

        def draw_and_note(rollout: int, *arguments: Any) -> Any:
            found = draw(rollout, *arguments)
            sampled[rollout] = contents(found[0])
            return found

        def step_and_note(batch: Any, **options: Any) -> Any:
            version = training.state.weight_version
            if options["is_first"]:
                kept[version] = [(name, tensor.clone()) for name, tensor in training.actor.weights()]
            ids = [name for microbatch in batch.microbatches for name in microbatch.sample_ids]
            trained.append((version, {name.partition("/")[0] for name in ids}))
            return step(batch, **options)

        training.rollouts.next, training.actor.train_step = draw_and_note, step_and_note

    result = train(runtime, tables, watch=watch)
    config, expected = Config.model_validate(tables), dict[int, Any]()
    engine: Any = build_engine(config, config.model.load, runtime.device)
    with contextlib.closing(Rollouts(config, config.model.load, engine, share=(0, 1))) as rollouts:
        for rollout in range(config.run.num_rollouts):
            version = max(rollout - config.rollout.lag, 0)
            engine.load_weights(iter(kept[version]), version)
            found = rollouts.next(rollout, version, runtime.all_gather)
            assert found is not None
            expected[rollout] = contents(found[0])
    return result | {"trained": trained, "sampled": sampled, "expected": expected}


def contents(groups: Any) -> dict[str, tuple[list[int], list[float], list[int], float]]:
    """Tokens, log-probs, routes and reward of each sample, by its id."""
    samples = [sample for group in groups for sample in group.samples]
    return {
        s.id: (
            s.tokens.tolist(),
            s.rollout_log_probs.tolist(),
            s.routed_experts.indices.flatten().tolist(),
            s.reward,
        )
        for s in samples
    }


def stop_everywhere(runtime: Runtime, tables: dict[str, Any]) -> dict[str, Any]:
    """Train with SIGTERM in the second rollout that is sampled, or gradient step, of each start.

    Returns:
        `train`'s result; "points": finished rollouts and steps, and waiting rollouts, at the end of each start.
    """
    points: list[tuple[int, int, int]] = []

    def watch(training: Any) -> None:
        events = itertools.count(1)

        def signalling(work: Callable[..., Any]) -> Callable[..., Any]:
            def signal_and_work(*args: Any, **options: Any) -> Any:
                if next(events) == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                return work(*args, **options)

            return signal_and_work

        training.rollouts.next = signalling(training.rollouts.next)
        training.actor.accumulate_gradients = signalling(training.actor.accumulate_gradients)
        started.append(training.state)

    while not points or points[-1][0] < tables["run"]["num_rollouts"]:
        started: list[Any] = []
        result = train(runtime, tables, watch=watch)
        points.append((started[0].rollout, started[0].step, len(started[0].queue)))
    return result | {"points": points}


def train_each(runtime: Runtime, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several runs, one after the other."""
    return [train(runtime, tables) for tables in runs]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_rollout_is_sampled_by_the_weights_of_lag_versions_before(
    task: Path, tmp_path: Path, lag: int
) -> None:
    """And trained on in its order, whatever moments the run is stopped at."""
    tracking = {"samples_every": 1, "paired_routing_every": 2, "clipped_tokens_every": 2}
    rollout = {"lag": lag, "transformers": {"weights": "bfloat16_fp8"}}  # some routes differ on every machine
    changes: Any = {"rollout": rollout, "tracking": tracking}
    whole, stopped = (with_data(task, f"{name}_lag_{lag}", **changes) for name in ("whole", "stopped"))
    kept = run_ranks(train_and_sample_again, 1, tmp_path, whole)[0]
    assert kept["sampled"] == kept["expected"] and list(kept["sampled"]) == [0, 1, 2, 3]
    assert kept["trained"] == [(step // 2, {f"rollout{step // 2}"}) for step in range(8)]
    rows = metrics_of(task / f"whole_lag_{lag}", "rollout")
    assert [row["rollout/staleness_mean"] for row in rows] == [min(r, lag) for r in range(4)]
    assert [row["rollout/staleness_max"] for row in rows] == [min(r, lag) for r in range(4)]
    require_paired_names(rows, trained_with="replayed", every=2)
    for number, row in enumerate(rows):
        rewards = [reward for *_, reward in kept["sampled"][number].values()]
        assert row["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert row["rollout/num_response_tokens"] == row["rollout/response_length_mean"] * len(rewards)
    if lag == 0:
        return
    again = run_ranks(stop_everywhere, 1, tmp_path, stopped)[0]
    in_the_filling, in_rollouts = (
        [(0, 0, 1), (0, 0, 2)],
        [(0, 1, 2), (1, 2, 2), (1, 3, 2), (2, 5, 1), (3, 7, 0)],
    )
    assert again["points"] == [*in_the_filling, *in_rollouts, (4, 8, 0)]
    assert again["state"] == kept["state"]
    assert all(torch.equal(tensor, again["weights"][name]) for name, tensor in kept["weights"].items())
    assert all(torch.equal(x, y) for x, y in zip(kept["moments"], again["moments"], strict=True))
    folders = [task / f"{name}_lag_{lag}" for name in ("whole", "stopped")]
    assert without_clocks(metrics_of(folders[0])) == without_clocks(metrics_of(folders[1]))
    texts = [[file.read_text() for file in sorted(folder.glob("samples/*"))] for folder in folders]
    assert texts[0] == texts[1] and len(texts[0]) == 4
    lists = [files_of(folder / "clipped_tokens") | files_of(folder / "masked_tokens") for folder in folders]
    of_steps = [f"step_{step:06d}.jsonl" for step in (2, 3, 6, 7)]
    assert sorted(lists[0]) == ["rollout_000001.jsonl", "rollout_000003.jsonl", *of_steps]
    assert lists[0] == lists[1], "a stop between the steps of a listed rollout loses none of them"
    assert all(b'"num_steps": 2, "preset": "active"' in lists[1][name] for name in sorted(lists[1])[:2])


def test_offloading_the_trainer_while_sampling_changes_no_result(task: Path, tmp_path: Path) -> None:
    """With evaluations and checkpoints between rollouts, which look at parameters as the sync does."""
    held_out = {"held_out": {"prompts": str(task / "held_out.jsonl")}}
    changes: Any = {
        "run": {"num_rollouts": 2},
        "checkpoint": {"every": 1},
        "evaluation": {"every": 1, "samples_per_prompt": 1, "sets": held_out},
    }
    runs = [
        with_data(task, name, rollout={"release_trainer": name == "away"}, **changes)
        for name in ("here", "away")
    ]
    here, away = run_ranks(train_each, 1, tmp_path, runs)[0]
    assert all(torch.equal(tensor, away["weights"][name]) for name, tensor in here["weights"].items())
    assert all(torch.equal(x, y) for x, y in zip(here["moments"], away["moments"], strict=True))
    assert without_clocks(metrics_of(task / "away")) == without_clocks(metrics_of(task / "here"))
    assert away["state"] == here["state"] and away["state"].rollout == 2


EPS = torch.finfo(torch.float32).eps
_ONE_ROLLOUT: dict[str, Any] = {
    "run": {"num_rollouts": 1},
    "data": {
        "reward": {"tests.faults.rewards:digits": 1.0, "arithmetic": 0.5},
        "reward_values": (-1.0, 1.0),
        "overlong_buffer_tokens": 5,
    },
    "rollout": {"transformers": {"weights": "float32"}},
    "optimizer": {"eps": 1.0},
    "tracking": {"paired_routing_every": 1, "mismatch_share": 0.5},
}


@pytest.fixture(scope="module")
def one(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A rollout and its training on one process."""
    folder = tmp_path_factory.mktemp("one")
    result: dict[str, Any] = run_ranks(train, 1, folder, with_data(task, "one", **_ONE_ROLLOUT))[0]
    return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoint_size_equals_the_estimate_of_check(
    task: Path, tmp_path: Path, one: dict[str, Any], dtype: str
) -> None:
    tables = with_data(task, f"saved_{dtype}", **_ONE_ROLLOUT | {"model": {"dtype": dtype}})
    run = task / "one"
    if dtype != "float32":
        run = task / f"saved_{dtype}"
        run_ranks(train, 1, tmp_path, tables)
    config = Config.model_validate(tables)
    said = checkpoint_bytes(config, model_facts(config, 1))
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    stored = StoredTensors(checkpoint / "megatron")
    assert said == pytest.approx(sum(tensor.nbytes for tensor in stored.outline().values()), rel=0.01)
    assert said is not None and said < sum(file.stat().st_size for file in stored.files)


@pytest.mark.parametrize("split", ["expert", "tensor", "pipeline", "context"])
def test_two_processes_train_as_one(task: Path, tmp_path: Path, one: dict[str, Any], split: str) -> None:
    """A layout changes neither which samples are drawn nor, beyond rounding, what is learned and reported."""
    tables = with_data(task, split, parallel={split: 2}, **_ONE_ROLLOUT)
    two = run_ranks(train, 2, tmp_path, tables)
    before = HFWeights(task / "model")
    for name, tensor in one["weights"].items():
        error, moved = (two[0]["weights"][name] - tensor).norm(), (tensor - before.tensor(name)).norm()
        # of the whole update, and the last bit of each weight, since updates are small compared with weights
        assert error <= 1e-4 * moved + EPS / 8 * tensor.norm(), name
        assert torch.equal(two[0]["weights"][name], two[1]["weights"][name]), name
    first = [metrics_of(task / run, "rollout")[0] for run in ("one", split)]
    reported = ("reward/mean", "rollout/response_length_mean", "routing/agreement_mean", "mismatch/num_tokens")
    paired = [name for name in first[0] if name.startswith(("mismatch_live/", "mismatch_replayed/"))]
    assert 0 < first[0]["mismatch_live/num_tokens"] < first[0]["mismatch/num_tokens"]
    for metric in (*reported, *paired, "trust_region/noise_masked_fraction"):
        # equal engines: k1 is a mean of the last bits of float32 log-probs
        assert first[0][metric] == pytest.approx(first[1][metric], rel=1e-4, abs=1e-6), metric
    for metric in ("mismatch/prob_diff_max", "mismatch/prob_diff_min"):  # of the second gradient step
        assert first[0][metric] == pytest.approx(first[1][metric], rel=0.02) and abs(first[0][metric]) > 1e-5
    steps = [metrics_of(task / run, "step")[0] for run in ("one", split)]
    extremes = [abs(steps[0][f"drift/prob_diff_{name}"]) for name in ("max", "min")]
    assert max(extremes) == pytest.approx(first[0]["mismatch/tv_max"], rel=1e-9), (
        "of all tokens, not of a share"
    )
    areas = ("shadow/", "theory/", "drift/", "clipped/")
    of_every_token = [name for name in steps[0] if name.startswith(areas)]
    known = {"shadow/dppo_topk_kl/agreement", "theory/linear_term", "drift/tv_p99", "drift/ratio_p001"}
    known |= {"theory/sum_tv_ratio", "drift/prob_diff_max", "clipped/num_tokens_positive"}
    assert known <= set(of_every_token)
    for metric in of_every_token:
        # log-probs are about 4, so a last bit is 4 EPS
        assert steps[0][metric] == pytest.approx(steps[1][metric], rel=1e-3, abs=16 * EPS), metric
    parts = ("digits", "arithmetic", "arithmetic/has_answer", "overlong_penalty")
    for metric in (f"reward/{part}_mean" for part in parts):
        assert first[0][metric] == pytest.approx(first[1][metric], rel=1e-4, abs=1e-7), metric
    digits, arithmetic, _, penalty = (first[1][f"reward/{part}_mean"] for part in parts)
    assert first[1]["reward/mean"] == pytest.approx(digits + 0.5 * arithmetic + penalty)
    assert penalty < 0.0


@pytest.mark.parametrize(("preset", "extra"), [("dppo_binary_tv", False), ("dppo_binary_tv_decoupled", True)])
def test_old_log_probs_cost_a_forward_only_where_the_anchor_needs_them(
    task: Path, tmp_path: Path, preset: str, extra: bool
) -> None:
    tracking = {"clipped_tokens_every": 1, "samples_every": 1, "batches_every": 1}
    tables = with_data(task, preset, run={"num_rollouts": 1}, tracking=tracking)
    tables["algorithm"] = {"preset": preset, "delta": 1e-6, "minibatches_per_rollout": 2}
    forwards = run_ranks(train, 1, tmp_path, tables)[0]["forwards"]
    trained = sum(forwards)
    assert trained >= 2
    assert len(forwards) - trained == (trained if extra else 0)
    of_steps, of_rollout = metrics_of(task / preset)[:2], metrics_of(task / preset)[2]
    assert [row["drift/mini_step"] for row in of_steps] == [0, 1]
    of_first = {name.removeprefix("drift/"): value for name, value in of_steps[0].items() if "drift/" in name}
    for name in ("kl_k3", "tv_p50", "tv_p99", "ratio_p001", "ratio_p999", "num_tokens"):
        assert of_rollout[f"mismatch/{name}"] == of_first[name], name
    warnings = (tmp_path / "rank0.log").read_text().count("sits inside the engines' noise")
    files = sorted((task / preset / "clipped_tokens").iterdir())
    rows = lines_of(files[-1])
    assert [file.name for file in files] == ["rollout_000000.jsonl"]
    assert {(row["rollout"], row["num_steps"]) for row in rows} == {(0, 2)}
    of_active = [row for row in rows if row["preset"] == "active"]
    assert of_active and {row["preset"] for row in rows} <= {"active", *PRESETS}
    assert all(row["token"] and row["count"] >= 1 and 0 <= row["mean_tv"] <= 1 for row in rows)
    for sign, name in (("+", "positive"), ("-", "negative")):  # fewer token ids than a list has room for
        listed = [row for row in of_active if row["sign"] == sign]
        num_tokens = sum(row["count"] for row in listed)
        counts = [row.get(f"clipped/num_tokens_{name}", 0) for row in of_steps]
        assert sum(counts) == num_tokens > 0
        for value in ("mu", "pi", "entropy"):
            means = [row.get(f"clipped/{value}_mean_{name}", 0) for row in of_steps]
            of_steps_together = sum(count * mean for count, mean in zip(counts, means, strict=True))
            of_list = sum(row["count"] * row[f"mean_{value}"] for row in listed)
            assert of_steps_together == pytest.approx(of_list), (sign, value)
    assert ("time/anchor_s" in of_rollout) == extra
    assert 0 <= of_rollout.get("time/anchor_s", 0) < of_rollout["time/train_s"], "it is a part of that"
    samples = {row["id"]: row for _, row in read_jsonl(task / preset / "samples" / "rollout_000000.jsonl")}
    for file in sorted((task / preset / "masked_tokens").iterdir()):
        for row in map(json.loads, file.read_text().splitlines()):
            sample: Any = samples[row["sample"]]
            around = " ".join(filter(None, (row["before"], row["token"], row["after"])))
            assert around in f"{sample['prompt']} {sample['response']}"
            assert row["advantage"] == pytest.approx(sample["advantage"]) and (row["advantage"] > 0) == (
                row["sign"] == "+"
            )
    assert warnings == (not extra), "recomputed log-probs have no noise before the first step"
    kept = read_batches(task / preset / "batches" / "rollout_000000" / "group_0_of_1.safetensors")
    assert sorted(name for step in kept for m in step.microbatches for name in m.sample_ids) == sorted(
        map(str, samples)
    )
    for m in (m for step in kept for m in step.microbatches):
        assert (m.old_log_probs is not None) == extra
        if m.old_log_probs is not None:  # by the weights that sampled: mu, to within bfloat16 of the engine
            distance = (m.old_log_probs - m.rollout_log_probs)[m.loss_mask].abs()
            assert 0 < distance.max() < 0.3 and distance.mean() < 0.05


def test_the_command_line_trains_and_compares(task: Path) -> None:
    """`megatron-dppo train` and `compare` as a user types them, with a Megatron checkpoint as model.load."""
    root = Path(__file__).parents[2]
    megatron = task / "megatron"
    tool = root / "tools/convert_checkpoint.py"
    converted = python(tool, "to-megatron", "--hf", task / "model", "--out", megatron)
    assert converted.returncode == 0, converted.stderr
    toml = task / "run.toml"
    toml.write_text(
        f"""
        [run]
        folder = "{task / "cli"}"
        num_rollouts = 2
        [model]
        load = "{megatron}"
        dtype = "float32"
        [data]
        prompts = "{task / "prompts.jsonl"}"
        reward = "arithmetic"
        max_prompt_tokens = 16
        [rollout]
        prompts_per_rollout = 4
        samples_per_prompt = 2
        max_response_tokens = 8
        routing_replay = "measure"
        [rollout.transformers]
        weights = "bfloat16_fp8"  # some routes differ on every machine
        [algorithm]
        minibatches_per_rollout = 2
        [evaluation]
        every = 2
        samples_per_prompt = 1
        [evaluation.sets.held_out]
        prompts = "{task / "held_out.jsonl"}"
        [tracking]
        paired_routing_every = 1
        samples_every = 2
        """
    )
    command = ["-m", "megatron_dppo", "train", toml, "--set", "optimizer.lr=2e-6"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "rollout  2/2" in done.stderr
    kinds = [row["kind"] for row in metrics_of(task / "cli")]
    assert kinds == ["evaluation", "step", "step", "rollout", "step", "step", "rollout", "evaluation"]
    require_paired_names(metrics_of(task / "cli", "rollout"), trained_with="live")
    assert [file.name for file in (task / "cli" / "samples").iterdir()] == ["rollout_000001.jsonl"]
    assert "resuming" not in done.stderr
    again = python(*command, "--set", "run.num_rollouts=1")
    assert again.returncode == 0 and "resuming from" in again.stderr, again.stderr
    assert "2 rollouts are done, run.num_rollouts = 1" in again.stderr
    assert len(metrics_of(task / "cli")) == len(kinds), "a finished run has nothing left to do"
    resume_as_another_experiment(task, command)
    report = task / "report.html"
    compared = python("-m", "megatron_dppo", "compare", task / "cli", "-o", report)
    assert compared.returncode == 0, compared.stderr
    assert report.stat().st_size > 1 << 20
    assert "after 2 rollouts: optimizer.lr from 2e-06 to 4e-06" in report.read_text()
    assert "The trainer spent " in report.read_text() and "evaluating" in report.read_text()
    sizes = ("--gpus", "1", "--gpu-memory", "80GB", "--proposals", "0")
    row = metrics_of(task / "cli", "rollout")[-1]
    rate = row["rollout/num_response_tokens"] / row["time/rollout_s"]
    split = ("--split", "2", "--assume", f"serving_rate={rate}")
    planned = python("-m", "megatron_dppo", "plan", toml, *sizes, *split)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    said = " ".join(planned.stdout.split())
    assert re.search(r"rollout.max_staleness = [1-9]\d* is the smallest that hides it", said), said
    back = task / "back"
    last = task / "cli" / "checkpoints" / (task / "cli" / "checkpoints" / "latest").read_text().strip()
    converted = python(tool, "to-hf", "--megatron", last, "--out", back)
    assert converted.returncode == 0, converted.stderr
    assert (back / "tokenizer.json").is_file()
    shutil.rmtree(back)


def resume_as_another_experiment(task: Path, command: list[Any]) -> None:
    """A changed setting is refused with a table; with the flag, the run resumes and notes the changes once."""
    others = ["--set", f"data.prompts={task / 'held_out.jsonl'}", "--set", "optimizer.lr=4e-6"]
    refused = python(*command, *others)
    assert refused.returncode == 2
    table = [line.split() for line in refused.stderr.splitlines()[-3:]]
    prompts = [str(task / "prompts.jsonl"), str(task / "held_out.jsonl")]
    assert table == [
        ["setting", "was", "is"],
        ["data.prompts", *prompts],
        ["optimizer.lr", "2e-06", "4e-06"],
    ]
    accepted = ["--set", "optimizer.lr=4e-6", "--set", "run.num_rollouts=3", "--accept-changes"]
    assert python(*command, *accepted).returncode == 0
    rows = metrics_of(task / "cli")
    changes = [row for row in rows if row["kind"] == "change"]
    assert changes == [
        {"kind": "change", "rollout": 2, "setting": "optimizer.lr", "was": "2e-06", "is": "4e-06"}
    ]
    after = rows[rows.index(changes[0]) + 1 :]
    assert [row["kind"] for row in after] == ["step", "step", "rollout", "evaluation"]
    assert {row["optimizer/lr"] for row in after if row["kind"] == "step"} == {4e-6}


def test_a_user_error_ends_with_a_message_and_no_traceback(task: Path) -> None:
    done = python("-m", "megatron_dppo", "train", task / "nowhere.toml")
    assert done.returncode == 2
    assert "nowhere.toml" in done.stderr
    assert "Traceback" not in done.stderr
