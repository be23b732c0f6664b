"""The JSON lines that a run leaves, read without the package's reader."""

import json
from pathlib import Path
from typing import Any


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def metrics_of(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, or only the kind "rollout", "step" or "evaluation"."""
    return [row for row in lines_of(run / "metrics.jsonl") if kind in (None, row["kind"])]
