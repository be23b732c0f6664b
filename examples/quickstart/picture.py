"""Draws what came out of the quickstart: KL of the same tokens with and without R3, and reward.

It is drawn of runs/quickstart, after run.py, with the panels of `megatron-dppo figures`:

    python examples/quickstart/picture.py    # writes examples/quickstart/r3_off_and_on.svg
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from megatron_dppo.analysis.figures.canvas import Drawing, build, render
from megatron_dppo.analysis.figures.curves import CurvePanel, curve_panels
from megatron_dppo.analysis.figures.material import AlgorithmLine, RunCurves, objective_of
from megatron_dppo.analysis.lines import over_rollouts, run_names
from megatron_dppo.analysis.report.findings import findings
from megatron_dppo.run_folder.reader import Run, read_run

HERE = Path(__file__).parent
RUNS = [Path("runs/quickstart/measure"), Path("runs/quickstart/replay")]
CURVE = "curve"  # of a line: whatever its panel shows


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


def draw(runs: Sequence[Run], out: Path) -> None:
    """Write an SVG of a page's width; the same runs give the same file."""
    names = run_names(runs)
    drawing = Drawing(
        name=out.stem,
        paper="",
        title=findings(runs, names)[0].text,
        panels=curve_panels(panels(runs, names)),
        caption=[],
        columns=2,
    )
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text: a smaller file
        out.write_bytes(render(build(drawing), "svg"))


def panels(runs: Sequence[Run], names: Sequence[str]) -> list[CurvePanel]:
    """Return the KL of the first run's tokens with both kinds of routes, and the reward of both runs."""
    routes = [
        line(runs[0], "live routes (R3 off)", "mismatch_live/kl_k3", is_replayed=False),
        line(runs[0], "replayed routes (R3 on)", "mismatch_replayed/kl_k3", is_replayed=True),
    ]
    rewards = [
        line(run, name, "reward/mean", is_replayed=run is not runs[0])
        for run, name in zip(runs, names, strict=True)
    ]
    title = f"k3 KL of the same tokens ({names[0]})"
    return [CurvePanel(title, CURVE, routes, is_logarithmic=True), CurvePanel("reward", CURVE, rewards)]


def line(run: Run, label: str, metric: str, *, is_replayed: bool) -> AlgorithmLine:
    """Return one metric of a run as a line; its colour shows whether R3 is on."""
    objective = objective_of(run)
    curves = RunCurves(run, label, objective, {CURVE: over_rollouts(run, metric)}, clipped={})
    return AlgorithmLine(label, objective, is_replayed, (curves,), shade=0)


if __name__ == "__main__":
    main()
