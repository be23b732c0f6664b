"""The report's sources of the mismatch: each bar, line and cell is of the run and metric that it names."""

import itertools
import json
import math
import re
from html import unescape
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dppo.analysis.report.summary import format_number
from megatron_dppo.cli import app
from megatron_dppo.run_folder.folder import RunFolder

STATISTICS = (
    *("abs_prob_diff_mean", "tv_p50", "tv_p99", "tv_p999", "kl_k1", "kl_k3"),
    *("ratio_min", "ratio_p001", "ratio_p999", "ratio_max", "num_tokens"),
)
OF_ROLLOUTS = ("mismatch_replayed", "mismatch_live", "mismatch", "mismatch_age_0", "mismatch_age_2")
NUM_ROLLOUTS, NUM_STEPS = 2, 4
COLUMNS = ["|π − μ|", "p50", "p99", "p99.9", "k1 KL", "k3 KL", "π/μ min", "p0.1", "p99.9", "max", "tokens"]
"""Headings of the table, one for each of STATISTICS."""
Rows = dict[str, list[dict[str, float]]]  # of rollouts, and of steps by their place in the rollout


def write(path: Path, fresh: Any) -> Rows:
    """Write a run, all of whose numbers differ."""
    rows: Rows = {"rollout": [], **{f"{place}": [] for place in range(NUM_STEPS)}}
    with RunFolder.open(path, {"rollout": {"routing_replay": "measure"}}, resume=False) as folder:
        for rollout in range(NUM_ROLLOUTS):
            for place in range(NUM_STEPS):
                drift = {f"drift/{name}": next(fresh) for name in (*STATISTICS, "topk_tv_p999")}
                folder.write_step(rollout, rollout * NUM_STEPS + place, drift)
                rows[f"{place}"].append(drift)
            row = {f"{prefix}/{name}": next(fresh) for prefix in OF_ROLLOUTS for name in STATISTICS}
            row |= {"time/paired_forward_s": next(fresh), "time/total_s": 10 + next(fresh)}
            folder.write_rollout(rollout, row, num_rollouts=NUM_ROLLOUTS)
            rows["rollout"].append(row)
    return rows


@pytest.fixture
def report(tmp_path: Path) -> tuple[str, dict[str, Any], dict[str, Rows]]:
    """The page of two runs, its figures, and the runs' rows by name."""
    fresh = (round(0.1 + 0.0137 * n, 4) for n in itertools.count())
    runs = {name: write(tmp_path / name, fresh) for name in ("second", "first")}
    out = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["compare", *(str(tmp_path / name) for name in runs), "-o", str(out)])
    assert done.exit_code == 0, done.output
    page = out.read_text()
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return page[: found.start()], json.loads(found[1]), runs


def mean(rows: list[dict[str, float]], name: str) -> float:
    return fmean(row[name] for row in rows)


def of(figure: dict[str, Any], run: int, panel: int = 0) -> dict[float, float]:
    """What a run's trace of a panel shows, by x."""
    axis = "x" if panel == 0 else f"x{panel + 1}"
    (trace,) = (t for t in figure["data"] if (t["meta"], t["xaxis"]) == (run, axis))
    return dict(zip(trace["x"], trace["y"], strict=True))


def test_bars_and_lines_are_of_the_source_that_they_name(
    report: tuple[str, dict[str, Any], dict[str, Rows]],
) -> None:
    _, figures, runs = report
    for index, rows in enumerate(runs.values()):
        rollouts, last = rows["rollout"], rows[f"{NUM_STEPS - 1}"]
        bars = of(figures["mismatch-sources"], index)
        sources = [mean(rollouts, f"{prefix}/kl_k3") for prefix in OF_ROLLOUTS[:3]]
        assert list(bars.values()) == pytest.approx([*sources, mean(last, "drift/kl_k3")], rel=1e-4)
        for panel, name in enumerate(("kl_k3", "tv_p999", "topk_tv_p999")):
            line = of(figures["drift"], index, panel)
            expected = [mean(rows[f"{place}"], f"drift/{name}") for place in range(NUM_STEPS)]
            assert list(line) == list(range(NUM_STEPS))
            assert list(line.values()) == pytest.approx(expected, rel=1e-4)
        ages = {age: mean(rollouts, f"mismatch_age_{age}/kl_k3") for age in (0, 2)}
        assert of(figures["staleness"], index) == pytest.approx(ages, rel=1e-4)
    ticks = figures["mismatch-sources"]["layout"]["xaxis"]["ticktext"]
    assert [tick.replace("<br>", " ") for tick in ticks] == [
        *("engines", "engines + routing", "before the steps", "after the steps")
    ]


def test_cells_are_of_the_source_and_statistic_that_they_name(
    report: tuple[str, dict[str, Any], dict[str, Rows]],
) -> None:
    page, _, runs = report
    section = page[page.index('id="mismatch-table"') :].partition("</section>")[0]
    for name, rows in runs.items():
        (table,) = re.findall(rf'"Mismatch of {name}"[^>]*>(.*?)</table>', section, re.DOTALL)
        lines = [
            [
                unescape(re.sub("<[^>]*>", "", cell)).strip()
                for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)
            ]
            for line in re.findall(r"<tr[^>]*>(.*?)</tr>", table, re.DOTALL)
        ]
        assert lines[0][1:] == COLUMNS
        expected = {
            "engines: replayed routes": ("mismatch_replayed", rows["rollout"]),
            "engines and routing: live routes": ("mismatch_live", rows["rollout"]),
            "as trained, before the first step": ("mismatch", rows["rollout"]),
            "of these, weights of age 0": ("mismatch_age_0", rows["rollout"]),
            "of these, weights of age 2": ("mismatch_age_2", rows["rollout"]),
            "after 1 gradient step": ("drift", rows["1"]),
            f"after {NUM_STEPS - 1} gradient steps": ("drift", rows[f"{NUM_STEPS - 1}"]),
        }
        assert {label: cells for label, *cells in lines[1:]} == {
            label: [cell(of_source, f"{prefix}/{statistic}") for statistic in STATISTICS]
            for label, (prefix, of_source) in expected.items()
        }
        paired = mean(rows["rollout"], "time/paired_forward_s")
        share = paired / mean(rows["rollout"], "time/total_s")
        assert f"The paired forward took {paired:.3g} s, {share:.1%} of the time" in section


def plain(html: str) -> str:
    return unescape(re.sub("<[^>]*>", "", html)).strip()


def cell(rows: list[dict[str, float]], name: str) -> str:
    """Means; the smallest and largest ratio, and the sum of the tokens."""
    values = [row[name] for row in rows]
    whole = {"ratio_min": min, "ratio_max": max, "num_tokens": math.fsum}.get(name.partition("/")[2], fmean)
    return format_number(whole(values), "count" if name.endswith("num_tokens") else "number")
