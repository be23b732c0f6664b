"""Decisions and messages of examples/quickstart/run.py; `make quickstart-short` runs it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

RUN = Path(__file__).parents[2] / "examples" / "quickstart" / "run.py"


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_run", RUN)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_ends_with_what_was_found_and_percentages_read_as_such(quickstart: ModuleType) -> None:
    results = {
        "measure": {"reward_first": 0.451, "reward_last": 0.87, "paired_kl_k3_change": 0.1},
        "replay": {"reward_first": 0.45, "reward_last": 0.866, "paired_kl_k3_change": -0.5412},
    }
    said = quickstart.closing(results)
    assert said.startswith("Found: the reward went from 0.45 to 0.87 without R3 and from 0.45 to 0.87 with R3")
    assert "routes lowered the KL of engine and trainer on equal samples by 54 %. One seed" in said
    assert quickstart.closing({"measure": {}, "replay": {}}).startswith("Found: no reward. One seed")
    few = quickstart.closing({"measure": {}, "replay": results["replay"] | {"num_rollouts": 4}})
    assert "too few to say what replaying" in few and "54 %" not in few, "as in the report"
    shown = quickstart.shown
    assert (shown("paired_kl_k3_change", -0.5412), shown("paired_kl_k3_change", 0.1)) == ("-54 %", "+10 %")
    assert (shown("agreement_mean", 0.9812), shown("kl_k3_mean", 8.1e-4)) == ("98.1 %", "0.00081")
    assert shown("ratio_max", None) == "-"


@pytest.mark.parametrize(("num_devices", "num_processes"), [(0, 2), (1, 1), (2, 2), (8, 2)])
def test_it_starts_no_more_processes_than_devices(
    quickstart: ModuleType, num_devices: int, num_processes: int
) -> None:
    assert quickstart.processes_here(num_devices) == num_processes


def test_its_table_counts_the_rollouts_of_the_last_mean_and_has_no_seconds(
    quickstart: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        quickstart.show({name: {"num_rollouts": 4, "tokens_per_s": 7.0} for name in quickstart.RUNS}, 9.0)
    assert "reward, mean of the last 4 " in caplog.text
    assert "tokens/s" not in caplog.text
