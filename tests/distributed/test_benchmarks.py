"""The benchmarks run: their figures mean nothing here."""

import json
import math
import subprocess
import sys
from pathlib import Path

from layout_cases import LAYOUTS

TOOLS = Path(__file__).parents[2] / "tools"


def test_layouts_are_benchmarked(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, TOOLS / "benchmark_layouts.py", "--short", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    known = {name: layout for of_size in LAYOUTS.values() for name, layout in of_size.items()}
    assert set(figures["layouts"]) - {"one process"} <= set(known), (
        "each is compared with one process by a test"
    )
    assert {row["processes"] for row in figures["layouts"].values()} == {1, 2}
    for title in ("(a)", "(b)", "(c)", "(d)"):
        assert title in done.stdout
    assert all(row["num_padded_tokens"] >= row["num_tokens"] for row in figures["packing"].values())
    seconds = [*figures["lengths"]["seconds"].values(), *figures["experts"]["4"].values()]
    assert all(math.isfinite(value) and value > 0 for values in seconds for value in values)
    predicted = list(figures["lengths"]["predicted"].values())
    assert predicted == sorted(predicted)
