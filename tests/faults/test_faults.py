"""The short form of the fault campaign: real processes, killed, stopped and given bad disks and batches."""

import importlib
from operator import attrgetter
from pathlib import Path

import pytest

from tests.faults.campaign import Campaign
from tests.faults.cases import CASES, Case
from tests.faults.rank import MOMENTS


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("campaign"))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if case.is_short])
def test_a_run_survives(campaign: Campaign, case: Case) -> None:
    assert campaign.run(case).failures == []


def test_each_moment_names_an_existing_function() -> None:
    for module, attribute, _ in MOMENTS.values():
        assert callable(attrgetter(attribute)(importlib.import_module(module))), attribute


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert sorted(names) == sorted(set(names))


def test_the_readme_has_a_row_for_each_case() -> None:
    rows = (Path(__file__).parent / "README.md").read_text().splitlines()
    cells = {tuple(cell.strip() for cell in row.split("|")[1:4]) for row in rows if row.startswith("| ")}
    missing = [c.name for c in CASES if (c.what, c.moment, str(c.num_processes)) not in cells]
    assert not missing, "run: make faults"
