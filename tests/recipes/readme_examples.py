"""Runs the example at the start of each package's README, in a folder with tiny models."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.recipes.walking import ROOT

PACKAGE = ROOT / "megatron_dppo"
# These show a part of a program whose objects take a run to build.
PARTS = {"failure_detection", "routing_replay"}
# One process imports what takes seconds, and a fork of it runs each example.
RUN_ALL = """
import json, os, sys, traceback
import megatron_dppo.train

for name, code in json.load(sys.stdin).items():
    if not os.fork():
        try:
            exec(code, {})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print("example of", name, os.waitstatus_to_exitcode(os.wait()[1]))
"""


def examples() -> dict[str, str]:
    """Return the first block of Python of each README, if it stands before the recipes."""
    found: dict[str, str] = {}
    for page in sorted(PACKAGE.rglob("README.md")):
        name, text = str(page.parent.relative_to(PACKAGE)), page.read_text().partition("\n## ")[0]
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if blocks and name not in PARTS:
            found[name] = blocks[0]
    return found


def run_examples(folder: Path) -> tuple[dict[str, int], str]:
    """Return the exit status of each example, and the errors of all; the quickstart's run is that of `run`."""
    (folder / "runs" / "quickstart").mkdir(parents=True)
    (folder / "runs" / "quickstart" / "run").symlink_to(folder / "runs" / "tiny")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}

    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, input=stdin, cwd=folder, env=environment, capture_output=True, text=True, check=True
        )

    run(str(ROOT / "examples" / "make_tiny.py"), "tiny")
    codes = examples()
    codes["models"] = codes["mcore"] + codes["models"]  # which needs Megatron's process groups
    done = run("-c", RUN_ALL, stdin=json.dumps(codes))
    statuses = re.findall(r"^example of (\S+) (-?\d+)$", done.stdout, re.MULTILINE)
    return {name: int(status) for name, status in statuses}, done.stderr
