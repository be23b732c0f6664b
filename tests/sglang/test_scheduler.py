"""The plan's simulation of a server, compared with SGLang's own admission and retraction."""

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.plan.retraction import response_lengths
from megatron_dppo.plan.scheduler import Policy, Server, simulate
from tests.support.serving import PYTHON, write_served_model

SCRIPT = Path(__file__).with_name("scheduler_reading.py")
SMALL = Policy(decay_steps=50, most_new_tokens=60)
"""For requests of hundreds of tokens, which SGLang's own constants would never retract."""
CASES = [
    Server(cached_tokens, max_running, max_new_tokens, chunk_tokens, conservativeness=0.3, policy=SMALL)
    for cached_tokens, max_running, max_new_tokens, chunk_tokens in (
        (1500, 64, 400, 64),
        (1500, 10, 400, 512),
        (4000, 64, 400, 300),
        (900, 30, 300, 100),
        (2500, 64, 200, 37),
    )
]


def read(model: Path, cases: list[dict[str, Any]], conservativeness: float, variables: dict[str, str]) -> Any:
    """What SGLang's scheduler does with the cases, with variables in its environment."""
    asked = {"model": str(model), "conservativeness": conservativeness, "cases": cases}
    done = subprocess.run(
        [PYTHON, SCRIPT, json.dumps(asked)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("scheduler") / "model")


def test_constants_are_those_of_the_installed_version(model: Path) -> None:
    assert read(model, [], 1.0, {})["constants"] == asdict(Policy())


def test_the_same_requests_are_retracted_in_the_same_steps(model: Path) -> None:
    chance, cases, num_requests = np.random.default_rng(3), list[dict[str, Any]](), 64
    for number, server in enumerate(CASES):
        lengths = response_lengths(
            num_requests, (0.2 + 0.1 * number) * server.max_new_tokens, server.max_new_tokens
        )
        limits = {name: value for name, value in asdict(server).items() if isinstance(value, int)}
        prompts = chance.integers(5, 60, num_requests)
        cases.append(limits | {"prompts": prompts.tolist(), "lengths": lengths.tolist()})
    variables = {
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": str(SMALL.most_new_tokens),
        "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": str(SMALL.decay_steps),
    }
    served = read(model, cases, 0.3, variables)["served"]
    for server, case, found in zip(CASES, cases, served, strict=True):
        expected = simulate(server, np.array(case["prompts"]), np.array(case["lengths"]))
        print(f"{sum(found['num_retractions'])} retractions, {found['num_decode_steps']} decode steps")
        assert found["num_retractions"] == expected.num_retractions.tolist()
        assert found["num_decode_steps"] == expected.num_decode_steps
    assert sum(sum(found["num_retractions"]) for found in served) > num_requests
    assert any(max(found["num_retractions"]) > 1 for found in served)
