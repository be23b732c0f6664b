"""The report's time line: what the trainer did and what was sampled meanwhile is what the rows say."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from typer.testing import CliRunner

from megatron_dppo.analysis.report.timeline import cycles, hidden, sentence, shares
from megatron_dppo.analysis.report.timeline_plot import BINS, DETAILED, MOST_RUNS, time_line
from megatron_dppo.cli import app
from megatron_dppo.run_folder.folder import RunFolder
from megatron_dppo.run_folder.reader import read_run

ONE_ROW = {
    "time/rollout_s": 2.0,
    "time/batch_s": 0.5,
    "time/paired_forward_s": 0.5,
    "time/train_s": 5.0,
    "time/sync_s": 1.0,
    "time/total_s": 10.0,  # 1 s is in no phase
    "reward/mean": 0.5,
}
AHEAD = {
    "sync/hold_s": 0.5,
    "engine/busy_in_training": 0.75,
    "engine/requests_in_training": 12.0,
    "rollout/staleness_mean": 0.75,
    "rollout/staleness_max": 2.0,
}


def _write(
    path: Path, num_rollouts: int, row: dict[str, float], *, max_staleness: int = 0, every_steps: int = 0
) -> Path:
    """A run that is evaluated before its rollouts 0 and 2, and after its last, and saved before rollout 1."""
    config = {"rollout": {"max_staleness": max_staleness}, "checkpoint": {"every_steps": every_steps}}
    with RunFolder.open(path, config, resume=False) as folder:
        for rollout in range(num_rollouts + 1):
            if rollout in (0, 2, num_rollouts):
                folder.write_evaluation(rollout, {"eval/held_out/avg_at_1": 0.5, "time/evaluation_s": 3.0})
            if rollout < num_rollouts:
                saved = {"time/save_s": 0.5} if rollout == 1 else {}
                folder.write_rollout(rollout, row | saved, num_rollouts=num_rollouts)
    return path


def _report(*runs: Path) -> tuple[str, dict[str, Any]]:
    """The page's text and its figures, as the command writes them."""
    out = runs[0].parent / "report.html"
    result = CliRunner().invoke(app, ["compare", *map(str, runs), "-o", str(out)])
    assert result.exit_code == 0, result.output
    html = out.read_text()
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.DOTALL)
    assert found
    return html[: html.index("<script>")], json.loads(found[1])


def _bars(figure: dict[str, Any], name: str, panel: int = 0, run: int = 0) -> dict[str, Any]:
    axis = "x" if panel == 0 else f"x{panel + 1}"
    (found,) = (
        trace
        for trace in figure["data"]
        if (trace["name"], trace["xaxis"], trace["meta"], trace["type"]) == (name, axis, run, "bar")
    )
    return found


def test_phases_stand_one_after_the_other_with_what_was_sampled_beneath(tmp_path: Path) -> None:
    html, figures = _report(_write(tmp_path / "run", 3, ONE_ROW | AHEAD, max_staleness=2))
    figure = figures["time-line"]
    go.Figure(figure)
    starts = {
        "evaluating": [0, 23.5, 36.5],
        "saving a checkpoint": [13],
        "waiting for a rollout": [3, 13.5, 26.5],
        "training": [5, 15.5, 28.5],
        "other work": [11, 21.5, 34.5],
        "pushing weights": [12, 22.5, 35.5],
    }
    seconds = {"evaluating": 3, "saving a checkpoint": 0.5, "waiting for a rollout": 2, "training": 6}
    for name, expected in starts.items():
        bars = _bars(figure, name)
        assert bars["base"] == expected
        assert set(bars["x"]) == {seconds.get(name, 1)}
        assert (set(bars["y"]), set(bars["width"])) == ({1}, {0.8})
    waited, beside = _bars(figure, "sampling"), _bars(figure, "sampling beside training")
    assert sorted(waited["base"]) == sorted(starts["evaluating"] + starts["waiting for a rollout"])
    assert (beside["base"], beside["x"]) == (starts["training"], [7, 7, 7])
    assert set(beside["width"]) == {0.6} and set(waited["width"]) == {0.8}
    assert set(waited["y"]) == set(beside["y"]) == {0}
    (pushes,) = (trace for trace in figure["data"] if trace["name"] == "push")
    assert pushes["x"] == [13, 13, None, 23.5, 23.5, None, 36.5, 36.5, None]
    assert (
        "The trainer spent 46 % of its time training, 15 % waiting for a rollout, 7.6 % pushing weights (3.8 % "
        "until nothing was on its way), 23 % evaluating, 1.3 % saving a checkpoint and 7.6 % on other work. "
        "Tokens were 0.75 versions old in the mean, 2 at most. Servers had requests on their way for 75 % of "
        "training, 12 in the mean: 72 % of generation's time was hidden behind it."
    ) in html.replace("&#39;", "'")
    assert html.count('style="--phase: var(--phase-') == 8


def test_shares_are_those_of_the_rows(tmp_path: Path) -> None:
    found = cycles(read_run(_write(tmp_path / "run", 4, ONE_ROW | AHEAD, max_staleness=1)))
    assert shares(found)["train"] == pytest.approx(24 / (4 * 10 + 3 * 3 + 0.5))
    assert sum(shares(found).values()) == pytest.approx(1)
    assert hidden(found) == pytest.approx(0.75 * 7 / (0.75 * 7 + 2))
    assert shares([]) == {} and hidden([]) is None


def test_a_synchronous_run_takes_turns(tmp_path: Path) -> None:
    html, figures = _report(_write(tmp_path / "run", 3, ONE_ROW))
    names = {trace["name"] for trace in figures["time-line"]["data"]}
    assert "sampling" in names and not names & {"sampling beside training", "servers busy"}
    assert "Generation and training took turns (rollout.max_staleness = 0)." in html
    assert "versions old" not in html


def test_a_save_between_gradient_steps_is_not_counted_twice(tmp_path: Path) -> None:
    between = cycles(read_run(_write(tmp_path / "between", 3, ONE_ROW, every_steps=3)))[1]
    assert (between.seconds["checkpoint"], between.seconds["other"], between.total_s) == (0.5, 0.5, 10)
    before = cycles(read_run(_write(tmp_path / "before", 3, ONE_ROW)))[1]
    assert (before.seconds["other"], before.total_s) == (1, 10.5)


def test_a_long_run_is_small(tmp_path: Path) -> None:
    """The last rollouts in detail, all of them in at most BINS bars of shares."""
    num, short = 10_000, read_run(_write(tmp_path / "run", 3, ONE_ROW | AHEAD, max_staleness=2))
    rows = tuple(replace(short.rollouts[0], rollout=rollout) for rollout in range(num))
    line = time_line([replace(short, rollouts=rows, evaluations=())], ["long"])
    assert line is not None
    figure = line["figure"]
    assert len(json.dumps(figure)) < 30_000
    trained = _bars(figure, "training")
    assert [of[0] for of in trained["customdata"]] == list(range(num - DETAILED + 1, num + 1))
    stack = [t for t in figure["data"] if t["xaxis"] == "x2" and t["type"] == "bar"]
    totals = [sum(values) for values in zip(*(trace["y"] for trace in stack), strict=True)]
    assert totals == pytest.approx([100] * BINS, abs=0.01)


def test_runs_without_seconds_say_so_and_many_are_not_drawn(tmp_path: Path) -> None:
    old = _write(tmp_path / "old", 3, {"reward/mean": 0.5})
    html, figures = _report(old)
    assert "time-line" not in figures and 'id="time-line"' not in html
    new = _write(tmp_path / "new", 3, ONE_ROW)
    html, figures = _report(old, new)
    assert "old: no time line: its rows in metrics.jsonl have no time/rollout_s and time/train_s." in html
    assert {trace["meta"] for trace in figures["time-line"]["data"]} == {1}
    unmeasured = _write(tmp_path / "unmeasured", 3, ONE_ROW, max_staleness=1)
    assert "How much generation overlapped training is not in its rows." in sentence(read_run(unmeasured))
    many = [_write(tmp_path / f"run_{number}", 2, ONE_ROW) for number in range(MOST_RUNS + 1)]
    html, figures = _report(*many)
    assert "time-line" not in figures
    assert html.count("The trainer spent") == MOST_RUNS + 1
