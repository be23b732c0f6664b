"""Advice on sampling beside training: each state of a run leads to its lever, at most once in a while."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dppo.cli import app
from megatron_dppo.config.schema import Config
from megatron_dppo.metrics.sampling_advice import WINDOW, AdviceWatch, Limits, advice, means_of
from megatron_dppo.run_folder.folder import RunFolder

LIMITS = Limits(prompts_per_rollout=64, max_staleness=2, over_sampling=2.0, max_response_tokens=16384)
ROW = {
    "time/total_s": 150.0,
    "time/rollout_s": 5.0,
    "time/train_s": 120.0,
    "time/sync_s": 20.0,
    "engine/busy_in_training": 1.0,
    "engine/requests_in_training": 240.0,
    "rollout/whole_groups": 64.0,
    "rollout/num_response_tokens": 1.5e6,  # 24 ms a token, by Little's law
}
WAITING = {"time/total_s": 205.0, "time/rollout_s": 60.0}


@pytest.mark.parametrize(
    ("changes", "limits", "lever", "words"),
    [
        ({}, {}, None, ""),
        ({"time/rollout_s": 15.0}, {}, None, ""),  # 10 % are not more than 10 %
        # Seconds of simulated runs (64 prompts of 8 responses, 20 ms a token) with their lever pulled:
        # 231 with S = 1, 176 with S = 2, 133 with S = 4; whole groups 1.3, 1.6 and 1.2 times those taken.
        (WAITING | {"rollout/whole_groups": 83.0}, {"max_staleness": 1}, "max_staleness", "from 1 to 3 (resp"),
        (
            WAITING | {"rollout/whole_groups": 102.0},
            {},
            "max_staleness",
            "responses of 16384 tokens take about 537",
        ),
        # 483 with over_sampling = 1, 310 with 2, S = 1: servers are empty but for the tail.
        (WAITING, {"over_sampling": 1.0}, "over_sampling", "from 1 to 2. If servers report queues"),
        (WAITING, {}, "over_sampling", "from 2 to 3."),
        (WAITING | {"engine/busy_in_training": 0.5}, {}, "over_sampling", "for 50% of training"),
        (WAITING, {"over_sampling": 2.5}, "over_sampling", "from 2.5 to 3."),
        # 145 with 256 slots and 103 with 512, as much as may be open.
        (WAITING, {"over_sampling": 3.0}, "more servers", "About 1.5 times as many servers"),
        (
            WAITING | {"engine/busy_in_training": 0.6},
            {"over_sampling": 3.0},
            "max_staleness",
            "no request for 40% of training",
        ),
        ({"engine/busy_in_training": 0.5}, {}, "fewer servers", "about 52% of the servers would suffice"),
        # 249 with over_sampling = 2 and 250 with 1.25: only the age falls, from 1.95 to 1.23.
        ({"rollout/whole_groups": 117.0}, {}, "less over_sampling", "from 2 to 1.25"),
        ({"rollout/whole_groups": 245.0}, {"over_sampling": 5.0}, "less over_sampling", "from 5 to 2.25"),
        ({"rollout/whole_groups": 117.0}, {"over_sampling": 1.0}, None, ""),
    ],
)
def test_each_state_has_its_lever(
    changes: dict[str, float], limits: dict[str, Any], lever: str | None, words: str
) -> None:
    own = replace(LIMITS, **limits)
    means = means_of([ROW | changes] * 3, own)
    assert means is not None
    found = advice(means, own)
    assert (None if found is None else found.lever) == lever
    assert found is None or words in found.text


def test_the_tail_is_hidden_by_s_rollouts() -> None:
    """S T >= L_max tau, of the longest response that there was."""
    means = means_of([ROW], LIMITS, longest=12_500)
    assert means is not None
    assert means.token_s == pytest.approx(0.024)
    assert means.hiding_staleness == 2  # 300 s of a response, 150 of a rollout
    longer = means_of([ROW], LIMITS, longest=12_501)
    assert longer is not None and longer.hiding_staleness == 3
    assert means_of([], LIMITS) is None
    assert means_of([ROW, {name: ROW[name] for name in ROW if name != "time/sync_s"}], LIMITS) is None
    assert means_of([ROW | {"time/total_s": float("nan")}], LIMITS) is None


def test_advice_comes_once_in_a_while_and_when_it_changes() -> None:
    watch = AdviceWatch(LIMITS)

    def heard(row: dict[str, float], count: int) -> list[int]:
        return [n for n in range(count) if watch.check(row) is not None]

    slow, idle = ROW | WAITING, ROW | {"engine/busy_in_training": 0.5}
    assert heard(slow, 5 * WINDOW) == [WINDOW - 1]
    assert heard(idle, 2 * WINDOW) == [WINDOW - 1]
    assert heard(ROW, WINDOW) == []
    for _ in range(WINDOW):
        watch.add_step({"theory/longest_response": 12_500.0})
        text = watch.check(ROW | WAITING | {"rollout/whole_groups": 102.0})
    assert text is not None and "responses of 12500 tokens" in text


def test_the_report_finds_it_too(tmp_path: Path) -> None:
    """In the findings of a run that samples beside training, of its last rollouts."""
    for name, max_staleness in (("ahead", 2), ("in_turn", 0)):
        table: Any = {"run": {"folder": tmp_path / name}, "rollout": {"engine": "sglang", "over_sampling": 2.0}}
        table["rollout"]["max_staleness"] = max_staleness
        config = Config.model_validate(table).model_dump(mode="json")
        with RunFolder.open(tmp_path / name, config, resume=False) as folder:
            for rollout in range(2 * WINDOW):
                row = ROW if rollout < WINDOW else ROW | WAITING
                folder.write_rollout(rollout, row, num_rollouts=2 * WINDOW)
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "ahead"), "-o", str(tmp_path / "report.html")])
    assert "- ahead: the trainer waited for rollouts 29% of the time" in result.output
    assert "raise rollout.over_sampling from 2 to 3" in json.dumps(result.output)
    result = CliRunner().invoke(
        app, ["compare", str(tmp_path / "in_turn"), "-o", str(tmp_path / "report.html")]
    )
    assert result.exit_code == 0 and "waited" not in result.output
