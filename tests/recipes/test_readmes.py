"""The example at the start of each package's README runs, in a folder with tiny models."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("readmes")

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_dppo"
# These show a part of a program whose objects take a run to build.
PARTS = {"failure_detection", "routing_replay"}


def example(package: str) -> str:
    """The first block of Python in a README, if it stands before the recipes."""
    text = (PACKAGE / package / "README.md").read_text()
    return "".join(re.findall(r"```python\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)[:1])


PACKAGES = [str(page.parent.relative_to(PACKAGE)) for page in sorted(PACKAGE.rglob("README.md"))]
EXAMPLES = {name: code for name in PACKAGES if name not in PARTS and (code := example(name))}
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
    print(name, os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.fixture(scope="module")
def statuses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Exit status of each example, and the output of all; the quickstart's run is the example of `run`."""
    folder = tmp_path_factory.mktemp("readmes")
    (folder / "runs" / "quickstart").mkdir(parents=True)
    (folder / "runs" / "quickstart" / "run").symlink_to(folder / "runs" / "tiny")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}

    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, input=stdin, cwd=folder, env=environment, capture_output=True, text=True, check=True
        )

    run(str(ROOT / "examples" / "make_tiny.py"), "tiny")
    codes = EXAMPLES | {"models": EXAMPLES["mcore"] + EXAMPLES["models"]}
    done = run("-c", RUN_ALL, stdin=json.dumps(codes))
    found = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines() if line.rsplit(" ", 1)[0] in codes)
    return found | {"output": done.stderr}


@pytest.mark.parametrize("package", EXAMPLES)
def test_the_example_of_a_readme_runs(statuses: dict[str, str], package: str) -> None:
    assert statuses[package] == "0", statuses["output"]


def test_most_readmes_have_an_example_that_runs() -> None:
    assert len(EXAMPLES) >= 17
