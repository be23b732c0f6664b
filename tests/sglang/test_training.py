"""`megatron-dppo train` with its server: Top-K masks, R3, sampling ahead, and an agent; killed, and resumed."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from megatron_dppo.engines.sglang.records import API_KEY
from tests.support.leaks import environment_of, readable_secrets, secret_files, secrets_on_command_lines
from tests.support.lookup_run import lookup_settings, make_lookup_task, require_learned
from tests.support.processes import is_alive, wait_until
from tests.support.sanity_run import make_task, settings
from tests.support.serving import OPTIONS, ROOT

ROLLOUTS = 4


SERVERS: dict[str, Any] = {
    "engine": "sglang",
    "sglang": {"num_own_servers": 1, "sync_bucket_bytes": 50_000},
}


@pytest.fixture(params=["ahead", "an agent in turn"])
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A run of a few rollouts, sampled while it trains, or of an agent that learns, sampled before."""
    if request.param == "ahead":
        tables = settings(
            make_task(tmp_path),
            "run",
            run={"num_rollouts": ROLLOUTS},
            rollout={"max_staleness": 2, "over_sampling": 2.5} | SERVERS,
            data={"reward": "tests.faults.rewards:digits"},
        )
    else:
        tables = lookup_settings(make_lookup_task(tmp_path), "run", 52, **SERVERS)
    tables |= {
        "checkpoint": {"every": tables["run"]["num_rollouts"] // ROLLOUTS, "asynchronous": False},
        "tracking": {"samples_every": 1},
        "sglang": OPTIONS | {"context_length": 64},
    }
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(tables))
    return file


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The whole rows of metrics.jsonl of a kind."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    read = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in read if row["kind"] == kind]


def require_ahead(folder: Path, rollouts: list[dict[str, Any]]) -> None:
    """Tokens of older weights were trained on, none beyond the bound, and no place twice or never."""
    assert sum(row["rollout/staleness_mean"] for row in rollouts) > 0
    assert all(row["rollout/staleness_max"] <= 2 for row in rollouts)
    places = [
        place
        for file in sorted((folder / "samples").glob("*.jsonl"))
        for place in {json.loads(line)["id"].partition("+")[0] for line in file.read_text().splitlines()}
    ]
    assert len(set(places)) == len(places) == 4 * ROLLOUTS


SECRETS = {"WANDB_API_KEY": "wandb-5b1c9a", "HF_TOKEN": "hf_2d7e4f"}
"""Of the user, and nobody else's business; unlike the key of the servers."""


def start(config: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "megatron_dppo", "train", str(config)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | SECRETS
    del environment[API_KEY]  # the run draws one
    with log.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, cwd=ROOT)


def test_run_with_its_own_servers_resumes_after_a_kill(config: Path) -> None:
    folder, log = config.parent / "run", config.parent / "train.log"
    tables = tomllib.loads(config.read_text())
    num_rollouts, algorithm = tables["run"]["num_rollouts"], tables["algorithm"]
    num_before = num_rollouts // ROLLOUTS
    trainer = start(config, log)
    try:
        wait_until(lambda: len(rows(folder, "rollout")) >= num_before or trainer.poll() is not None, 1500)
        assert trainer.poll() is None, log.read_text()
        server = json.loads((folder / "servers" / "own-0.json").read_text())["pid"]
        key = {"the key": environment_of(server)[API_KEY]}
        assert [file.name for file, _ in secret_files(folder, key)] == ["own-0.log"], (
            "SGLang logs its arguments"
        )
        assert readable_secrets(config.parent, key) == secrets_on_command_lines(SECRETS | key) == []
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    wait_until(lambda: not is_alive(server), 300)  # it ends with its trainer

    assert start(config, log).wait(1500) == 0, log.read_text()
    rollouts = rows(folder, "rollout")
    assert [row["rollout"] for row in rollouts] == list(range(num_rollouts))
    assert rollouts[0]["mismatch/abs_prob_diff_mean"] <= 1e-6
    assert rollouts[0]["routing/agreement_mean"] >= 0.99  # experts may tie
    if "rollout/open_groups" in rollouts[0]:
        require_ahead(folder, rollouts)
    else:
        require_learned(rollouts, above=0.45, gain=0.15, is_seeded=False)  # 0.5 is for the call
    for row in rollouts:
        assert row["sync/probe_abs_diff_max"] <= 5e-5
        assert row["rollout/dropped_samples"] == 0
    steps = rows(folder, "step")
    num_steps = algorithm["minibatches_per_rollout"] * algorithm.get("epochs_per_rollout", 1)
    assert len(steps) == num_rollouts * num_steps
    assert any(row["optimizer/grad_norm"] > 0 for row in steps)
    assert list((folder / "servers").glob("*.json")) == []
    assert readable_secrets(config.parent, key) == secret_files(config.parent, SECRETS) == []
