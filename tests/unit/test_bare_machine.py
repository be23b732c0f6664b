"""`tools.gpu_machine` and a training run need no package but the package's requirements, and pytest."""

import ast
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SMALLEST = """
aiohttp datasets jaxtyping jinja2 matplotlib megatron-core msgspec numpy packaging plotly psutil pyarrow
pybase64 pydantic python-flint safetensors tomli-w torch tqdm transformers typer
"""
"""The smallest supported set of packages, with what they require; and the runner of tests/gpu."""
RUNNER = "pip pytest pytest-timeout pytest-xdist"
HIDE = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
class Finder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.partition(".")[0] in {hidden!r} else find(fullname, path, target)
PathFinder.find_spec = Finder.find_spec
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(names: str) -> set[str]:
    """These distributions, and all that they require here."""
    installed = {normal(each.name) for each in metadata.distributions()}
    found: set[tuple[str, str]] = set()
    waiting = [(name, "") for name in names.split()]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found or name not in installed:
            continue
        found.add((name, extra))
        for each in map(Requirement, metadata.requires(name) or ()):
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                waiting += [(normal(each.name), of_it) for of_it in ("", *each.extras)]
    return {name for name, _ in found}


def hidden_modules() -> set[str]:
    """Top-level modules of all other distributions."""
    with pytest.MonkeyPatch.context() as patch:  # without the copies that setuptools adds once it is imported
        patch.setattr(sys, "path", [folder for folder in sys.path if "_vendor" not in folder])
        there = required(SMALLEST) | required(RUNNER) | {"megatron-dppo"}
        modules = metadata.packages_distributions().items()
    return {name for name, of in modules if not there & set(map(normal, of)) and not (ROOT / name).exists()}


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment whose interpreters, and their children, cannot import the hidden modules."""
    hidden = hidden_modules()
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    plugins = metadata.entry_points(group="pytest11")  # pytest would load hidden packages' plugins, too
    without = " ".join(f"-p no:{each.name}" for each in plugins if each.module.partition(".")[0] in hidden)
    own = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "PYTEST_ADDOPTS": without}
    return os.environ | own | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(bare: dict[str, str], *arguments: str) -> str:
    ended = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=bare, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout


def test_the_smallest_set_is_what_setup_requires() -> None:
    call = next(
        node
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
        if isinstance(node, ast.keyword) and node.arg == "install_requires"
    )
    assert {normal(Requirement(text).name) for text in ast.literal_eval(call.value)} == set(SMALLEST.split())


def test_other_packages_are_hidden(bare: dict[str, str]) -> None:
    """Some that this environment has, and that a bare machine lacks."""
    hidden = hidden_modules()
    assert {"math_verify", "peft", "modelopt", "wandb", "hypothesis"} <= hidden
    assert not {"torch", "numpy", "megatron", "transformers", "yaml", "pytest", "megatron_dppo"} & hidden
    ended = subprocess.run([sys.executable, "-c", "import peft"], env=bare, capture_output=True, text=True)
    assert "No module named 'peft'" in ended.stderr


def test_the_steps_of_a_gpu_machine_run_without_them(bare: dict[str, str], tmp_path: Path) -> None:
    steps = [word for name in ("facts", "tests", "loss_tp1") for word in ("--only", name)]
    said = run(bare, "-m", "tools.gpu_machine", "--rehearse", *steps, "--out", str(tmp_path / "out"))
    assert "3 steps; left out: 0; failed or stopped: none." in said


def test_a_run_trains_and_its_benchmarks_start_without_them(bare: dict[str, str], tmp_path: Path) -> None:
    run(bare, "examples/make_tiny.py", str(tmp_path / "tiny"))
    files = {"model.load": "qwen3_moe", "run.folder": "run", "data.prompts": "prompts.jsonl"}
    files |= {f"evaluation.sets.aime{year}.prompts": "held_out.jsonl" for year in (24, 25)}
    sets = [word for key, name in files.items() for word in ("--set", f"{key}={tmp_path / 'tiny' / name}")]
    configs = [f"examples/moe_base/{name}.toml" for name in ("base", "dppo_binary_tv")] + ["examples/tiny.toml"]
    run(bare, "-m", "megatron_dppo", "train", *configs, *sets)
    rows = (tmp_path / "tiny/run/metrics.jsonl").read_text()
    assert rows.count('"kind": "rollout"') == 2
    modules = ", ".join(f"tools.benchmarks.{name}" for name in ("gpu_step", "loop", "save", "loss"))
    run(bare, "-c", f"import {modules}")
