"""Runs tools/benchmarks/loop.py with the same options."""

import sys
from pathlib import Path
from runpy import run_module

sys.path[0] = str(Path(__file__).resolve().parents[1])
run_module("tools.benchmarks.loop", run_name="__main__", alter_sys=True)
