"""Trackers get what metrics.jsonl gets: each is opened for real and read back with its own reader."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_dppo.config.schema import Config
from megatron_dppo.run_folder.folder import RunFolder

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
    for name in ("first", "resumed"):
        track(tmp_path / name / "my_run", "trackio")
    assert (tmp_path / "trackio" / "megatron_dppo.db").is_file()
    trackio: Any = importlib.import_module("trackio")
    runs = trackio.Api().runs("megatron_dppo")
    assert [run.name for run in runs] == ["my_run", "my_run"]
    assert len({run.id for run in runs}) == 2
    assert runs[0].config["run"]["seed"] == 3
    rows = trackio.SQLiteStorage.get_logs("megatron_dppo", run_id=runs[0].id)
    points = {(name, row["step"]): row[name] for row in rows for name in row.keys() - {"step", "timestamp"}}
    assert math.isnan(points.pop(("policy/entropy", 2)))
    steps = {("step/loss", step): metrics["loss"] for step, metrics in STEPS.items()}
    rollouts = {("reward/mean", 1): 0.25, ("reward/mean", 2): 0.5, ("eval/aime24/avg_at_32", 2): 0.125}
    assert points == steps | rollouts


def test_an_offline_wandb_run_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb_home"))
    track(tmp_path / "my_run", "wandb")
    wandb.teardown()  # its service would live as long as this process, which other tests count the children of
    (log,) = (tmp_path / "my_run" / "wandb").glob("offline-run-*/*.wandb")
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
