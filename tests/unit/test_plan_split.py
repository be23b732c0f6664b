"""`megatron-dppo plan --split`: the division is the best of all, and lists what it depends on."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dppo.cli import app
from megatron_dppo.errors import ConfigError
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.split import divide, parse_assumptions
from megatron_dppo.run_folder.folder import RunFolder
from megatron_dppo.runtime.gpu_ledger import ENGINE_RESIDUE_BYTES
from tests.support.plan_models import QWEN3_06B, QWEN3_30B, job_of
from tests.support.refusals import refused

# Prompts that any number of ranks up to 16 divides. So many do not fit; these tests leave memory out.
ANY = {"rollout.prompts_per_rollout": 4 * 720720, "rollout.max_data_gib": 1e9, "rollout.samples_per_prompt": 8}
FEW = {"rollout.prompts_per_rollout": 96, "algorithm.minibatches_per_rollout": 4, "parallel.tensor": 2}


def _rates(job: Job, a: float, b: float, push: float = 0.0, longest: float = 1.0) -> dict[str, float]:
    """Rates with which a rollout takes a GPU-seconds of generation and b of training."""
    options = job.config.rollout
    tokens = options.prompts_per_rollout * options.samples_per_prompt * 100.0
    return {
        "serving_rate": tokens / a,
        "training_rate": tokens / b,
        "response_tokens": 100.0,
        "longest_tokens": longest,
        "token_s": 1.0,
        "push_s": push,
        "switch_s": 2.0,
    }


@pytest.mark.parametrize(("a", "b"), [(1600.0, 1600.0), (3000.0, 1000.0), (400.0, 3600.0), (2000.0, 500.0)])
def test_the_best_division_equals_theory_and_brute_force(
    a: float, b: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers and trainer at once have GPUs in the proportion a : b."""
    monkeypatch.setattr("megatron_dppo.plan.split.fits", lambda *_: True)
    job, push, longest, num = job_of(QWEN3_06B, ANY), 7.0, 60.0, 16
    job = replace(job, machine=replace(job.machine, gpus_per_node=num))
    split = divide(job, num, _rates(job, a, b, push, longest))
    at_once = {n: max(a / n, b / (num - n)) + push for n in range(1, num)}
    assert split.ahead.rollout_s == pytest.approx(min(at_once.values()))
    assert split.colocated.rollout_s == pytest.approx(max(a / num, longest) + b / num + 2)
    assert abs(split.ahead.serving - num * a / (a + b)) < 1
    assert split.ahead.rollout_s is not None and split.max_staleness is not None
    bound = split.max_staleness
    assert bound * split.ahead.rollout_s >= longest
    assert bound == 1 or (bound - 1) * split.ahead.rollout_s < longest


@pytest.mark.parametrize(
    ("a", "b", "per_node", "expected"),
    [(3000.0, 2000.0, 8, (8, 3)), (1900.0, 3000.0, 8, (4, 7)), (1900.0, 3000.0, 4, (4, 4))],
)
def test_gpus_have_whole_servers_and_a_trainer_of_whole_nodes_or_part_of_one(
    a: float, b: float, per_node: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eleven GPUs with servers of four: the best of 11 - m and m GPUs would be 6 and 5, or 4 and 7."""
    monkeypatch.setattr("megatron_dppo.plan.split.fits", lambda *_: True)
    job = job_of(QWEN3_06B, ANY | {"sglang.tp_size": 4})
    job = replace(job, machine=replace(job.machine, gpus_per_node=per_node))
    ahead = divide(job, 11, _rates(job, a, b)).ahead
    assert (ahead.serving, ahead.training) == expected
    assert ahead.rollout_s == pytest.approx(max(a / expected[0], b / expected[1]))


def test_only_numbers_that_train_admits_and_fit_are_taken() -> None:
    """Of 96 prompts in 4 mini-batches, over pairs of GPUs: data-parallel sizes that divide 24."""
    job, a, b = job_of(QWEN3_06B, FEW | {"sglang.tp_size": 2}), 3000.0, 7000.0
    split = divide(job, 30, _rates(job, a, b))
    times = {m: max(a / (30 - m), b / m) for m in (2, 4, 6, 8, 16, 24)}
    assert split.ahead.training == min(times, key=times.__getitem__) == 16
    assert split.ahead.rollout_s == pytest.approx(times[16])
    assert split.ahead.serving == 14
    large = divide(job_of(QWEN3_30B), 16, _rates(job_of(QWEN3_30B), a, b))
    assert large.ahead.rollout_s is None and "Does not fit" in large.ahead.why_not
    assert large.max_staleness is None and large.settings == {}
    alone = divide(job_of(QWEN3_06B, {"sglang.tp_size": 4}), 6, _rates(job, a, b))
    assert (alone.colocated.rollout_s, alone.colocated.why_not) == (None, "no whole servers fit")
    with refused("--split"):
        divide(job, 16, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("serving=1", "expected NAME=VALUE with one of serving_rate"),
        ("serving_rate", "found ''; expected a number above 0"),
        ("serving_rate=0", "expected a number above 0"),
        ("push_s=-1", "found '-1'"),
        ("token_s=fast", "found 'fast'"),
        ("token_s=inf", "found 'inf'"),
    ],
)
def test_assumptions_without_a_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_assumptions([text])


BASE = """
[model]
load = "model"
[parallel]
max_tokens_per_microbatch = 8192
[rollout]
engine = "sglang"
prompts_per_rollout = 192
samples_per_prompt = 8
max_response_tokens = 4096
max_data_gib = 1000.0
[sglang]
tp_size = 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with base.toml and a model's config.json."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(QWEN3_06B))
    Path("base.toml").write_text(BASE)
    return tmp_path


def _plan(*arguments: str) -> Any:
    common = ("base.toml", "--gpus", "8", "--gpu-memory", "80GB", "--proposals", "0")
    return CliRunner().invoke(app, ["plan", *common, *arguments])


@pytest.mark.parametrize(("outside", "kept"), [((4.5, 9.25, 8.0), 7.25), ((1.0,), 0.0), ((), None)])
def test_a_colocated_server_keeps_in_training_what_a_run_measured(
    folder: Path, outside: tuple[float, ...], kept: float | None
) -> None:
    colocated = ("--set", "rollout.sglang.colocated=true", "--set", "rollout.sglang.weight_sync=tensor")
    with RunFolder.open(Path("run"), {}, resume=False) as run:
        for rollout, each in enumerate(outside):
            run.write_rollout(rollout, {"memory/outside_bytes": each * 2**30}, num_rollouts=3)
    assumed = json.loads(_plan(*colocated, "--json").stdout)
    result = _plan(*colocated, "--json", "--measured", "run")
    if kept is None:
        assert (result.exit_code, "memory/outside_bytes" in result.output) == (2, True)
        return
    planned = json.loads(result.stdout)
    assert planned["assumptions"]["engine_residue_bytes"] == kept * 2**30
    for moment, is_training in (("loss", True), ("backward", True), ("step", True), ("rollout", False)):
        before, after = (
            each["configured"]["stages"][0]["moments"][moment]["reserve"] for each in (assumed, planned)
        )
        assert after - before == (kept * 2**30 - ENGINE_RESIDUE_BYTES) * is_training


def test_the_command_divides_by_given_and_assumed_rates(folder: Path) -> None:
    given = {"serving_rate": 3000.0, "training_rate": 1200.0, "response_tokens": 1000.0, "push_s": 10.0}
    words = (word for name, rate in given.items() for word in ("--assume", f"{name}={rate}"))
    arguments = ("--split", "16", *words)
    split = json.loads(_plan(*arguments, "--json").stdout)["split"]
    values = {name: (rate["value"], rate["source"]) for name, rate in split["rates"].items()}
    assert {name: value for name, (value, source) in values.items() if source == "given"} == given
    assert values["longest_tokens"] == (4096, "assumed") and values["token_s"] == (0.02, "assumed")
    assert not split["training_is_estimated"]
    a, b = 1_536_000 / 3000, 1_536_000 / 1200
    colocated, ahead = split["ways"]
    times = {m: max(a / ((16 - m) // 2 * 2), b / m) + 10 for m in (1, 2, 3, 4, 6, 8)}
    assert ahead["rollout_s"] == pytest.approx(min(times.values()))
    longest_s = 4096 * 0.02
    assert colocated["rollout_s"] == pytest.approx(max(a / 16, longest_s) + b / 16 + values["switch_s"][0])
    assert split["max_staleness"] == math.ceil(longest_s / ahead["rollout_s"])
    lines = _plan(*arguments).stdout.splitlines()
    assert max(map(len, lines)) <= 100
    at = lines.index("How to divide 16 GPUs, with servers of 2 GPUs:")
    assert lines[at + 3].split()[:5] == ["separate,", "asynchronous", "8", "8", f"{ahead['rollout_s']:.0f}"]
    (settings,) = (line for line in lines if line.startswith("  --gpus 8 "))
    assert "--set rollout.max_staleness=" in settings
    assert any(line.startswith("  push_s                  10  given     s of hold, push") for line in lines)
    estimated = _plan("--split", "16", "--assume", "serving_rate=3000").stdout
    assert "estimated as the gradient step above" in estimated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--assume", "token_s=1"), "--assume: found no --split"),
        (("--split", "16"), "--split: found no rate of sampling; expected one: plan estimates training alone"),
        (("--split", "2", "--assume", "serving_rate=1"), "expected at least 3: a server and a trainer"),
        (("--measured", "model"), "model has no config.toml and no metrics.jsonl"),
    ],
)
def test_a_split_without_rates_or_gpus_is_an_error(
    folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = _plan(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr, result.stderr
