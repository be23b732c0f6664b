"""Who holds the GPU in a run with a colocated server: the real loop and a real server, in the real order.

On a CPU the server's calls free nothing. They are made all the same, and a server refuses those that come out
of order: one that still works, or has not released what it is to take back.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.sglang.turns_job import train_in_turns
from tests.support.ranks import run_ranks
from tests.support.sanity_run import make_task, settings
from tests.support.serving import OPTIONS

_PUSH = [
    "expect",
    "trainer leaves",
    "engine weights takes",
    "/pause_generation",
    "/resume_memory_occupation weights",
    "/end_weight_update",  # of a trainer before this one, if it left one open
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "engine cache takes",
    "/end_weight_update",
    "/resume_memory_occupation kv_cache",
    "/continue_generation",
]
_BACK = [
    "/pause_generation",
    "/release_memory_occupation weights kv_cache",
    "engine cache leaves",
    "engine weights leaves",
    "trainer takes",
]
_START = ["/pause_generation", "/release_memory_occupation weights kv_cache", "trainer takes"]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_task(tmp_path_factory.mktemp("turns"))
    held_out = {"held_out": {"prompts": str(folder / "held_out.jsonl")}}
    return settings(
        folder,
        "run",
        run={"num_rollouts": 3},
        rollout={
            "engine": "sglang",
            "sglang": {"num_own_servers": 1, "colocated": True, "weight_sync": "tensor"},
        },
        data={"reward": "tests.faults.rewards:digits"},
        checkpoint={"every": 2, "asynchronous": False},
        evaluation={"every": 1, "samples_per_prompt": 1, "sets": held_out},
        sglang=OPTIONS | {"context_length": 64},
    )


def test_trainer_and_server_take_turns_in_gpu_memory(tables: dict[str, Any], tmp_path: Path) -> None:
    (first,) = run_ranks(train_in_turns, 1, tmp_path, tables, 1)
    assert first[: len(_START)] == _START, (
        "a server starts with its memory, and gives it up before there is a trainer"
    )
    rollout = ["sample", *_BACK, *["train"] * first.count("train"), *_PUSH, "evaluate"]
    assert first == [*_START, *_PUSH, "evaluate", *rollout, "sample", *_BACK, "save"], "requests were aborted"
    (resumed,) = run_ranks(train_in_turns, 1, tmp_path, tables, None)
    assert resumed == [*_START, *_PUSH, *rollout, *_BACK, "save", *_PUSH, *rollout, *_BACK, "save", "over"]
