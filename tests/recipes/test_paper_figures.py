"""`figures` on runs of the experiments in examples/: the paper's panels, with its lines in the right panel.

Lines and panels are typed here from the paper, version 1 by its figures' numbers; data is compared, not pixels.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from typer.testing import CliRunner

from megatron_dppo.analysis.figures.canvas import Drawing, build
from megatron_dppo.analysis.figures.command import KINDS
from megatron_dppo.analysis.figures.material import Lacking, Material, experiments_of, read_curves
from megatron_dppo.cli import app
from tests.recipes.synthetic_runs import expected, of_experiments, write
from tests.support.experiments import ALGORITHMS, Algorithm

SCALING = {
    "grpo_clip_higher": "GRPO-ClipHigher",
    "cispo": "CISPO",
    "dppo_binary_tv": "DPPO-Binary-TV",
    "dppo_binary_kl": "DPPO-Binary-KL",
}
TOP_K = {"dppo_topk_tv": "DPPO-TopK-TV", "dppo_topk_kl": "DPPO-TopK-KL"}
SECTION_5 = {
    "pg_is": "PG-IS",
    "pg_tis": "PG-TIS (CISPO)",
    "grpo_clip_higher": "GRPO-ClipHigher",
    "minirl": "MiniRL",
    "minirl_tis": "MiniRL-TIS",
    "dppo_binary_tv": "DPPO-Binary-TV",
    "dppo_binary_kl": "DPPO-Binary-KL",
}
FIGURE_4 = {"dppo_binary_kl": "DPPO-Binary-KL", "dppo_binary_kl_decoupled": "DPPO-Binary-KL-Recompute"}
FIGURE_5 = {
    "pg_is": "PG-IS",
    "negative_mask_0.5": "Mask-0.5-Rollout",
    "negative_mask_0.8": "Mask-0.8-Rollout",
    "negative_mask_0.5_recomputed": "Mask-0.5-Recompute",
}
REWARD, ENTROPY, LENGTH = "reward/mean", "policy/entropy", "rollout/response_length_mean"
MISMATCH, AIME24, AIME25 = "mismatch/abs_prob_diff_mean", "eval/aime24/avg_at_32", "eval/aime25/avg_at_32"
MAX, MIN = "mismatch/prob_diff_max", "mismatch/prob_diff_min"
SIX = {
    "reward": REWARD,
    "aime24, avg@32": AIME24,
    "aime25, avg@32": AIME25,
    "mean |π − μ|": MISMATCH,
    "response length, tokens": LENGTH,
    "entropy, nats": ENTROPY,
}
Lines = dict[str, Algorithm]  # by label


@dataclass(frozen=True)
class Panel:
    """What a panel must hold."""

    metric: str
    lines: Lines
    factor: float = 1.0


def lines(experiment: str, labels: dict[str, str], suffix: str = "") -> Lines:
    return {label + suffix: Algorithm(experiment, overlay) for overlay, label in labels.items()}


CLIP = {"GRPO-ClipHigher": Algorithm("efficiency", "grpo_clip_higher")}
RELAXED = {  # alphas of version 3's legend, without the 0 of the plain clip
    f"Relax-both, α {alpha}": Algorithm("efficiency", f"relax_both_{alpha}") for alpha in (0.1, 0.3, 0.5, 0.7)
}
SIDES = {
    "Relax-both, α 0.1": Algorithm("efficiency", "relax_both_0.1"),
    "Relax-high": Algorithm("efficiency", "relax_high_0.1"),
    "Relax-low": Algorithm("efficiency", "relax_low_0.1"),
}
MOE, MOE_R3 = lines("moe_base", SCALING), lines("moe_base_r3", SCALING, " + R3")
WITH_TOPK = MOE | lines("topk_ablation", TOP_K)
THINKING, DENSE = lines("moe_thinking", SCALING), lines("dense_base", SCALING)
RATIO_AND_TV = {"GRPO": "grpo", "DPPO-Binary-TV": "dppo_binary_tv"}
TASKS = {
    "model OctoThinker-3B-Hybrid-Base": ("other_families", ""),
    "environment gem:rg:arc_1d": ("gem_tasks", "arc_1d_"),
    "environment gem:rg:acre": ("gem_tasks", "acre_"),
    "environment gem:game:Sudoku-v0-easy": ("gem_tasks", "sudoku_v0_easy_"),
}
OF_CLIPPED = {
    "μ of clipped tokens": "clipped/mu_mean",
    "entropy at clipped tokens, nats": "clipped/entropy_mean",
}
TABLE_1 = ("moe_base", "moe_base_r3", "moe_thinking", "dense_base", "moe_base_lora")
EXTREMES = "max and min of π − μ"


def overview() -> Lines:
    both = ("GRPO-ClipHigher", "DPPO-Binary-TV")
    return {k: v for k, v in (MOE | MOE_R3).items() if k.removesuffix(" + R3") in both}


PAPER: dict[str, tuple[tuple[str, ...], dict[str, Panel]]] = {  # figure -> experiments, panels in order
    "01_overview": (("moe_base_r3", "moe_base"), {"aime24, avg@32": Panel(AIME24, overview())}),
    "03_stability": (
        ("stability",),
        {
            title: Panel(metric, lines("stability", SECTION_5))
            for title, metric in {
                "reward": REWARD,
                "aime24, avg@32": AIME24,
                "mean |π − μ|": MISMATCH,
                EXTREMES: MAX,
            }.items()
        },
    ),
    "04_anchor": (
        ("stability",),
        {
            "reward": Panel(REWARD, lines("stability", FIGURE_4)),
            "mean |π − μ|": Panel(MISMATCH, lines("stability", FIGURE_4)),
        },
    ),
    "05_bad_updates": (
        ("stability",),
        {
            "reward": Panel(REWARD, lines("stability", FIGURE_5)),
            "bad updates, %": Panel("trust_region/bad_update_fraction", lines("stability", FIGURE_5), 100.0),
        },
    ),
    "06_relaxation_threshold": (
        ("efficiency",),
        {title: Panel(metric, CLIP | RELAXED) for title, metric in ({"reward": REWARD} | OF_CLIPPED).items()},
    ),
    "07_relaxation_side": (
        ("efficiency",),
        {
            title: Panel(metric, CLIP | SIDES)
            for title, metric in {"reward": REWARD, "entropy, nats": ENTROPY}.items()
        },
    ),
    "08_replay": (
        ("topk_ablation", "moe_base", "moe_base_r3"),
        {
            "aime24, avg@32 w/o R3": Panel(AIME24, MOE),
            "aime24, avg@32 w/ R3": Panel(AIME24, MOE_R3),
            "aime25, avg@32 w/o R3": Panel(AIME25, MOE),
            "aime25, avg@32 w/ R3": Panel(AIME25, MOE_R3),
        },
    ),
    "09_models": (
        ("moe_thinking", "dense_base"),
        {
            "aime24, avg@32, model Qwen3-30B-A3B": Panel(AIME24, THINKING),
            "aime25, avg@32, model Qwen3-30B-A3B": Panel(AIME25, THINKING),
            "aime24, avg@32, model Qwen3-8B-Base": Panel(AIME24, DENSE),
            "aime25, avg@32, model Qwen3-8B-Base": Panel(AIME25, DENSE),
        },
    ),
    "10_topk_scores": (
        ("topk_ablation", "moe_base"),
        {"aime24, avg@32": Panel(AIME24, WITH_TOPK), "aime25, avg@32": Panel(AIME25, WITH_TOPK)},
    ),
    "16_topk_metrics": (
        ("topk_ablation", "moe_base"),
        {title: Panel(metric, WITH_TOPK) for title, metric in SIX.items()},
    ),
    "17_tasks": (
        ("gem_tasks", "other_families"),
        {
            title: Panel(REWARD, {label: Algorithm(folder, task + own) for label, own in RATIO_AND_TV.items()})
            for title, (folder, task) in TASKS.items()
        },
    ),
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run folder of every overlay, in the layout that the examples name."""
    folder = tmp_path_factory.mktemp("synthetic") / "runs"
    return {str(each): write(each, folder / each.experiment / each.name) for each in ALGORITHMS}


def drawn(name: str, folders: list[Path]) -> list[Drawing] | Lacking:
    (kind,) = (kind for kind in KINDS if kind.name == name)
    return kind.draw(kind, Material(experiments_of(read_curves(folders)), []))


def only(answer: list[Drawing] | Lacking) -> Drawing:
    assert isinstance(answer, list)
    (drawing,) = answer
    return drawing


def folders_of(experiments: tuple[str, ...], runs: dict[str, Path]) -> list[Path]:
    """Those of the experiments in this order, the last overlay first: no figure may rely on the order."""
    return [runs[str(each)] for name in experiments for each in reversed(of_experiments(name))]


def title_of(axes: Axes) -> str:
    """A panel's title in one line."""
    return axes.get_title().replace("-\n", "-").replace("\n", " ")


def curves(axes: Axes, gid: str | None = None) -> dict[str, Any]:
    return {str(line.get_label()): line for line in axes.lines if line.get_gid() == gid}


def holds(axes: Axes, panel: Panel) -> None:
    """Assert that the axes hold the panel's lines, each with its own run's rollouts and values."""
    found = curves(axes)
    assert found.keys() == panel.lines.keys()
    for label, algorithm in panel.lines.items():
        x, y = expected(algorithm, panel.metric)
        np.testing.assert_allclose(np.asarray(found[label].get_xdata()), x, err_msg=label)
        np.testing.assert_allclose(
            np.asarray(found[label].get_ydata()), panel.factor * np.asarray(y), rtol=1e-9, err_msg=label
        )


@pytest.mark.parametrize("name", PAPER)
def test_a_figure_of_the_paper_has_its_panels_and_lines(name: str, runs: dict[str, Path]) -> None:
    experiments, panels = PAPER[name]
    figure = build(only(drawn(name, folders_of(experiments, runs))))
    assert sorted(title_of(axes) for axes in figure.axes) == sorted(panels)
    for axes in figure.axes:
        holds(axes, panels[title_of(axes)])


@pytest.mark.parametrize("name", ["01_overview", "03_stability", "06_relaxation_threshold", "08_replay"])
def test_panels_are_in_the_papers_order(name: str, runs: dict[str, Path]) -> None:
    experiments, panels = PAPER[name]
    figure = build(only(drawn(name, folders_of(experiments, runs))))
    assert [title_of(axes) for axes in figure.axes] == list(panels)


@pytest.mark.parametrize("experiment", TABLE_1)
def test_figures_11_to_15_have_six_panels_of_four_lines(experiment: str, runs: dict[str, Path]) -> None:
    suffix = " + R3" if experiment == "moe_base_r3" else ""
    figure = build(only(drawn("11_metrics", folders_of((experiment,), runs))))
    assert [axes.get_title() for axes in figure.axes] == list(SIX)
    for axes in figure.axes:
        holds(axes, Panel(SIX[axes.get_title()], lines(experiment, SCALING, suffix)))


def test_metrics_without_and_with_r3_are_two_figures_and_top_k_is_another(runs: dict[str, Path]) -> None:
    """Figures 11 and 12, of all runs of one model at once."""
    answer = drawn("11_metrics", folders_of(("topk_ablation", "moe_base_r3", "moe_base"), runs))
    assert isinstance(answer, list)
    assert [drawing.title for drawing in answer] == ["Evolution of metrics", "Evolution of metrics: with R3"]
    for drawing, of in zip(answer, (MOE, MOE_R3), strict=True):
        for axes in build(drawing).axes:
            holds(axes, Panel(SIX[axes.get_title()], of))


def test_the_largest_and_smallest_difference_are_two_curves_about_a_line_at_0(runs: dict[str, Path]) -> None:
    figure = build(only(drawn("03_stability", folders_of(("stability",), runs))))
    axes = figure.axes[3]
    (level,) = [line for line in axes.lines if line.get_gid() == "level"]
    assert set(np.asarray(level.get_ydata())) == {0.0}
    smallest = [line for line in axes.lines if line.get_gid() == MIN]
    largest = curves(axes)
    assert len(smallest) == len(largest) == 7
    for label, algorithm in lines("stability", SECTION_5).items():
        (own,) = [
            line
            for line in smallest
            if line.get_color() == largest[label].get_color()
            and line.get_linestyle() == largest[label].get_linestyle()
            and np.allclose(np.asarray(line.get_ydata()), expected(algorithm, MIN)[1])
        ]
        assert np.asarray(own.get_xdata())[0] == 1
    low, high = axes.get_ylim()
    assert low < 0 < high
    entries = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "no mismatch (π = μ)" in entries and len(entries) == 8


def test_scores_without_and_with_r3_have_one_axis(runs: dict[str, Path]) -> None:
    axes = build(only(drawn("08_replay", folders_of(PAPER["08_replay"][0], runs)))).axes
    assert axes[0].get_ylim() == axes[1].get_ylim() != axes[2].get_ylim() == axes[3].get_ylim()


def test_entropy_of_figure_7_has_a_logarithmic_axis(runs: dict[str, Path]) -> None:
    axes = build(only(drawn("07_relaxation_side", folders_of(("efficiency",), runs)))).axes
    assert [each.get_yscale() for each in axes] == ["linear", "log"]
    low, high = axes[1].get_ylim()
    assert sum(low <= tick <= high for tick in axes[1].get_yticks()) > 1, "its ticks have labels"


def test_old_runs_lack_signed_extremes_and_means_of_clipped_tokens(tmp_path: Path) -> None:
    folders = [write(each, tmp_path / each.name) for each in of_experiments("efficiency")]
    for folder in folders:
        file = folder / "metrics.jsonl"
        file.write_text(
            file.read_text().replace("mismatch/prob_diff_m", "former_m").replace("clipped/", "former/")
        )
    third, sixth = only(drawn("11_metrics", folders)), only(drawn("06_relaxation_threshold", folders))
    assert len(third.panels) == 6 and len(sixth.panels) == 1
    assert "these runs have no clipped/num_tokens_*" in " ".join(sixth.caption)
    of_old = only(drawn("03_stability", folders[:1]))
    assert len(of_old.panels) == 3 and "Without max and min of π − μ: these runs" in " ".join(of_old.caption)


def test_all_experiments_at_once_have_distinct_titles_without_paths(runs: dict[str, Path]) -> None:
    every = [*runs.values()]
    own = folders_of(("stability",), runs)
    for kind in KINDS:
        answer = drawn(kind.name, every[::-1])
        if isinstance(answer, Lacking):
            assert kind.name == "thresholds" or kind.name.startswith(("02", "clipped")), kind.name
            continue
        titles = [drawing.title for drawing in answer]
        assert len(set(titles)) == len(titles), titles
        assert not [title for title in titles if "/" in title], titles
        if kind.name == "03_stability":
            (of_it,) = [drawing for drawing in answer if set(drawing.runs) & {"pg_is", "stability/pg_is"}]
            found, alone = build(of_it).axes, build(only(drawn(kind.name, own))).axes
            assert [curves(axes).keys() for axes in found] == [curves(axes).keys() for axes in alone]
        if kind.name == "17_tasks":
            panels = {title_of(axes) for axes in build(answer[0]).axes}
            assert panels == TASKS.keys()


def test_the_command_draws_them_and_captions_say_what_differs(runs: dict[str, Path], tmp_path: Path) -> None:
    arguments = [str(folder) for folder in folders_of(("stability",), runs)]
    result = CliRunner().invoke(app, ["figures", *arguments, "-o", str(tmp_path), "--format", "svg"])
    assert result.exit_code == 0, result.output
    names = {path.stem for path in tmp_path.glob("*.svg")}
    figures = {"01_mask_regions", "03_stability", "04_anchor", "05_bad_updates", "11_metrics", "17_tasks"}
    assert names == figures
    caption = (tmp_path / "03_stability.txt").read_text()
    assert "PG-TIS (CISPO): seed 0 (runs: pg_tis)." in caption
    left_out = {each.name for each in of_experiments("stability")} - SECTION_5.keys()
    (said,) = [line for line in caption.splitlines() if line.startswith("Runs that this figure is not about: ")]
    assert set(said.removesuffix(".").partition(": ")[2].split(", ")) == left_out
    assert "first mini-batch" in caption and "bends a curve's ends" in caption
    assert "It has no counterpart" in (tmp_path / "01_mask_regions.txt").read_text()
