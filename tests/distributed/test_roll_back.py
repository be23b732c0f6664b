"""A run that goes back to an earlier checkpoint: nothing comes twice, nothing is lost, and a resume knows."""

import json
from pathlib import Path
from typing import Any

from megatron_dppo.data.batches.batch_file import group_files, read_batches
from megatron_dppo.data.prompts.prompts import PromptStream, load_prompts
from megatron_dppo.runtime.process import Runtime
from tests.support.ranks import run_ranks
from tests.support.records import metrics_of
from tests.support.sanity_run import settings

EXACT = {"rollout": {"transformers": {"weights": "float32"}, "routing_replay": "measure"}}


def train_with_alarms(runtime: Runtime, config: dict[str, Any], alarmed: list[int], good: int) -> str | None:
    """A run in which rollouts of these numbers raise an alarm, each once, and the error it ends with."""
    from megatron_dppo.config.schema import Config
    from megatron_dppo.errors import TrainingError
    from megatron_dppo.metrics import alarms
    from megatron_dppo.train import main

    left = list(alarmed)

    def rule(history: Any, row: Any) -> str | None:
        if left and len(history) == left[0]:
            left.pop(0)
            return "found trouble"
        return None

    alarms.RULES = {"trouble": rule}
    alarms.AlarmWatch.good_until = lambda self, found: good  # type: ignore[method-assign]
    try:
        main(Config.model_validate(config))
    except TrainingError as error:
        return str(error)
    return None


def config_of(task: Path, name: str, **tracking: Any) -> dict[str, Any]:
    tables = settings(task, name, tracking={"alarms": "roll_back", **tracking}, checkpoint={"every": 1})
    tables["rollout"] |= EXACT["rollout"]
    return tables


def test_roll_back_continues_with_the_next_prompts(task: Path, tmp_path: Path) -> None:
    """Rollouts 1 and 2 were taken back: their prompts do not come again, and none is left out."""
    config = config_of(task, "back", batches_every=1)
    assert run_ranks(train_with_alarms, 2, tmp_path, config, [2], 1) == [None, None]
    run = Path(config["run"]["folder"])
    rows = metrics_of(run)
    rollouts = [row for row in rows if row["kind"] == "rollout"]
    assert [row["rollout"] for row in rollouts] == [0, 1, 2, 3]
    assert [row.get("alarms/roll_backs") for row in rollouts] == [None, 1, 1, 1]
    prompts = load_prompts(Path(config["data"]["prompts"]), "prompt", "answer")
    stream = PromptStream(prompts, config["run"].get("seed", 0), True, None)
    size = config["rollout"]["prompts_per_rollout"]
    for rollout, first in ((0, 0), (1, 3 * size), (2, 4 * size), (3, 5 * size)):
        steps = [step for file in group_files(run / "batches", rollout) for step in read_batches(file)]
        samples = [name for step in steps for m in step.microbatches for name in m.sample_ids]
        expected = [stream.at(place).prompt.id for place in range(first, first + size)]
        assert {name.split("/")[1] for name in samples} == set(expected), rollout
    assert states_of(run)[-1]["data_cursor"] == {"epoch": 0, "index": 6 * size}
    left = (run / "evidence" / "rolled_back_rollout_000002.jsonl").read_text().splitlines()
    assert [json.loads(row)["rollout"] for row in left if '"kind": "rollout"' in row] == [1, 2]
    for row in rollouts:  # a float32 engine that holds the weights that it should
        assert row["mismatch/abs_prob_diff_mean"] < 1e-6, row
        waited_s, total_s = row.get("time/save_s", 0.0), row["time/total_s"]
        assert (waited_s > 0) == (row["rollout"] > 0)
        # Saves begin between rollouts, which time/total_s leaves out, and may end between two gradient steps.
        counted_s = row["rollout/num_response_tokens"] / row["throughput/tokens_per_s"]
        assert (counted_s > total_s + 1e-6) == (waited_s > 0)
        assert counted_s <= total_s + waited_s + 1e-6
    assert "went back to 1 rollouts" in (tmp_path / "rank0.log").read_text()
    names = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    assert "step_00000004.abandoned" in names
    last = states_of(run)[-1]
    assert (last["rollout"], last["weight_version"]) == (4, 7)


def states_of(run: Path) -> list[dict[str, Any]]:
    """States of the checkpoints, oldest first, without those that were left behind."""
    folders = sorted((run / "checkpoints").glob("step_????????"))
    return [json.loads((folder / "state.json").read_text())["state"] for folder in folders]


def test_roll_back_without_a_usable_checkpoint_is_refused(task: Path, tmp_path: Path) -> None:
    errors = run_ranks(train_with_alarms, 1, tmp_path, config_of(task, "none"), [0], 0)
    assert "Found no checkpoint of at most 0 rollouts to go back to" in errors[0]
    config = config_of(task, "often", max_roll_backs=1)
    errors = run_ranks(train_with_alarms, 1, tmp_path, config, [1, 1], 1)
    assert "The run went back 1 times; expected at most tracking.max_roll_backs = 1" in errors[0]
