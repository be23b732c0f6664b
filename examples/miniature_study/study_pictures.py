"""The study's figures as pictures: over a number of its settings, or algorithms one below another."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
from matplotlib.figure import Figure
from study_grid import Block, Cell, Grid
from study_results import FIGURES, CellResult

from megatron_dppo.analysis.figures.style import LOOKS, NAMES, RC

AGAINST = ("reward_last", "kl_k3_last", "masked_positive", "masked_negative")


def draw_against(
    block: Block, key: str, grid: Grid, results: Mapping[Cell, CellResult], folder: Path
) -> Path | None:
    """Draw a panel for each figure of AGAINST, a line for each algorithm; return the file, none without runs.

    Settings stand at equal distances, in the order of their number; bars are 95 % intervals over seeds.
    """
    finished = [cell for cell in block.cells if results[cell].runs]
    if not finished:
        return None
    numbers = sorted({grid.number(cell.setting, key) for cell in finished})
    algorithms = list(dict.fromkeys(cell.algorithm for cell in finished))
    with mpl.rc_context(dict(RC)):
        drawing = Figure(figsize=(10, 3.4), layout="constrained")
        panels = drawing.subplots(1, len(AGAINST))
        for axes, name in zip(panels, AGAINST, strict=True):
            for shift, algorithm in enumerate(algorithms):
                colour, dash = LOOKS.get(algorithm, ("#777777", "-"))
                cells = sorted(
                    (grid.number(cell.setting, key), cell) for cell in finished if cell.algorithm == algorithm
                )
                places = [numbers.index(number) + 0.04 * (shift - len(algorithms) / 2) for number, _ in cells]
                points = [results[cell].figure(name) for _, cell in cells]
                bars = [[p.mean - p.low for p in points], [p.high - p.mean for p in points]]
                label = NAMES.get(algorithm, algorithm)
                axes.errorbar(
                    places,
                    [p.mean for p in points],
                    bars,
                    color=colour,
                    linestyle=dash,
                    marker=".",
                    label=label,
                )
            axes.set_title(FIGURES[name])
            axes.set_xticks(range(len(numbers)), [f"{number:g}" for number in numbers])
            axes.set_xlabel(key)
        drawing.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(algorithms)
        )
        file = folder / f"against_{key}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(file, dpi=110)
    return file


def draw_ranked(block: Block, results: Mapping[Cell, CellResult], folder: Path) -> Path | None:
    """Draw a panel for each setting, a row for each algorithm: reward with its 95 % interval over seeds.

    The algorithm with the best mean over the settings stands above. Returns the file, none without runs.
    """
    finished = [cell for cell in block.cells if results[cell].runs]
    if not finished:
        return None
    rewards = {cell: results[cell].figure("reward_last") for cell in finished}
    settings = list(dict.fromkeys(cell.setting for cell in finished))
    algorithms = sorted(
        dict.fromkeys(cell.algorithm for cell in finished),
        key=lambda algorithm: fmean(rewards[cell].mean for cell in finished if cell.algorithm == algorithm),
    )
    with mpl.rc_context(dict(RC)):
        drawing = Figure(figsize=(10, 1 + 0.24 * len(algorithms)), layout="constrained")
        panels = drawing.subplots(1, len(settings), sharey=True, squeeze=False)[0]
        for axes, setting in zip(panels, settings, strict=True):
            for cell, reward in rewards.items():
                if cell.setting == setting:
                    bar = [[reward.mean - reward.low], [reward.high - reward.mean]]
                    colour, _ = LOOKS.get(cell.algorithm, ("#777777", "-"))
                    axes.errorbar(
                        reward.mean, algorithms.index(cell.algorithm), xerr=bar, color=colour, marker="o"
                    )
            axes.set_title(setting)
            axes.set_xlabel(FIGURES["reward_last"])
            axes.grid(axis="y", linewidth=0.3)
        panels[0].set_yticks(range(len(algorithms)), [NAMES.get(name, name) for name in algorithms])
        file = folder / f"ranked_{block.name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(file, dpi=110)
    return file
