"""The README's own family, followed literally: a package of one file is installed, and a model goes through."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megatron_dppo.architectures
from tests.distributed.test_families import measure
from tests.support.converting import differences
from tests.support.ranks import run_ranks
from tests.support.roundoff import require_close
from tests.support.tiny_families import write_family

README = Path(megatron_dppo.architectures.__file__).with_name("README.md")
CONVERT = str(Path(__file__).parents[2] / "tools" / "convert_checkpoint.py")
ARCHITECTURE = "MistralForCausalLM"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip puts the package that the README shows."""
    package = tmp_path_factory.mktemp("package")
    section = README.read_text().partition("\n## Adding a family\n")[2].partition("\n## ")[0]
    for language, code in re.findall(r"^```(\w+)\n(.+?)^```", section, re.DOTALL | re.MULTILINE):
        named = re.match(r'"""([\w/]+\.py): ', code)
        file = package / (named[1] if named else {"toml": "pyproject.toml"}[language])
        file.parent.mkdir(exist_ok=True)
        file.write_text(code)
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-build-isolation", "--no-deps"]
    subprocess.run([*pip, "--target", package / "site", package], check=True, capture_output=True)
    return package / "site"


@pytest.fixture
def run(installed: Path) -> Any:
    """Run a command line tool of this repository in an interpreter that has the package."""

    def of(*arguments: object) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join([str(installed), *filter(None, sys.path)])
        command = [sys.executable, *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": paths}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    return of


def test_a_family_in_a_package_is_converted_trained_and_planned(
    installed: Path, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_family(tmp_path / "model", ARCHITECTURE, sliding_window=None)
    megatron, back = tmp_path / "model converted", tmp_path / "back"
    for arguments in (
        ("to-megatron", "--hf", model, "--out", megatron),
        ("to-hf", "--megatron", megatron, "--out", back),
    ):
        done = run(CONVERT, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    assert differences(model, back) == []

    monkeypatch.syspath_prepend(str(installed))
    (measured,) = run_ranks(measure, 1, tmp_path, model, is_fresh=True)
    others = {name: measured[f"{name}_error"] for name in ("logit", "loss", "generation")}
    require_close(measured["errors"] | others)
    assert measured["changed"] == []
    num_parameters, planned = measured["num_parameters"]
    assert num_parameters == planned

    config = tmp_path / "run.toml"
    config.write_text(
        f'model.load = "{model}"\ndata.max_prompt_tokens = 16\nrollout.max_response_tokens = 32\n'
    )
    plan = run("-m", "megatron_dppo", "plan", config, "--gpus", 1, "--gpu-memory", "8GB", "--json")
    assert plan.returncode == 0, plan.stdout + plan.stderr
    assert json.loads(plan.stdout)["model"]["parameters"] == num_parameters


def test_added_family_refuses_bad_configs_and_needs_its_package(run: Any, tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", ARCHITECTURE, sliding_window=16)
    config = tmp_path / "run.toml"
    config.write_text(f'model.load = "{model}"\n')
    plan = ("-m", "megatron_dppo", "plan", config, "--gpus", "1", "--gpu-memory", "8GB")
    refused = run(*plan)
    assert refused.returncode != 0
    assert "sliding_window = 16 in config.json" in " ".join((refused.stdout + refused.stderr).split())
    unknown = subprocess.run([sys.executable, *map(str, plan)], capture_output=True, text=True, check=False)
    assert unknown.returncode != 0
    assert ARCHITECTURE in unknown.stdout + unknown.stderr
