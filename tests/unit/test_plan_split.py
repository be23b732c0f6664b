"""`megatron-dppo plan --split`: the division is the best of all, and says what it rests on."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dppo.cli import app
from megatron_dppo.errors import ConfigError
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.rates import Rate, Rates, gather_rates, parse_assumptions
from megatron_dppo.plan.split import divisions, make_split
from megatron_dppo.run_folder.folder import RunFolder
from megatron_dppo.runtime.gpu_ledger import ENGINE_RESIDUE_BYTES
from tests.support.plan_models import QWEN3_06B, QWEN3_30B, job_of
from tests.support.refusals import refused

# Prompts that any number of ranks up to 16 divides; so many do not fit, which is not what is tested with them.
ANY = {"rollout.prompts_per_rollout": 4 * 720720, "rollout.max_data_gib": 1e9, "rollout.samples_per_prompt": 8}
FEW = {"rollout.prompts_per_rollout": 96, "algorithm.minibatches_per_rollout": 4, "parallel.tensor": 2}


def _placed(num_gpus: int, size: int, per_node: int, training: int) -> int:
    """Servers that fit beside a trainer, one node after the other."""
    nodes = [min(per_node, num_gpus - at) for at in range(0, num_gpus, per_node)]
    left = training
    for index, room in enumerate(nodes):
        nodes[index] -= min(left, room)
        left -= min(left, room)
    if size <= per_node:
        return sum(room // size for room in nodes)
    return 0 if size % per_node else nodes.count(per_node) // (size // per_node)


def _all_divisions(num_gpus: int, size: int, per_node: int) -> Iterator[tuple[int, int]]:
    for training in range(1, num_gpus):
        is_whole = training <= per_node or training % per_node == 0
        if is_whole and (servers := _placed(num_gpus, size, per_node, training)):
            yield servers * size, training


@pytest.mark.parametrize("per_node", [4, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
def test_servers_stand_on_whole_gpus_of_nodes(size: int, per_node: int) -> None:
    for num_gpus in range(2, 50):
        found = list(divisions(num_gpus, size, per_node))
        assert found == list(_all_divisions(num_gpus, size, per_node)), num_gpus
        assert all(serving + training <= num_gpus for serving, training in found)


def _rates(job: Job, a: float, b: float, push: float = 0.0, longest: float = 1.0) -> Rates:
    """Rates with which a rollout takes a GPU-seconds of generation and b of training."""
    options = job.config.rollout
    tokens = options.prompts_per_rollout * options.samples_per_prompt * 100.0
    values = {
        "serving_rate": tokens / a,
        "training_rate": tokens / b,
        "response_tokens": 100.0,
        "longest_tokens": longest,
        "token_s": 1.0,
        "push_s": push,
        "switch_s": 2.0,
    }
    return Rates({name: Rate(value, "given") for name, value in values.items()}, "")


@pytest.mark.parametrize(("a", "b"), [(1600.0, 1600.0), (3000.0, 1000.0), (400.0, 3600.0), (2000.0, 500.0)])
def test_the_best_division_is_that_of_theory_and_of_brute_force(
    a: float, b: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers and trainer stand as a : b at once, and as sqrt a : sqrt b in turns."""
    monkeypatch.setattr("megatron_dppo.plan.split.fits", lambda *_: True)
    job, push, longest, num = job_of(QWEN3_06B, ANY), 7.0, 60.0, 16
    job = replace(job, machine=replace(job.machine, gpus_per_node=num))
    split = make_split(job, num, _rates(job, a, b, push, longest))
    both = range(1, num)
    in_turns = {n: max(a / n, longest) + b / (num - n) + push for n in both}
    at_once = {n: max(a / n, b / (num - n)) + push for n in both}
    assert split.ahead.rollout_s == pytest.approx(min(at_once.values()))
    assert split.separate.rollout_s == pytest.approx(min(in_turns.values()))
    assert split.colocated.rollout_s == pytest.approx(max(a / num, longest) + b / num + 2)
    assert abs(split.ahead.serving - num * a / (a + b)) < 1
    without_tail = make_split(job, num, _rates(job, a, b, push))
    assert abs(without_tail.separate.serving - num / (1 + math.sqrt(b / a))) < 1
    assert split.ahead.rollout_s is not None and split.max_staleness is not None
    bound = split.max_staleness
    assert bound * split.ahead.rollout_s >= longest and (
        bound == 1 or (bound - 1) * split.ahead.rollout_s < longest
    )


def test_only_numbers_that_train_admits_and_fit_are_taken() -> None:
    """Of 96 prompts in 4 mini-batches, over pairs of GPUs: data-parallel sizes that divide 24."""
    job, a, b = job_of(QWEN3_06B, FEW | {"sglang.tp_size": 2}), 3000.0, 7000.0
    split = make_split(job, 30, _rates(job, a, b))
    admitted = [m for n, m in _all_divisions(30, 2, 8) if m % 2 == 0 and 24 % (m // 2) == 0]
    assert admitted == [2, 4, 6, 8, 16, 24]
    times = {m: max(a / (_placed(30, 2, 8, m) * 2), b / m) for m in admitted}
    assert split.ahead.training == min(times, key=times.__getitem__) == 16
    assert split.ahead.rollout_s == pytest.approx(times[16])
    assert split.ahead.serving == 14
    large = make_split(job_of(QWEN3_30B), 16, _rates(job_of(QWEN3_30B), a, b))
    assert large.ahead.rollout_s is None and "Does not fit" in large.ahead.why_not
    assert large.max_staleness is None and large.settings == {}
    alone = make_split(job_of(QWEN3_06B, {"sglang.tp_size": 4}), 6, _rates(job, a, b))
    assert "no whole servers" in alone.colocated.why_not


def test_rates_are_given_before_measured_before_assumed() -> None:
    job = job_of(QWEN3_06B)
    rates = gather_rates(job, 16, parse_assumptions(["serving_rate=500", "push_s=0"]), None)
    assert rates.by_name["serving_rate"] == Rate(500.0, "given") and rates["push_s"] == 0
    assert rates.by_name["longest_tokens"] == Rate(8192, "assumed")
    assert "training_rate" not in rates.by_name
    with refused("--split"):
        gather_rates(job, 16, {}, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("serving=1", "expected NAME=VALUE with one of serving_rate"),
        ("serving_rate", "found 'serving_rate'"),
        ("serving_rate=0", "expected a number above 0"),
        ("push_s=-1", "expected a number 0 or more"),
        ("token_s=fast", "found 'fast'"),
        ("token_s=inf", "found 'inf'"),
    ],
)
def test_assumptions_that_make_no_sense(text: str, message: str) -> None:
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
ROW = {
    "time/total_s": 100.0,
    "time/rollout_s": 20.0,
    "time/train_s": 70.0,
    "time/sync_s": 10.0,
    "rollout/num_response_tokens": 720_000.0,
    "rollout/response_length_mean": 1000.0,
    "sync/servers": 2.0,
}
AHEAD = {"engine/busy_in_training": 0.5, "engine/requests_in_training": 144.0}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with base.toml, a model's config.json and two runs, "ahead" and "in_turn"."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(QWEN3_06B))
    Path("base.toml").write_text(BASE)
    for name, row, bound in (("ahead", ROW | AHEAD, 2), ("in_turn", ROW, 0)):
        config = {"rollout": {"engine": "sglang", "max_staleness": bound}, "sglang": {"tp_size": 2}}
        with RunFolder.open(Path(name), config, resume=False, decisions={"world_size": 8}) as run:
            for rollout in range(4):
                run.write_step(rollout, rollout, {"theory/longest_response": 3000.0})
                first = {"time/rollout_s": 1e6} if rollout == 0 else {}
                run.write_rollout(rollout, row | first, num_rollouts=4)
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
            run.write_rollout(rollout, ROW | {"memory/outside_bytes": each * 2**30}, num_rollouts=3)
    assumed = json.loads(_plan(*colocated, "--json").stdout)
    result = _plan(*colocated, "--json", "--measured", "run")
    if kept is None:
        assert (result.exit_code, "--split" in result.output) == (2, True)
        return
    planned = json.loads(result.stdout)
    assert planned["assumptions"]["engine_residue_bytes"] == kept * 2**30
    for moment, is_training in (("loss", True), ("backward", True), ("step", True), ("rollout", False)):
        before, after = (
            each["configured"]["stages"][0]["moments"][moment]["reserve"] for each in (assumed, planned)
        )
        assert after - before == (kept * 2**30 - ENGINE_RESIDUE_BYTES) * is_training


def test_the_command_measures_a_run(folder: Path) -> None:
    """720 000 tokens by 4 serving GPUs in 20 s and half of 70 s, and by 8 training GPUs in 70 s."""
    result = _plan("--split", "16", "--measured", "ahead", "--json")
    assert result.exit_code == 0, result.output
    split = json.loads(result.stdout)["split"]
    values = {name: (rate["value"], rate["source"]) for name, rate in split["rates"].items()}
    assert values["serving_rate"] == (pytest.approx(720_000 / 55 / 4), "measured")
    assert values["training_rate"] == (pytest.approx(720_000 / 70 / 8), "measured")
    assert values["token_s"] == (pytest.approx(144 * 100 / 720_000), "measured")
    assert values["longest_tokens"] == (3000, "measured") and values["push_s"] == (10, "measured")
    assert values["switch_s"][1] == "assumed"
    assert not split["training_is_estimated"]
    a, b = 1_536_000 / values["serving_rate"][0], 1_536_000 / values["training_rate"][0]
    colocated, separate, ahead = split["ways"]
    times = {m: max(a / n, b / m) + 10 for n, m in _all_divisions(16, 2, 8) if 192 % m == 0}
    assert ahead["rollout_s"] == pytest.approx(min(times.values()))
    assert colocated["rollout_s"] is not None and separate["rollout_s"] > ahead["rollout_s"]
    assert split["max_staleness"] == math.ceil(3000 * values["token_s"][0] / ahead["rollout_s"])
    turns = json.loads(_plan("--split", "16", "--measured", "in_turn", "--json").stdout)["split"]["rates"]
    assert turns["serving_rate"]["value"] == pytest.approx(720_000 / 20 / 4)
    assert turns["token_s"]["source"] == "assumed"
    given = _plan("--split", "16", "--measured", "ahead", "--assume", "serving_gpus=8", "--json")
    assert json.loads(given.stdout)["split"]["rates"]["serving_rate"]["value"] == pytest.approx(
        720_000 / 55 / 8
    )


def test_the_text_names_every_assumption(folder: Path) -> None:
    lines = _plan("--split", "16", "--measured", "ahead", "--assume", "longest_tokens=4096").stdout.splitlines()
    assert max(map(len, lines)) <= 100
    at = lines.index("How to divide 16 GPUs, with servers of 2 GPUs:")
    table = {line[:26].strip(): line.split() for line in lines[at + 2 : at + 5]}
    assert list(table) == ["colocated, synchronous", "separate, synchronous", "separate, asynchronous"]
    assert table["separate, asynchronous"][2:4] == ["8", "8"]
    (settings,) = (line for line in lines if line.startswith("  --gpus 8 "))
    assert "--set rollout.max_staleness=" in settings
    numbers = {line.split()[0]: line.split()[2] for line in lines if line.startswith("  ") and "_" in line[:16]}
    assert numbers == {
        "serving_rate": "measured",
        "training_rate": "measured",
        "response_tokens": "measured",
        "longest_tokens": "given",
        "token_s": "measured",
        "push_s": "measured",
        "switch_s": "assumed",
    }
    text = " ".join(line.strip() for line in lines[at:])
    assert "Measured in ahead, rollouts 1 to 3: 4 serving and 8 training GPUs." in text
    assert "Assumed besides: seconds of a rollout fall with the number of GPUs" in text
    estimated = _plan("--split", "16", "--assume", "serving_rate=3000").stdout
    assert "estimated as the gradient step above" in estimated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--measured", "ahead"), "--measured: found no --split"),
        (("--assume", "token_s=1"), "--assume: found no --split"),
        (("--split", "16"), "--split: found no rate of sampling; expected one: plan estimates training alone"),
        (("--split", "2", "--measured", "ahead"), "expected at least 3: a server and a trainer"),
        (("--split", "16", "--measured", "model"), "model has no config.toml and no metrics.jsonl"),
        (
            ("--split", "16", "--measured", "unsaid"),
            "no sync/servers in its rows; expected the number of servers",
        ),
        (("--split", "16", "--measured", "begun"), "expected finished rollouts with time/total_s"),
        (("--split", "16", "--measured", "still"), "0 s of sampling"),
    ],
)
def test_what_cannot_be_divided_is_an_error(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    config = {"rollout": {"engine": "sglang"}}
    without = {name: value for name, value in ROW.items() if name != "sync/servers"}
    for name, rows in (("unsaid", [without]), ("begun", []), ("still", [ROW | {"time/rollout_s": 0.0}])):
        with RunFolder.open(Path(name), config, resume=False, decisions={"world_size": 8}) as run:
            for rollout, row in enumerate(rows):
                run.write_rollout(rollout, row, num_rollouts=1)
    result = _plan(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr, result.stderr
