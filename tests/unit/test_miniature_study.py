"""The study's grid, what several seeds say together, and its report."""

import math
from pathlib import Path

import pytest
from study_grid import Cell, read_grid
from study_pictures import AGAINST, draw_against, draw_ranked
from study_report import figure_against, write_report
from study_results import CellResult, RunResult, findings, is_collapsed, outcome

from megatron_dppo.analysis.contrasts import contrast, estimate
from megatron_dppo.cli.grid_runs import GridRun, train_all
from megatron_dppo.config import load_config
from tests.support.refusals import refused

STUDY = Path(__file__).parents[2] / "examples" / "miniature_study"
GRID = read_grid(STUDY / "grid.toml")


@pytest.mark.parametrize("cell", GRID.cells, ids=str)
def test_every_cell_is_a_config(cell: Cell) -> None:
    config = load_config([STUDY / "base.toml"], GRID.overrides(cell))
    assert config.algorithm.preset == cell.algorithm.removesuffix("_0.15")
    assert config.parallel.expert == 1


def test_a_part_of_the_grid_keeps_what_it_can_compare() -> None:
    part = GRID.only(["dppo_binary_tv", "pg_is"], ["too_fast"])
    assert [str(cell) for cell in part.cells] == ["too_fast/dppo_binary_tv", "too_fast/pg_is"]
    assert [str(e.below) for e in part.expectations] == ["too_fast/pg_is"]
    stale = GRID.only([], [], ["staleness"])
    assert {stale.number(cell.setting, "rollout.lag") for cell in stale.cells} == {0, 1, 2, 4, 8}
    assert len(stale.cells) == 5 * 7 and len(stale.expectations) == 7
    assert all("lag_8" in f"{e.above} {e.below}" for e in stale.expectations)
    with refused("--setting", "slow"):
        GRID.only([], ["slow"])


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    text = (STUDY / "grid.toml").read_text()
    (tmp_path / "grid.toml").write_text(
        text.replace('above = "too_fast/dppo_binary_tv"', 'above = "too_fast/ppo"')
    )
    with refused(str(tmp_path / "grid.toml"), "too_fast/ppo"):
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


def test_figures_against_a_number_of_the_settings(tmp_path: Path) -> None:
    grid = GRID.only(["pg_is", "minirl"], ["lag_8", "base", "lag_2"], ["staleness"])
    (block,), results = grid.blocks, dict[Cell, CellResult]()
    for cell in grid.cells:
        lag = grid.number(cell.setting, "rollout.lag")
        runs = tuple(
            RunResult(seed, (), dict.fromkeys(AGAINST, 0.9 - lag / 10 + seed / 100), False) for seed in range(3)
        )
        results[cell] = CellResult(cell, () if str(cell) == "lag_2/minirl" else runs)
    assert block.against is not None
    drawn = figure_against(block, block.against, grid, results)
    assert [line["x"] for line in drawn["data"][:2]] == [[0, 8], [0, 2, 8]], "what has not finished is left out"
    assert drawn["data"][1]["y"] == pytest.approx([0.91, 0.71, 0.11])
    assert all(0 < end <= 0.0101 for end in drawn["data"][1]["error_y"]["array"])
    assert len(drawn["data"]) == 2 * len(AGAINST) and drawn["layout"]["xaxis4"]["title"] == {
        "text": "rollout.lag"
    }
    picture = draw_against(block, block.against, grid, results, tmp_path / "figures")
    assert picture is not None and picture.read_bytes().startswith(b"\x89PNG")
    without = {cell: CellResult(cell, ()) for cell in grid.cells}
    assert draw_against(block, block.against, grid, without, tmp_path) is None


def test_algorithms_one_below_another(tmp_path: Path) -> None:
    grid = GRID.only([], [], ["field"])
    (block,), results = grid.blocks, dict[Cell, CellResult]()
    assert block.is_ranked and len(block.cells) == 45
    for place, cell in enumerate(grid.cells):
        runs = tuple(RunResult(seed, (), {"reward_last": place / 100 + seed / 50}, False) for seed in range(3))
        results[cell] = CellResult(cell, () if cell.algorithm == "mis" else runs)
    picture = draw_ranked(block, results, tmp_path / "figures")
    assert picture is not None and picture.read_bytes().startswith(b"\x89PNG")
    assert picture.name == "ranked_field.png"
    assert draw_ranked(block, {cell: CellResult(cell, ()) for cell in grid.cells}, tmp_path) is None


def test_a_run_that_fails_costs_no_other(tmp_path: Path) -> None:
    tasks = [GridRun(tmp_path / name, (Path("no_such.toml"),), (), 1) for name in ("a", "b")]
    assert sorted(task.folder.name for task in train_all(tasks, 2)) == ["a", "b"]
    assert "no such file" in tasks[0].log.read_text()
