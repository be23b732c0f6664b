"""The plan's simulation of a server, compared with SGLang's own admission and retraction."""

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.plan.retraction import Policy, Server, response_lengths, simulate
from tests.support.serving import PYTHON, write_served_model

SCRIPT = Path(__file__).with_name("scheduler_reading.py")
NUM_REQUESTS, CONSERVATIVENESS = 64, 0.3
SMALL = Policy(decay_steps=50, most_new_tokens=60)
"""For requests of hundreds of tokens, which SGLang's own constants would never retract."""
CASES = [
    Server(cached_tokens, max_running, max_new_tokens, chunk_tokens, CONSERVATIVENESS, SMALL)
    for cached_tokens, max_running, max_new_tokens, chunk_tokens in (
        (1500, 64, 400, 64),
        (1500, 10, 400, 512),
        (4000, 64, 400, 300),
        (900, 30, 300, 100),
        (2500, 64, 200, 37),
    )
]


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    """Requests for each server, with longer responses from one to the next."""
    chance, found = np.random.default_rng(3), list[dict[str, Any]]()
    for number, server in enumerate(CASES):
        longest = server.max_new_tokens
        lengths = response_lengths(NUM_REQUESTS, (0.2 + 0.1 * number) * longest, longest)
        limits = {name: value for name, value in asdict(server).items() if isinstance(value, int)}
        prompts = chance.integers(5, 60, NUM_REQUESTS)
        found.append(limits | {"prompts": prompts.tolist(), "lengths": lengths.tolist()})
    return found


@pytest.fixture(scope="module")
def read(cases: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The constants of SGLang's scheduler, and what it does with the cases."""
    model = write_served_model(tmp_path_factory.mktemp("scheduler") / "model")
    asked = {"model": str(model), "cases": cases, "policy": asdict(SMALL), "conservativeness": CONSERVATIVENESS}
    command = [str(PYTHON), str(SCRIPT), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_constants_are_those_of_the_installed_version(read: dict[str, Any]) -> None:
    assert read["constants"] == asdict(Policy())


def test_the_same_requests_are_retracted_in_the_same_steps(
    read: dict[str, Any], cases: list[dict[str, Any]]
) -> None:
    for server, case, found in zip(CASES, cases, read["served"], strict=True):
        expected = simulate(server, np.array(case["prompts"]), np.array(case["lengths"]))
        print(f"{sum(found['num_retractions'])} retractions, {found['num_decode_steps']} decode steps")
        assert found["num_retractions"] == expected.num_retractions.tolist()
        assert found["num_decode_steps"] == expected.num_decode_steps
    counts = [found["num_retractions"] for found in read["served"]]
    assert sum(map(sum, counts)) > NUM_REQUESTS and max(map(max, counts)) > 1
