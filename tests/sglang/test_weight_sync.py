"""Pushes to a real server: each way, from each kind of layout, and what the probe makes of a wrong tensor."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.serving import Served, served_config
from tests.support.sync_job import (
    WAYS,
    move_an_expert,
    perturb_each_tensor,
    push_every_way,
    release_and_push,
    require_moved,
)

pytestmark = pytest.mark.usefixtures("changes_weights")

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one process": (1, {}),
    "tensor 2": (2, {"tensor": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
    "expert 2": (2, {"expert": 2}),
}


def settings_of(served: Served, parallel: dict[str, int]) -> dict[str, Any]:
    """A trainer of the served model, whose rollouts come from that server."""
    config = served_config(served.folder, served.run).model_dump(mode="json", exclude_none=True)
    return config | {"parallel": parallel}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pushed_weights_are_served(served: Served, tmp_path: Path, layout: str) -> None:
    processes, parallel = LAYOUTS[layout]
    first = 10 * (list(LAYOUTS).index(layout) + 1)
    results = run_ranks(push_every_way, processes, tmp_path, settings_of(served, parallel), first)
    for of_rank in results:
        for way in WAYS:
            pushed = of_rank[way]
            assert "The server does not hold the trainer's weights" in pushed["stale"]
            assert pushed["metrics"]["sync/probe_abs_diff_max"] <= 5e-5
            assert pushed["metrics"]["sync/probe_experts_not_reached"] == 0
            assert pushed["versions"] == {pushed["version"]}
            print(layout, way, pushed["metrics"])


def test_a_pushed_expert_moves_the_tokens_that_are_routed_to_it(served: Served, tmp_path: Path) -> None:
    """What `tests/gpu` asks of a GPU."""
    (result,) = run_ranks(move_an_expert, 1, tmp_path, settings_of(served, {}), 140)
    for way in WAYS:
        print(way, result[way])
        require_moved(result[way], 1e-5)


def test_the_probe_finds_every_wrong_tensor(served: Served, tmp_path: Path) -> None:
    (found,) = run_ranks(perturb_each_tensor, 1, tmp_path, settings_of(served, {}), 100)
    restored = found.pop("restored")
    missed = {name: -difference for name, difference in found.items() if difference < 1e-4}
    print(f"{len(found)} tensors, the least visible {min(found.values()):.1e}, restored {restored:.1e}")
    assert not missed
    assert restored <= 5e-5


def test_a_server_that_another_trainer_left_without_its_memory_serves_after_a_push(
    served: Served, tmp_path: Path
) -> None:
    """The server would end if it were asked to resume what it holds; on a CPU nothing is freed."""
    settings = settings_of(served, {})
    settings["rollout"]["sglang"] |= {"colocated": True, "weight_sync": "tensor"}
    (result,) = run_ranks(release_and_push, 1, tmp_path, settings, 120)
    assert result["metrics"]["sync/probe_abs_diff_max"] <= 5e-5
    assert result["is_away"]
