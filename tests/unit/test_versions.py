"""Documented versions equal the recorded ones, and every place that names one agrees."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from megatron_dppo.engines.sglang.options import shipped_options
from megatron_dppo.engines.sglang.protocol import GENERATIONS, NEWEST
from megatron_dppo.engines.weight_sync.fleet import UPDATE_CALLS
from megatron_dppo.runtime.libraries import (
    OLDEST_MODELOPT,
    OPTIONAL_LIBRARIES,
    TESTED,
    installed_versions,
    untested_versions,
    versions,
)
from tests.recording import record
from tools.versions import (
    FEATURES,
    PAGE,
    Record,
    counts,
    gpu_pins,
    read_pins,
    read_records,
    versions_tables,
    with_tables,
)

ROOT = Path(__file__).parents[2]
NOT_RUN = {"transformer-engine"}  # the tests have stand-ins for it
SPLIT = {"megatron-core"}  # one line for each Python
HERE = {"python": "3.11", "megatron-core": "0.16.1", "torch": "2.13.0", "transformers": "5.23.0"}
SERVERS = {"sglang": "0.5.22", "server torch": "2.13.0", "server transformers": "5.19.0"}


def test_the_guide_has_what_was_recorded_and_what_the_code_says() -> None:
    page = (ROOT / PAGE).read_text()
    assert page == with_tables(page, ROOT), "run make versions"
    assert "examples/guides/installing.md#versions" in (ROOT / "README.md").read_text()


def test_recorded_versions_and_servers_count_as_tested() -> None:
    recorded = [each["versions"] for each in read_records(ROOT) if not counts(each["files"].values())[1]]
    assert all({each[name] for each in recorded} <= set(tested) for name, tested in TESTED.items())
    assert (
        {each["sglang"] for each in recorded if "sglang" in each} == GENERATIONS.keys() == UPDATE_CALLS.keys()
    )
    files = {path.name for path in (ROOT / "tests/sglang").glob("test_*.py")}
    assert {name for names in FEATURES.values() for name in names} <= files


def test_make_installs_the_newest_sglang_and_knows_what_each_needs_on_a_cpu() -> None:
    (made,) = re.findall(r"^SGLANG_NEWEST := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert made == NEWEST == list(GENERATIONS)[-1]
    for version in GENERATIONS:
        text = (ROOT / f"tests/sglang/requirements-cpu/{version}.txt").read_text()
        assert f"\nsglang=={version}\n" in text
        assert "tp_size" in shipped_options(version)


def test_gpu_pins_follow_package_requirements_and_not_test_versions() -> None:
    """`tests/sglang` compares the pins with the metadata of SGLang itself."""
    pins = {version: gpu_pins(version) for version in GENERATIONS}
    of_torch: dict[str, str] = {}  # NCCL
    for version, of_gpu in pins.items():
        assert of_gpu["sglang"] == version
        assert of_torch.setdefault(of_gpu["torch"], of_gpu["nvidia-nccl-cu13"]) == of_gpu["nvidia-nccl-cu13"]
        on_cpu = read_pins(ROOT / f"tests/sglang/requirements-cpu/{version}.txt")
        assert on_cpu["transformers"] == of_gpu["transformers"]
    for each in read_records(ROOT):
        if each["suite"] == "sglang":
            assert each["versions"]["server transformers"] == pins[each["versions"]["sglang"]]["transformers"]
    guide = (ROOT / PAGE).read_text()
    section = guide.partition("## NCCL")[2].partition("\n## ")[0]
    named = set(re.findall(r"\b2\.[23]\d\.\d+\b", section))
    assert named == {"2.29.7", *of_torch.values()}, "the first one is of the trainer's torch 2.13.0"
    assert f"nvidia-nccl-cu13=={pins[NEWEST]['nvidia-nccl-cu13']}" in section


def test_every_environment_of_make_takes_the_torch_of_the_constraints() -> None:
    makefile, trainer = (ROOT / "Makefile").read_text(), read_pins(ROOT / "constraints.txt")["torch"]
    assert set(re.findall(r"\btorch==(\d[\d.]*)", makefile)) == {trainer}
    assert f"pip install torch=={trainer}" in (ROOT / PAGE).read_text()
    newest = dict(re.findall(r"^(\w+)_NEWEST := (.*)$", makefile, re.MULTILINE))
    assert newest["TORCH"] in TESTED["torch"] and newest["TRANSFORMERS"] in TESTED["transformers"]


def read_setup() -> tuple[str, list[Requirement]]:
    """Python's lower bound in setup.py, and the requirements of the package and its extras."""
    found: dict[str, Any] = {}
    with patch("setuptools.setup", lambda **arguments: found.update(arguments)):
        runpy.run_path(str(ROOT / "setup.py"))
    texts = [*found["install_requires"], *(text for each in found["extras_require"].values() for text in each)]
    return found["python_requires"], [Requirement(text) for text in texts]


def test_every_lower_bound_is_a_version_that_the_tests_ran_with() -> None:
    """What the tests recorded, or of other packages the constraints, which `make test` installs."""
    python, requirements = read_setup()
    pins = {
        str(canonicalize_name(name)): {version} for name, version in read_pins(ROOT / "constraints.txt").items()
    }
    for each in read_records(ROOT):
        for name in TESTED:
            pins.setdefault(name, set()).add(each["versions"][name])
    assert python == f">={min(pins['python'], key=Version)}"
    bounds = 0
    for each in requirements:
        ran = sorted(map(Version, pins.get(canonicalize_name(each.name), ())))
        for bound in (Version(spec.version) for spec in each.specifier if spec.operator == ">="):
            if each.name not in NOT_RUN:
                assert ran and bound.release == ran[0].release[: len(bound.release)], f"{each}: ran with {ran}"
                assert all(each.specifier.contains(version) for version in ran if each.name not in SPLIT), each
                bounds += 1
    assert bounds > 30


def test_optional_libraries_are_those_of_setup_and_of_the_code() -> None:
    since = {each.name: each.since for each in OPTIONAL_LIBRARIES}
    setup = (ROOT / "setup.py").read_text()
    assert f'"te": ["transformer-engine[pytorch]>={since["Transformer Engine"]}"]' in setup
    assert f'"quantize": ["nvidia-modelopt>={OLDEST_MODELOPT}"' in setup


def test_a_version_that_no_test_ran_with_is_named() -> None:
    assert untested_versions(HERE) == []
    found = untested_versions(HERE | {"torch": "2.99.0", "transformers": None})
    assert len(found) == 1 and "torch 2.99.0" in found[0]
    assert versions()["untested"] == untested_versions(installed_versions())


def _recorded(
    root: Path, files: Mapping[str, Sequence[int]], date: str = "2026-11-24", suite: str = "unit"
) -> Record:
    (root / "tests").mkdir(exist_ok=True)
    record(root, suite, HERE, files, date)
    return next(each for each in read_records(root) if each["suite"] == suite)


def test_parts_of_a_suite_are_put_together(tmp_path: Path) -> None:
    _recorded(tmp_path, {"test_a.py": (3, 0, 0), "test_b.py": (2, 1, 0)}, "2026-11-20")
    found = _recorded(tmp_path, {"test_b.py": (3, 0, 4)})
    assert (counts(found["files"].values()), found["date"]) == ([6, 0, 4], "2026-11-20")
    found = _recorded(tmp_path, {"test_a.py": (1, 0, 0), "test_b.py": (1, 0, 0)})
    assert (counts(found["files"].values()), found["date"]) == ([2, 0, 0], "2026-11-24")
    _recorded(tmp_path, {"ran": (1, 0, 0)}, suite="quickstart")
    assert [each["suite"] for each in read_records(tmp_path)] == ["unit", "quickstart"]


def test_the_tables_name_what_failed_what_was_left_out_and_what_did_not_run(tmp_path: Path) -> None:
    (tmp_path / "tests/unit").mkdir(parents=True)
    for name in ("test_a.py", "test_c.py"):
        (tmp_path / "tests/unit" / name).touch()
    _recorded(tmp_path, {"test_a.py": (1200, 1, 4)})
    record(tmp_path, "sglang", HERE | SERVERS, {"test_ahead.py": (4, 0, 0), "test_turns.py": (1, 1, 0)}, "d")
    trainer, servers = (table.splitlines()[2] for table in versions_tables(tmp_path).strip().split("\n\n"))
    assert "unit: 1,200, 1 failed, 4 left out, 1 of 2 files not run | 2026-11-24" in trainer
    cells = servers.split(" | ")
    assert cells[1:6] == ["2.14.1", "5.19.0", "2.30.7", "2.13.0", "not run"] and {"yes", "no"} <= set(cells)


TEXT = """
import pytest
def test_a(): ...
@pytest.mark.slow
def test_b(): ...
def test_c(): assert False
@pytest.fixture
def broken(): raise ValueError
def test_d(broken): ...
"""


@pytest.mark.parametrize(("more", "status"), [((), 1), (("-n", "1"), 1), (("-k", "a"), 4)])
def test_a_run_of_tests_is_recorded(tmp_path: Path, more: tuple[str, ...], status: int) -> None:
    (tmp_path / "tests/unit").mkdir(parents=True)
    (tmp_path / "tests/unit/test_x.py").write_text(TEXT)
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\nmarkers =\n    slow: slow\naddopts = --import-mode=importlib\npythonpath = {ROOT}\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.recording", "--record-versions", "tests/unit"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [*command, "-m", "not slow", *more], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == status, done.stdout + done.stderr
    if status == 4:
        assert not (tmp_path / "tests/versions.jsonl").exists()
        return
    (line,) = (tmp_path / "tests/versions.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert (found["suite"], found["versions"]) == ("unit", installed_versions())
    assert found["files"] == {"test_x.py": [1, 2, 1]}
