"""Settings reach their consumers as they were set: read from the arguments while something real runs.

`test_setting_effects.py` shows most settings by pairs of runs. These are the others.
"""

import json
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config import Config
from megatron_dppo.config.load import flat
from megatron_dppo.runtime.process import Runtime
from tests.distributed.seam_scenarios import SCENARIOS, make_prompts
from tests.distributed.seam_table import READ_FROM_THE_SECTION, TABLE
from tests.distributed.seams import Seam, recording
from tests.distributed.setting_effects import ASSERTED_BY
from tests.support.ranks import run_ranks

# Settings whose rows would repeat `test_periods_count_rollouts`.
_PERIODS = {
    *("checkpoint.every", "checkpoint.every_steps", "evaluation.every"),
    *(f"tracking.{name}_every" for name in ("samples", "batches", "clipped_tokens", "paired_routing")),
}
_TABLES = ("evaluation.sets.*", "megatron.*", "sglang.*", "tracking.shadow_options.*")


def record(runtime: Runtime, name: str, task: Path) -> list[list[Any]]:
    """Run a scenario on this rank, and return the calls that each of its seams recorded."""
    scenario = SCENARIOS[name]
    config = Config.model_validate(scenario.tables(task))
    with recording(seams_of(name)) as seen:
        scenario.play(config, runtime)
    return seen


def seams_of(name: str) -> list[Seam]:
    return [seam for seam in TABLE if seam.scenario == name]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, prompts with other names of columns, and what scenarios leave."""
    return make_prompts(tmp_path_factory.mktemp("seams"))


@dataclass
class Played:
    """Scenarios that were played, each once, for all rows that need it."""

    task: Path
    seen: dict[str, dict[Seam, list[Any]] | str] = field(default_factory=dict)

    def config(self, name: str) -> Config:
        return Config.model_validate(SCENARIOS[name].tables(self.task))

    def __call__(self, name: str) -> dict[Seam, list[Any]]:
        """What the seams of a scenario saw."""
        if name not in self.seen:
            folder = self.task / f"ranks_{name}"
            folder.mkdir()
            try:
                values = run_ranks(record, SCENARIOS[name].world_size, folder, name, self.task)[0]
                self.seen[name] = dict(zip(seams_of(name), values, strict=True))
            except AssertionError as error:
                self.seen[name] = str(error)
        seen = self.seen[name]
        assert not isinstance(seen, str), f"{name}: {seen[-1500:]}"
        return seen


@pytest.fixture(scope="module")
def played(task: Path) -> Played:
    return Played(task)


@pytest.mark.parametrize("seam", [pytest.param(seam, id=seam.id) for seam in TABLE])
def test_consumer_receives_the_setting(played: Played, seam: Seam) -> None:
    assert seam.fold(played(seam.scenario)[seam]) == seam.value(played.config(seam.scenario))


def test_a_setting_without_a_pair_of_runs_has_a_row() -> None:
    rows = {seam.setting for seam in TABLE}
    assert ASSERTED_BY.keys() - rows - READ_FROM_THE_SECTION == set(), "nobody is known to receive these"
    assert ASSERTED_BY.keys() - rows >= READ_FROM_THE_SECTION
    in_tables = {row for row in rows if any(fnmatchcase(row, pattern) for pattern in _TABLES)}
    assert rows - flat(Config().model_dump()).keys() - in_tables == set(), "rows of settings that are gone"
    fields = {row.rpartition(".")[2] for row in in_tables if row.startswith("evaluation.sets.")}
    config = Config.model_validate({"evaluation": {"sets": {"near": {"prompts": "a"}}}})
    assert fields == config.evaluation.sets["near"].model_dump().keys()


def test_each_setting_differs_from_its_default_and_its_neighbours(task: Path) -> None:
    """In some scenario each setting differs from its default and from every other number of its table."""
    defaults, varied = flat(Config().model_dump()), set[str]()
    placed = {(seam.scenario, seam.setting) for seam in TABLE} | {("whole", setting) for setting in _PERIODS}
    for scenario, setting in sorted(placed):
        values = flat(Config.model_validate(SCENARIOS[scenario].tables(task)).model_dump())
        own, table = values.get(setting), setting.rpartition(".")[0]
        if own != defaults.get(setting):
            varied.add(setting)
        if table == "parallel" or isinstance(own, bool) or not isinstance(own, int | float):
            continue  # two processes are split in two, whatever is
        others = [key for key in values if key.rpartition(".")[0] == table and key != setting]
        assert [key for key in others if values[key] is not True and values[key] == own] == [], setting
    as_tables = {"evaluation.sets.far.reward"}
    assert {setting for _, setting in placed} - varied <= as_tables


@pytest.mark.parametrize(
    ("scenario", "files", "label"),
    [
        ("whole", "samples", "heard/was_cut"),
        ("whole", "evaluations/near", "was_cut"),
        ("turns", "samples", "was_cut"),
    ],
)
def test_rewards_get_the_finish_reason_of_each_response(
    played: Played, scenario: str, files: str, label: str
) -> None:
    """In training, in an evaluation and in conversations, the reward's label equals the sample's reason."""
    played(scenario)
    rows = [json.loads(line) for file in played.task.glob(f"{scenario}/{files}*") for line in lines_of(file)]
    told = {(row["finish_reason"], row["reward_info"][label]) for row in rows}
    assert ("length", 1.0) in told
    assert told <= {("length", 1.0), ("stop", 0.0)}


def lines_of(path: Path) -> list[str]:
    """Of a file, or of all files of a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [line for file in files for line in file.read_text().splitlines()]


# Documented metrics of what no scenario does, and the file of tests that reads them.
METRICS_ELSEWHERE = {
    "agents/calls": "unit/test_agents.py",
    "agents/forks": "unit/test_agents.py",
    "agents/branches": "distributed/test_agent_run.py",
    "agents/untrained_tokens": "unit/test_agents.py",
    "engine/busy_in_training": "unit/test_ahead.py",
    "engine/requests_in_training": "unit/test_ahead.py",
    "rollout/whole_groups": "unit/test_ahead.py",
    "rollout/open_groups": "unit/test_ahead.py",
    "rollout/interrupted": "unit/test_ahead.py",
    "rollout/prefilled_again_tokens": "unit/test_ahead.py",
    "sync/hold_s": "unit/test_ahead.py",
    "staleness/<n>": "unit/test_metrics.py",
    "loss/router_z": "distributed/test_actor_parity.py",
    "loss/router_balance": "distributed/test_actor_parity.py",
    "clipped/mu_mean_positive": "unit/test_metrics.py",
    "clipped/mu_mean_negative": "unit/test_metrics.py",
    "clipped/pi_mean_positive": "unit/test_metrics.py",
    "clipped/pi_mean_negative": "unit/test_metrics.py",
    "clipped/entropy_mean_positive": "unit/test_metrics.py",
    "clipped/entropy_mean_negative": "unit/test_metrics.py",
    "memory/outside_bytes": "unit/test_plan_split.py",
    "trust_region/weight_positive": "distributed/test_rule_runs.py",
    "trust_region/weight_negative": "distributed/test_rule_runs.py",
    "rule/<name>": "distributed/test_rule_runs.py",
    "source/<name>/reward_mean": "distributed/test_training_run.py",
    "source/<name>/num_prompts": "distributed/test_training_run.py",
    "source/<name>/epochs": "distributed/test_training_run.py",
}


def documented_metrics() -> dict[str, re.Pattern[str]]:
    """Return the names of the table of metrics, each with a pattern of what it names."""
    names: list[str] = []
    text = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text()
    for row in re.findall(r"^\| (`[a-z_]+(?:_<n>)?/.*?) \|", text, re.MULTILINE):
        area = ""
        for name in re.findall(r"`([^`]+)`", row):
            area = name.rpartition("/")[0] if "/" in name else area
            names.append(name if "/" in name else f"{area}/{name}")
    patterns = {
        "<n>": r"\d+",
        "<reason>": "[a-z_]+",
        "<preset>": "[a-z_]+",
        "<set>": "[a-z-]+",
        "<key>": ".+",
        "<name>": r"\w+",
        "*": ".+",
    }
    found: dict[str, re.Pattern[str]] = {}
    for name in names:
        pattern = name
        for part, expression in patterns.items():
            pattern = pattern.replace(part, expression)
        found[name] = re.compile(pattern)
    return found


def test_each_metric_is_documented_and_each_documented_metric_is_written(played: Played) -> None:
    written = set[str]()
    for name in SCENARIOS:
        played(name)
        folder = Path(played.config(name).run.folder)
        file = folder / "metrics.jsonl"
        rows = [json.loads(line) for line in lines_of(file)] if file.is_file() else []
        written |= {key for row in rows for key in row if "/" in key}
    documented = documented_metrics()
    matches = {name for name, pattern in documented.items() if any(map(pattern.fullmatch, written))}
    assert {key for key in written if not any(p.fullmatch(key) for p in documented.values())} == set()
    assert documented.keys() - matches == METRICS_ELSEWHERE.keys()
    for name, file in METRICS_ELSEWHERE.items():
        assert name.partition("<")[0] in (Path(__file__).parents[1] / file).read_text(), (
            f"{file} does not read {name}"
        )


def test_periods_count_rollouts(played: Played) -> None:
    """Each period is above 1 and another, so that neither the first nor all rollouts look right.

    Evaluations and checkpoints come after rollout N, 2N, ..., evaluations also before the first.
    """
    played("whole")
    config, folder = played.config("whole"), played.task / "whole"
    rows = [json.loads(line) for line in lines_of(folder / "metrics.jsonl")]
    numbers, steps = range(config.run.num_rollouts), config.num_gradient_steps // config.run.num_rollouts
    tracking = config.tracking

    def seen(pattern: str) -> set[int]:
        return {int(re.findall(r"\d+", path.stem)[-1]) for path in folder.glob(pattern)}

    def due(every: int) -> set[int]:
        return {number for number in numbers if (number + 1) % every == 0}

    assert seen("samples/*") == due(tracking.samples_every)
    assert seen("batches/*") == due(tracking.batches_every)
    assert seen("clipped_tokens/*") == due(tracking.clipped_tokens_every)
    assert {step // steps for step in seen("masked_tokens/*")} == due(tracking.clipped_tokens_every)
    assert min(row["memory/rollout_bytes"] for row in rows if row["kind"] == "rollout") > 6 * 3 * 9
    paired = {row["rollout"] for row in rows if "mismatch_live/kl_k3" in row}
    assert paired == due(tracking.paired_routing_every)
    evaluated = {row["rollout"] for row in rows if row["kind"] == "evaluation"}
    assert evaluated == {0, 6, config.run.num_rollouts} and config.evaluation.every == 6
    saved = {step for step in range(1, config.num_gradient_steps) if step % config.checkpoint.every_steps == 0}
    saved |= {steps * number for number in numbers if number and number % config.checkpoint.every == 0}
    assert seen("checkpoints/step_*") == saved | {config.num_gradient_steps}
