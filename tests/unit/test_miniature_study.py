"""The study's grid, what several seeds say together, and its report."""

import math
from pathlib import Path

import pytest
from study_grid import Cell, read_grid
from study_report import write_report
from study_results import CellResult, RunResult, findings, is_collapsed, outcome
from study_runs import Task, run_all

from megatron_dppo.analysis.contrasts import contrast, estimate
from megatron_dppo.config import load_config
from megatron_dppo.errors import ConfigError

STUDY = Path(__file__).parents[2] / "examples" / "miniature_study"
GRID = read_grid(STUDY / "grid.toml")


@pytest.mark.parametrize("cell", GRID.cells, ids=str)
def test_every_cell_is_a_config(cell: Cell) -> None:
    config = load_config([STUDY / "base.toml"], GRID.overrides(cell))
    assert config.algorithm.preset == cell.algorithm
    assert config.parallel.expert == 1


def test_a_part_of_the_grid_keeps_what_it_can_compare() -> None:
    part = GRID.only(["dppo_binary_tv", "pg_is"], ["too_fast"])
    assert [str(cell) for cell in part.cells] == ["too_fast/dppo_binary_tv", "too_fast/pg_is"]
    assert [str(e.below) for e in part.expectations] == ["too_fast/pg_is"]
    with pytest.raises(ConfigError, match="--setting: found slow"):
        GRID.only([], ["slow"])


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    text = (STUDY / "grid.toml").read_text()
    (tmp_path / "grid.toml").write_text(
        text.replace('above = "too_fast/dppo_binary_tv"', 'above = "too_fast/ppo"')
    )
    with pytest.raises(ConfigError, match="found too_fast/ppo"):
        read_grid(tmp_path / "grid.toml")


def test_a_collapse_is_a_fall_that_stays() -> None:
    rising = [i / 100 for i in range(100)]
    assert not is_collapsed(rising)
    assert is_collapsed(rising + [0.1] * 10)
    assert not is_collapsed([*rising, *[0.1] * 5, *[0.9] * 10])
    assert not is_collapsed([0.9, 0.1])


def test_intervals_of_seeds() -> None:
    several = estimate([0.0, 1.0, 2.0, 3.0])
    assert several.mean == 1.5 and 0.0 < several.low < 1.5 < several.high < 3.0
    assert math.isnan(estimate([1.0]).low) and math.isnan(estimate([]).mean)
    assert math.isnan(estimate([1.0, math.nan]).mean)
    paired = contrast([1.1, 2.1, 3.2], [1.0, 2.0, 3.0])
    assert paired.mean == pytest.approx(0.4 / 3) and paired.low >= 0.1 and paired.num_pairs == 3
    assert paired.effect_size == pytest.approx((0.4 / 3) / 0.057735, rel=1e-4)


@pytest.mark.parametrize(
    ("above", "below", "words"),
    [
        ([0.9, 0.8, 0.85], [0.1, 0.2, 0.15], "came out (3 seeds)"),
        ([0.1, 0.2, 0.15], [0.9, 0.8, 0.85], "the opposite came out (3 seeds)"),
        ([0.1, 0.9, 0.5], [0.5, 0.5, 0.5], "not decided by 3 seeds"),
    ],
)
def test_outcomes(above: list[float], below: list[float], words: str) -> None:
    assert outcome(contrast(above, below)) == words


def test_the_report_says_what_is_missing_and_what_came_out(tmp_path: Path) -> None:
    grid = GRID.only(["dppo_binary_tv", "pg_is"], ["too_fast", "reuse"])

    def result(cell: Cell, last: float) -> CellResult:
        figures = dict.fromkeys(
            (
                "abs_prob_diff_last",
                "kl_k3_mean",
                "kl_k3_last",
                "masked_positive",
                "masked_negative",
                "agreement",
            ),
            0.1,
        )
        runs = [
            RunResult(seed, (0.3, last + seed / 100), figures | {"reward_last": last + seed / 100}, False)
            for seed in range(3)
        ]
        return CellResult(cell, tuple(runs))

    results = {cell: CellResult(cell, ()) for cell in grid.cells}
    results |= {
        c: result(c, 0.9 if "tv" in c.algorithm else 0.4) for c in grid.cells if c.setting == "too_fast"
    }
    write_report(tmp_path, grid, results, findings(grid, results), ["6 of 12 runs have finished."])
    text = (tmp_path / "report.md").read_text()
    assert "when the learning rate is too high: came out (3 seeds)." in text
    assert "| reuse/pg_is | 0 | 0/0 | - |" in text
    page = (tmp_path / "report.html").read_text()
    assert "plotly" in page and "too_fast/dppo_binary_tv" in page


def test_a_run_that_fails_costs_no_other(tmp_path: Path) -> None:
    tasks = [Task(tmp_path / name, (Path("no_such.toml"),), (), 1) for name in ("a", "b")]
    assert sorted(task.folder.name for task in run_all(tasks, 2)) == ["a", "b"]
    assert "no such file" in tasks[0].log.read_text()
