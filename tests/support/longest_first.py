"""A hook of pytest that starts the files of tests that take longest.

With `--dist loadfile --no-loadscope-reorder`, a long file at the end would run on one core alone.
"""

import json
import math
from pathlib import Path

import pytest

MAP = Path(__file__).parents[1] / "coverage_map.json"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by the seconds of files in the map; files that are not in it come first."""
    seconds = json.loads(MAP.read_text("utf-8"))["files"]
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], math.inf))
