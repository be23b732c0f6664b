"""A tiny run of some rollouts on the lab's nodes, as torchrun starts it."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.nodes.lab import Node
from tests.support.jobs import overrides_of

CONFIGS = ("examples/moe_base/base.toml", "examples/moe_base/dppo_binary_tv.toml")
OPTIONS: dict[str, object] = {"run.num_rollouts": 28, "checkpoint.every": 3, "evaluation.every": 100}


def num_trained(run: Path) -> int:
    """Rollouts in metrics.jsonl, whose last line may be torn."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return sum(row["kind"] == "rollout" for row in rows)


def train(tiny: Sequence[str], run: Path, **options: object) -> list[str]:
    """What torchrun starts."""
    overrides = overrides_of(OPTIONS | {"run.folder": run} | options)
    return ["-m", "megatron_dppo", "train", *CONFIGS, *tiny, *overrides]


def torchrun(nodes: Sequence[Node], options: Sequence[str], log: Path, timeout_s: float = 1200) -> None:
    """Start torchrun with these options on each node and wait for a good end; kill the nodes if none comes."""
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(Path(sys.prefix) / "bin" / "torchrun"), *options]
    launchers = [node.start(command, log, **variables) for node in nodes]
    deadline = time.monotonic() + timeout_s
    try:
        statuses = [launcher.wait(max(0.1, deadline - time.monotonic())) for launcher in launchers]
    except subprocess.TimeoutExpired as error:
        for node in nodes:
            node.kill()
        raise AssertionError(f"not within {timeout_s:g} s: {command}\n{log.read_text()[-4000:]}") from error
    assert not any(statuses), log.read_text()[-4000:]
