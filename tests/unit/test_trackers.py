"""Trackers get what metrics.jsonl gets: each is opened for real and read back with its own reader."""

import importlib
import json
import math
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError
from megatron_dppo.run_folder.folder import RunFolder
from megatron_dppo.run_folder.trackers import WEBHOOK, open_backends
from tests.support.receiver import receiving

CONFIG = Config.model_validate({"algorithm": {"ratio_cap": math.inf}, "run": {"seed": 3}}).model_dump()
STEPS = {step: {"loss": step / 3} for step in range(4)}
ROLLOUTS = {0: {"reward/mean": 0.25}, 1: {"reward/mean": 0.5, "policy/entropy": math.nan}}
EVALUATION = {"eval/aime24/avg_at_32": 0.125}


def track(path: Path, backend: str) -> None:
    """A run of two rollouts of two gradient steps, with an evaluation after it."""
    with RunFolder.open(path, CONFIG, resume=False, backends=(backend,)) as folder:
        for step, metrics in STEPS.items():
            folder.write_step(step // 2, step, metrics)
            if step % 2:
                folder.write_rollout(step // 2, ROLLOUTS[step // 2], num_rollouts=2)
        folder.write_evaluation(2, EVALUATION)


def resume(path: Path, backend: str) -> None:
    """One rollout more, in another process's life."""
    with RunFolder.open(path, CONFIG, resume=True, backends=(backend,)) as folder:
        folder.truncate((path / "metrics.jsonl").stat().st_size)
        folder.write_rollout(2, {"reward/mean": 0.75}, num_rollouts=3)


def tracker_id(path: Path) -> str:
    return json.loads((path / "tracker_run.json").read_text())["id"]


def test_alarm_is_posted_and_never_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(WEBHOOK, "file:///secret")
    with pytest.raises(ConfigError) as refusal:
        open_backends((), tmp_path, CONFIG)
    assert refusal.value.problems[0].where == WEBHOOK and "secret" not in str(refusal.value)
    with receiving() as (url, got):
        for place in ("/secret", "/refuse"):
            monkeypatch.setenv(WEBHOOK, url + place)
            with RunFolder.open(tmp_path / "my_run", CONFIG, resume=True) as folder:
                folder.send_alarms(6, {"tv_tail": "too long"})
            assert got[-1]["alarms"] == {"tv_tail": "too long"} and got[-1]["run"].endswith("my_run")
            assert "my_run" in got[-1]["text"] and "rollout 7: tv_tail: too long" in got[-1]["text"]
            assert ("Not Found" in caplog.text) is (place == "/refuse")
    assert "/refuse" not in caplog.text


def test_prometheus_reads_the_latest_values(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = CONFIG | {"tracking": CONFIG["tracking"] | {"prometheus_address": address}}
    with RunFolder.open(tmp_path / "my_run", config, resume=False, backends=("prometheus",)) as folder:
        folder.write_step(0, 4, {"loss": 1 / 3})
        for rollout, metrics in ROLLOUTS.items():
            folder.write_rollout(rollout, metrics, num_rollouts=2)
        folder.send_alarms(1, {"tv_tail": "too long"})
        found = urllib.request.urlopen(f"http://{address}/metrics").read().decode()
        with pytest.raises(ConfigError) as refusal:  # of another run on the same host
            open_backends(("prometheus",), tmp_path, config)
    assert refusal.value.problems[0].where == "tracking.prometheus_address"
    lines = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in found.splitlines()}
    assert lines['megatron_dppo_metric{name="reward/mean"}'] == "0.5"
    assert lines['megatron_dppo_metric{name="policy/entropy"}'] == "NaN"
    assert float(lines['megatron_dppo_metric{name="step/loss"}']) == 1 / 3
    assert lines['megatron_dppo_finished{axis="rollout"}'] == "2.0"
    assert lines['megatron_dppo_finished{axis="step"}'] == "5.0"
    assert lines['megatron_dppo_alarms_total{name="tv_tail"}'] == "1.0"
    assert time.time() - float(lines["megatron_dppo_last_row_timestamp_seconds"]) < 600
    assert f'folder="{tmp_path}/my_run"' in found
    with pytest.raises(URLError):
        urllib.request.urlopen(f"http://{address}/metrics")


@pytest.mark.parametrize("address", ["9464", "host:", "http://host:1", "::1:9464", "host:123456"])
def test_an_address_has_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ValueError):
        Config.model_validate({"tracking": {"prometheus_address": address}})
    for good in ("0.0.0.0:9464", "[::1]:80", "node7:9464"):
        Config.model_validate({"tracking": {"prometheus_address": good}})


def test_tensorboard_is_read_back(tmp_path: Path) -> None:
    track(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"step/loss", "reward/mean", "policy/entropy", *EVALUATION}
    found = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in ("step/loss", "reward/mean")}
    assert found["step/loss"] == [(step, pytest.approx(step / 3)) for step in range(4)]
    assert found["reward/mean"] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("eval/aime24/avg_at_32")] == [(2, 0.125)]
    assert math.isnan(events.Scalars("policy/entropy")[0].value)


def test_trackios_files_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is first imported
    for name in ("first", "second"):
        track(tmp_path / name / "my_run", "trackio")
    resume(tmp_path / "first" / "my_run", "trackio")
    assert (tmp_path / "trackio" / "megatron_dppo.db").is_file()
    trackio: Any = importlib.import_module("trackio")
    runs = trackio.Api().runs("megatron_dppo")
    assert [run.name.partition("-")[0] for run in runs] == ["my_run", "my_run"]
    assert len({run.id for run in runs}) == 2
    (run_id,) = (run.id for run in runs if run.name == f"my_run-{tracker_id(tmp_path / 'first' / 'my_run')}")
    assert runs[0].config["run"]["seed"] == 3
    rows = trackio.SQLiteStorage.get_logs("megatron_dppo", run_id=run_id)
    points = {(name, row["step"]): row[name] for row in rows for name in row.keys() - {"step", "timestamp"}}
    assert math.isnan(points.pop(("policy/entropy", 2)))
    steps = {("step/loss", step): metrics["loss"] for step, metrics in STEPS.items()}
    rollouts = {("reward/mean", 1): 0.25, ("reward/mean", 2): 0.5, ("eval/aime24/avg_at_32", 2): 0.125}
    rollouts |= {("reward/mean", 3): 0.75}
    assert points == steps | rollouts


def test_an_offline_wandb_run_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb_home"))
    track(tmp_path / "my_run", "wandb")
    resume(tmp_path / "my_run", "wandb")
    wandb.teardown()  # its service would live as long as this process, which other tests count the children of
    log, of_resumed = sorted((tmp_path / "my_run" / "wandb").glob("offline-run-*/*.wandb"))
    assert log.name == of_resumed.name == f"run-{tracker_id(tmp_path / 'my_run')}.wandb"
    reader = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    lines = subprocess.run(reader, capture_output=True, check=True, text=True).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    (run,) = (record["run"] for record in records if record["type"] == "run")
    assert run["display_name"] == "my_run"
    config = run["config"]["update"]
    assert float(config["algorithm"]["ratio_cap"]) == math.inf
    assert config["run"]["seed"] == 3
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    rows = [{name: value for name, value in row.items() if not name.startswith("_")} for row in history]
    assert rows == [
        {"gradient_step": 0, "step/loss": 0},
        {"gradient_step": 1, "step/loss": 1 / 3},
        {"rollout": 1, "reward/mean": 0.25},
        {"gradient_step": 2, "step/loss": 2 / 3},
        {"gradient_step": 3, "step/loss": 1.0},
        {"rollout": 2, "reward/mean": 0.5, "policy/entropy": "NaN"},
        {"rollout": 2, "eval/aime24/avg_at_32": 0.125},
    ]
    axes = {r["metric"]["name"]: r["metric"].get("step_metric") for r in records if r["type"] == "metric"}
    over_rollouts = dict.fromkeys(("reward/mean", "policy/entropy", *EVALUATION), "rollout")
    assert axes.items() >= ({"step/loss": "gradient_step"} | over_rollouts).items()
