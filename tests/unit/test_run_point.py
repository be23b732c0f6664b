"""State of open and waiting rollouts in a checkpoint, and the configs that cannot resume it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.checkpoints.megatron_folder import require_reshardable
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.gradient_steps import gradient_steps
from megatron_dppo.errors import CheckpointError
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.metrics.step_metrics import add_staleness
from megatron_dppo.run.state import RunPoint, TrainingState
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.single_phase import rollout_only, train_only
from megatron_dppo.types import OpenRollout, RunState, TrainBatch, WeightVersionSpan
from tests.support.ranks_on_threads import alone
from tests.support.refusals import refused
from tests.support.samples import ROUTING, make_group, make_sample

LAYOUT = Layout(world_size=1)


def steps(num_steps: int, *versions: int) -> tuple[TrainBatch, ...]:
    """Gradient steps on one sample of five response tokens for each version, and one of an unknown one."""
    spans = [(WeightVersionSpan(0, 5, version),) for version in versions] + [()]
    samples = [replace(make_sample(list(range(8)), 3), weight_versions=span) for span in spans]
    tables = {
        "rollout": {"prompts_per_rollout": num_steps},
        "algorithm": {"minibatches_per_rollout": num_steps},
    }
    groups = [make_group(place, samples) for place in range(num_steps)]
    return tuple(
        gradient_steps(
            groups, 0, Config.model_validate(tables), alone(), routing=ROUTING, shares_prefixes=False
        )[0]
    )


LISTED = {"num_steps": 1, "sums": [["active", "-", [[7, 2.0, 0.1, 0.3, 1.5, math.inf]]]]}


@pytest.mark.parametrize(
    "opened",
    [
        None,
        OpenRollout(1, 1, {"a/b": 1.0}, {"total": 2.0}),
        OpenRollout(1, 1, {"a/b": 1.0}, {"total": 2.0}, LISTED),
    ],
)
@pytest.mark.parametrize("waiting", [(), (2,), (2, 0, 3)])
def test_a_point_is_read_as_it_was_written(opened: OpenRollout | None, waiting: tuple[int, ...]) -> None:
    """A rollout may have no steps: no token of it learns."""
    queue = tuple(OpenRollout(n, metrics={"reward/mean": float(n)}) for n in waiting)
    num_steps = sum(waiting) + (opened is not None)
    batches = steps(num_steps) if num_steps else ()
    point = RunPoint(RunState(3, 7, 3, {"index": 4}), 12, "digest", opened, 0.5, "toml", queue, batches)
    content = json.loads(point.to_json(LAYOUT))
    assert RunPoint.from_json(content, lambda: point.steps) == point
    assert point.keeps_steps == (opened is not None or bool(waiting))
    if not waiting:
        del content["queue"]  # of an older version
        if opened is not None and not opened.listed:
            del content["open_rollout"]["listed"]
        assert RunPoint.from_json(content, lambda: point.steps) == point


def test_rollouts_that_wait_stay_on_their_layout(tmp_path: Path) -> None:
    point = RunPoint(RunState(3, 7, 3, {}), 0, "", queue=(OpenRollout(0),) * 2)
    content: dict[str, Any] = json.loads(point.to_json(LAYOUT))
    with pytest.raises(CheckpointError, match=r"2 rollouts .*rollout\.lag\)"):
        require_reshardable(tmp_path, content, Layout(world_size=2), is_optimizer_distributed=True)


def test_staleness_counts_tokens_with_a_known_version_only() -> None:
    metrics = Metrics()
    add_staleness(metrics, steps(2, 3, 5), weight_version=6)
    assert metrics.values() == {"rollout/staleness_mean": 2.0, "rollout/staleness_max": 3.0}
    unknown = Metrics()
    add_staleness(unknown, steps(2), weight_version=6)
    assert unknown.values() == {}


@pytest.mark.parametrize("half", [rollout_only, train_only])
def test_half_a_loop_has_no_weights_to_lag_behind(half: Any, tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"folder": tmp_path / "run"}, "rollout": {"lag": 2}})
    with refused("rollout.lag", "2"):
        half(config, tmp_path / "kept")


@pytest.mark.parametrize(
    ("lag", "sampled"),
    [
        (0, [[0], [1], [2], [3], [4]]),
        (2, [[0, 1, 2], [3], [4], [], []]),
        (9, [[0, 1, 2, 3, 4], [], [], [], []]),
    ],
)
def test_run_samples_each_rollout_once_up_to_the_last(lag: int, sampled: list[list[int]]) -> None:
    """By the weights of each version, `rollout.lag` rollouts ahead of the one that trains."""
    config = Config.model_validate({"run": {"num_rollouts": 5}, "rollout": {"lag": lag}})
    state = TrainingState(config, Runtime(torch.device("cpu"), 0, 1))
    for version, expected in enumerate(sampled):
        found = list[int]()
        while (rollout := state.next_to_sample) is not None:
            state.queue_rollout((), {"rollout": rollout}, {"index": rollout})
            found.append(rollout)
        assert found == expected and not state.is_over
        state.begin_rollout(())
        assert len(state.queue) == min(lag, 4 - version)
        state.finish_rollout(version + 1)
    assert state.is_over and state.next_to_sample is None


def test_a_rollout_trains_on_its_own_steps_while_others_wait() -> None:
    """The steps of the open rollout may be replaced when it opens, and each is dropped once it is taken."""
    config = Config.model_validate({"run": {"num_rollouts": 5}, "rollout": {"lag": 2}})
    state = TrainingState(config, Runtime(torch.device("cpu"), 0, 1))
    batches = [TrainBatch((), number, 1) for number in range(6)]
    for rollout, own in enumerate((batches[:2], [], batches[2:5])):
        state.queue_rollout(own, {}, {"index": rollout})
    state.begin_rollout([batches[5], batches[1]])
    assert state.steps == (batches[5], batches[1], *batches[2:5])
    state.finish_step(is_skipped=False)
    assert state.open_rollout == OpenRollout(1, 1) and state.steps == tuple(batches[1:5])
    state.finish_step(is_skipped=True)
    state.finish_rollout(1)
    state.begin_rollout([])
    assert state.open_rollout == OpenRollout(0) and state.steps == tuple(batches[2:5])
    state.finish_rollout(2)
    state.begin_rollout(state.steps)
    assert state.open_rollout == OpenRollout(3) and state.steps == tuple(batches[2:5])
