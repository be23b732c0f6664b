"""Runs that differ in their seed alone, in the report."""

from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.analysis.contrasts import contrast, estimate
from megatron_dppo.analysis.lines import run_names
from megatron_dppo.analysis.report.numbers import numbers, seed_tables
from megatron_dppo.analysis.report.plots import Panel, Section, figure
from megatron_dppo.analysis.report.report import compare, looks, title, toggles
from megatron_dppo.config.schema import Config
from megatron_dppo.run_folder.folder import RunFolder
from megatron_dppo.run_folder.reader import read_run


def write_run(folder: Path, preset: str, seed: int, reward: float) -> Path:
    """A run of two rollouts with a constant reward."""
    path = folder / f"{preset}_{seed}"
    tables = {"run": {"folder": path, "seed": seed, "num_rollouts": 2}, "algorithm": {"preset": preset}}
    config = Config.model_validate(tables).model_dump(exclude_none=True)
    with RunFolder.open(path, config, resume=False) as opened:
        for rollout in range(2):
            opened.write_step(rollout, rollout, {"policy/entropy": 0.5})
            values = {"reward/mean": reward, "throughput/tokens_per_s": 1.0, "time/rollout_s": 1.0}
            opened.write_rollout(rollout, values, num_rollouts=2)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("seeds")
    rewards = {"dppo_binary_tv": [0.8, 0.7, 0.9], "grpo": [0.5, 0.45, 0.52]}
    return [write_run(folder, name, seed, r) for name, of in rewards.items() for seed, r in enumerate(of)]


def tables_of(paths: list[Path]) -> dict[str, Any]:
    runs = [read_run(path) for path in paths]
    found = seed_tables(numbers(runs, run_names(runs)))
    assert found is not None
    return found


def test_means_and_contrasts_are_of_equal_seeds(runs: list[Path]) -> None:
    tables = tables_of([*runs[:3], *runs[3:5]])
    assert tables["columns"] == ["seeds", "reward, last 10", "entropy, last 10"]
    assert [(row["label"], row["cells"][0]) for row in tables["means"]] == [
        ("dppo_binary_tv", "3"),
        ("grpo", "2"),
    ]
    expected = estimate([0.8, 0.7, 0.9])
    assert tables["means"][0]["cells"][1] == f"0.8 [{expected.low:.3g}, {expected.high:.3g}]"
    (row,) = tables["contrasts"]
    of_two = contrast([0.5, 0.45], [0.8, 0.7])
    assert (row["label"], row["cells"][0]) == ("grpo − dppo_binary_tv", "2")
    shown = f"{of_two.mean:.3g} [{of_two.low:.3g}, {of_two.high:.3g}]; d {of_two.effect_size:.3g}"
    assert row["cells"][1] == shown.replace("-", "\N{MINUS SIGN}")


def test_report_combines_several_seeds(runs: list[Path], tmp_path: Path) -> None:
    compare(runs, tmp_path / "six.html")
    page = (tmp_path / "six.html").read_text()
    assert "Seeds together" in page and "Contrasts on equal seeds" in page
    compare([runs[0], runs[3]], tmp_path / "two.html")
    assert "Seeds together" not in (tmp_path / "two.html").read_text()


def test_one_setting_has_no_contrast(runs: list[Path]) -> None:
    tables = tables_of(runs[:3])
    assert [row["label"] for row in tables["means"]] == ["all runs"] and not tables["contrasts"]


def test_seeds_share_a_toggle_where_runs_are_many(runs: list[Path]) -> None:
    read = [read_run(run) for run in runs]
    names = [run.name for run in read]
    both = toggles(read, names)
    assert [(line.label, line.places) for line in both] == [
        ("dppo_binary_tv ×3", (0, 1, 2)),
        ("grpo ×3", (3, 4, 5)),
    ]
    assert looks(both) == [0, 0, 0, 1, 1, 1] and title(names, both) == "6 runs of 2 settings"
    few = toggles(read[1:4], names[1:4])
    assert looks(few) == [0, 1, 2] and title(names[1:4], few) == "dppo_binary_tv_1 · dppo_binary_tv_2 · grpo_0"
    assert looks(toggles(read[:3] * 2, names[:3] * 2)) == list(range(6)), "one setting: each run for itself"
    alike = [f"s/seed_{n}" for n in range(6)]
    assert [toggle.label for toggle in toggles(read, alike)] == ["dppo_binary_tv ×3", "grpo ×3"]


def test_seeds_that_share_a_colour_have_one_mean_with_its_interval(runs: list[Path]) -> None:
    read = [read_run(run) for run in (runs[4], *runs[:3], runs[3], runs[5])]  # seeds in another order
    names = run_names(read)
    section = Section("s", "s", "s", (Panel("reward", ("reward/mean", "throughput/tokens_per_s")),))
    drawn = figure(section, read, names, looks(toggles(read, names)))
    assert drawn is not None
    of = {trace["name"]: trace for trace in drawn["data"]}
    assert len(of) == 12 + 2 * 4
    for label, rewards in {"grpo": [0.45, 0.5, 0.52], "dppo_binary_tv": [0.8, 0.7, 0.9]}.items():
        mean, interval = of[f"{label}, mean of 3 seeds"], of[f"{label}, mean of 3 seeds, interval"]
        found = estimate(rewards)
        assert mean["y"] == pytest.approx([found.mean] * 2, rel=1e-5) and mean.get("opacity") is None
        assert interval["y"] == pytest.approx([found.low] * 2 + [found.high] * 2, rel=1e-5)
        assert mean["meta"] == interval["meta"] == names.index(next(n for n in names if n.startswith(label)))
        assert all(of[name]["opacity"] == 0.25 for name in names if name.startswith(label))
