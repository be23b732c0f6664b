"""Draws what came out of the quickstart: KL of the same tokens with and without R3, and reward.

It is drawn of runs/quickstart, after run.py:

    python examples/quickstart/picture.py    # writes examples/quickstart/r3_off_and_on.svg
"""

import argparse
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_dppo.analysis.figures.style import RC, plain_log_ticks
from megatron_dppo.analysis.report.findings import findings
from megatron_dppo.analysis.report.names import run_names
from megatron_dppo.analysis.report.plots import over_rollouts
from megatron_dppo.analysis.report.smoothing import smoothed
from megatron_dppo.run_folder.reader import Run, read_run

HERE = Path(__file__).parent
RUNS = [Path("runs/quickstart/measure"), Path("runs/quickstart/replay")]
COLOURS = ("#0072b2", "#d55e00")  # R3 off, R3 on


def main() -> None:
    """Draw the picture of the two runs, under what the report finds first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="*", type=Path, default=RUNS, help="the run with R3 off, and the one with it"
    )
    parser.add_argument("--out", type=Path, default=HERE / "r3_off_and_on.svg")
    options = parser.parse_args()
    draw([read_run(path) for path in options.runs], options.out)
    print(f"wrote {options.out}")


def draw(runs: list[Run], out: Path) -> None:
    """Write an SVG of 7 x 2.6 inches; the same runs give the same file."""
    names = run_names(runs)
    with matplotlib.rc_context({**RC, "svg.fonttype": "none"}):
        picture = Figure(figsize=(7.0, 2.6), layout="constrained")
        kl, reward = picture.subplots(1, 2)
        routes = ("live routes (R3 off)", "replayed routes (R3 on)")
        for metric, colour, label in zip(("mismatch_live", "mismatch_replayed"), COLOURS, routes, strict=True):
            curve(kl, runs[0], f"{metric}/kl_k3", colour, label, log=True)
        kl.set_yscale("log")
        plain_log_ticks(kl.yaxis)
        kl.set_ylim(top=4 * kl.get_ylim()[1])  # room for the legend
        kl.set_title(f"k3 KL of the same tokens ({names[0]})")
        for run, colour, label in zip(runs, COLOURS, names, strict=False):
            curve(reward, run, "reward/mean", colour, label)
        reward.set_title("reward")
        for axes in (kl, reward):
            axes.set_xlabel("rollout")
            axes.legend(loc="upper right" if axes is kl else "lower right")
        picture.suptitle(findings(runs, names)[0].text.replace(" (", "\n(", 1))
        picture.savefig(out, format="svg", metadata={"Date": None})


def curve(axes: Axes, run: Run, metric: str, colour: str, label: str, *, log: bool = False) -> None:
    """Draw a metric over the rollouts, and its smoothed curve in front."""
    x, y = over_rollouts(run, metric)
    axes.plot(x, y, color=colour, linewidth=0.6, alpha=0.3)
    axes.plot(x, smoothed(y, x, log=log), color=colour, label=label)


if __name__ == "__main__":
    main()
