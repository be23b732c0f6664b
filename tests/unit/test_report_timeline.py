"""The report's time line: what the trainer did and what was sampled meanwhile is what the rows say."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from typer.testing import CliRunner

from megatron_dppo.analysis.report.timeline import (
    BINS,
    DETAILED,
    MOST_RUNS,
    cycles,
    hidden_share,
    sentence,
    shares,
    time_line,
)
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


def test_phases_are_in_sequence_above_the_sampling(tmp_path: Path) -> None:
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
    waited, beside = _bars(figure, "sampling"), _bars(figure, "sampling during training")
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
    assert hidden_share(found) == pytest.approx(0.75 * 7 / (0.75 * 7 + 2))
    assert shares([]) == {} and hidden_share([]) is None


def test_a_synchronous_run_takes_turns(tmp_path: Path) -> None:
    html, figures = _report(_write(tmp_path / "run", 3, ONE_ROW))
    names = {trace["name"] for trace in figures["time-line"]["data"]}
    assert "sampling" in names and not names & {"sampling during training", "servers busy"}
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


def _uneven(start: float, num_rollouts: int) -> list[dict[str, float]]:
    """Rows in which no two numbers are equal, of one rollout or of several."""
    rows: list[dict[str, float]] = []
    for rollout in range(num_rollouts):
        rollout_s, batch_s, paired_s, train_s, push_s, other_s = (
            start * base + rollout * more
            for base, more in ((7, 0.5), (0.3, 0.07), (0.9, 0.11), (5, 0.9), (2, 0.3), (1.3, 0.2))
        )
        rows.append(
            {
                "time/rollout_s": rollout_s,
                "time/batch_s": batch_s,
                "time/paired_forward_s": paired_s,
                "time/train_s": train_s,
                "time/sync_s": push_s,
                "time/total_s": rollout_s + batch_s + paired_s + train_s + push_s + other_s,
                "time/save_s": 0.4 * start + 0.05 * rollout,
                "sync/hold_s": 0.6 * push_s,
                "engine/busy_in_training": 0.9 - 0.2 * rollout - 0.1 * start,
                "engine/requests_in_training": 20 * start + 3 * rollout,
                "rollout/staleness_mean": 0.2 + 0.3 * rollout + 0.05 * start,
                "rollout/staleness_max": 1 + 2 * rollout + start,
            }
        )
    return rows


def _write_uneven(path: Path, rows: list[dict[str, float]], max_staleness: int) -> Path:
    """A run of these rows, evaluated before rollout 1 and after the last, each time for longer."""
    config = {"rollout": {"max_staleness": max_staleness}, "checkpoint": {"every_steps": 0}}
    with RunFolder.open(path, config, resume=False) as folder:
        for rollout, row in enumerate(rows):
            if rollout == 1:
                folder.write_evaluation(rollout, {"time/evaluation_s": 1.7})
            folder.write_rollout(rollout, row, num_rollouts=len(rows))
        folder.write_evaluation(len(rows), {"time/evaluation_s": 2.9})
    return path


def _expected(rows: list[dict[str, float]]) -> dict[str, list[tuple[float, float, int]]]:
    """(start, seconds, rollout from 1) of each phase, added up by hand."""
    found: dict[str, list[tuple[float, float, int]]] = {}
    now = 0.0
    for number, row in enumerate(rows, start=1):
        trained = row["time/batch_s"] + row["time/paired_forward_s"] + row["time/train_s"]
        rest = row["time/total_s"] - row["time/rollout_s"] - trained - row["time/sync_s"]
        for name, seconds in (
            ("evaluating", 1.7 if number == 2 else 0.0),
            ("saving a checkpoint", row["time/save_s"]),
            ("waiting for a rollout", row["time/rollout_s"]),
            ("training", trained),
            ("other work", rest),
            ("pushing weights", row["time/sync_s"]),
        ):
            if seconds:
                found.setdefault(name, []).append((now, seconds, number))
            now += seconds
    found["evaluating"].append((now, 2.9, len(rows) + 1))
    return found


PHASES = {
    "evaluating": "evaluation",
    "saving a checkpoint": "checkpoint",
    "waiting for a rollout": "rollout",
    "training": "train",
    "other work": "other",
    "pushing weights": "push",
}
"""The colour of each phase, by its words."""


def test_each_run_and_rollout_and_phase_has_its_own_seconds(tmp_path: Path) -> None:
    """Two runs of another length each, in which no two numbers are equal."""
    runs = {"slow": _uneven(2.0, 3), "fast": _uneven(0.8, 2)}
    html, figures = _report(*(_write_uneven(tmp_path / name, rows, 2) for name, rows in runs.items()))
    figure = figures["time-line"]
    titles = [note["text"] for note in figure["layout"]["annotations"]]
    for index, (name, rows) in enumerate(runs.items()):
        assert [f"{name}: last {len(rows) + 1} rollouts" in title for title in titles].index(True) == 2 * index
        lanes, of_shares = 2 * index, 2 * index + 1
        expected = _expected(rows)
        whole = sum(seconds for bars in expected.values() for _, seconds, _ in bars)
        by_rollout = [
            sum(seconds for bars in expected.values() for _, seconds, at in bars if at == number)
            for number in range(1, len(rows) + 2)
        ]
        for words, bars in expected.items():
            drawn = _bars(figure, words, lanes, index)
            assert drawn["base"] == pytest.approx([start for start, _, _ in bars], rel=1e-4)
            assert drawn["x"] == pytest.approx([seconds for _, seconds, _ in bars], rel=1e-4)
            assert [each[0] for each in drawn["customdata"]] == [number for _, _, number in bars]
            assert drawn["legendgroup"] == f"phase-{PHASES[words]}"
            assert f"{words}, %{{customdata[2]}} s" in drawn["hovertemplate"]
            stacked = _bars(figure, words, of_shares, index)
            seconds = {number: each for _, each, number in bars}
            assert stacked["y"] == pytest.approx(
                [100 * seconds.get(n, 0.0) / total for n, total in enumerate(by_rollout, start=1)], rel=1e-4
            )
            assert stacked["legendgroup"] == f"phase-{PHASES[words]}"
            share = 100 * sum(seconds.values()) / whole
            said = f"{share:.1f} %" if share < 9.95 else f"{share:.0f} %"
            (sentence_,) = re.findall(rf"{name}: (The trainer spent .*?)</", html)
            assert re.search(rf"{re.escape(said)} (of its time )?(on )?{words}", sentence_), (words, said)
        beside = _bars(figure, "sampling during training", lanes, index)
        busy = [row["engine/busy_in_training"] for row in rows]
        assert beside["width"] == pytest.approx([0.8 * share for share in busy], rel=1e-4)
        requests = [f"{row['engine/requests_in_training']:.3g} requests" for row in rows]
        assert [each[1].partition(", ")[2] for each in beside["customdata"]] == requests
        (line,) = (t for t in figure["data"] if t["name"] == "servers busy" and t["meta"] == index)
        assert line["y"][: len(rows)] == pytest.approx([100 * share for share in busy], rel=1e-4)
        mean = sum(row["rollout/staleness_mean"] for row in rows) / len(rows)
        largest = max(row["rollout/staleness_max"] for row in rows)
        assert f"Tokens were {mean:.2g} versions old in the mean, {largest:.0f} at most." in sentence_
        hold = 100 * sum(row["sync/hold_s"] for row in rows) / whole
        assert f"({hold:.1f} % until nothing was on its way)" in sentence_
    legend = re.findall(r"var\(--phase-(\w+)\)\"></i>([^<]*)<", html)
    assert {text: colour for colour, text in legend if text in PHASES} == PHASES
