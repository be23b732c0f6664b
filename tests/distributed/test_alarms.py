"""An alarm on all ranks: they stop together, with the evidence, and a resumed run knows what was usual."""

import json
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.metrics.alarms import RULES
from megatron_dppo.run_folder.trackers import WEBHOOK
from megatron_dppo.runtime.process import Runtime
from tests.support.ranks import run_ranks
from tests.support.receiver import receiving

USUAL = {"rollout/num_response_tokens": 100, "rollout/response_length_mean": 20.0}
SECONDS = {"total": 1.0, "rollout": 0.0, "sync": 0.1}


def write_rows(
    runtime: Runtime, folder: str, mode: str, num_usual: int, offset: int, webhook: str = ""
) -> dict[str, Any]:
    """Usual rollouts, then one with responses ten times longer: the file's end before it, and the error."""
    os.environ[WEBHOOK] = webhook
    from megatron_dppo.config.schema import Config
    from megatron_dppo.errors import TrainingError
    from megatron_dppo.metrics.metrics import Metrics
    from megatron_dppo.run.logger import RunLogger

    rollout = {"engine": "sglang", "max_staleness": 1}
    tables = {"run": {"folder": folder}, "tracking": {"alarms": mode}, "rollout": rollout}
    config = Config.model_validate(tables)
    offsets, error = list[int](), None
    with RunLogger.open(config, runtime) as logger:
        logger.start_at(offset)
        first = 10 if offset else 0
        for rollout in range(first, first + num_usual + 1):
            is_last = rollout == first + num_usual
            logger.write_step(rollout, rollout, Metrics())
            logger.add_values(USUAL | ({"rollout/response_length_mean": 200.0} if is_last else {}))
            offsets.append(logger.offset())
            try:
                logger.write_rollout(rollout, SECONDS)
            except TrainingError as found:
                error = str(found)
    return {"offset": offsets[-1], "error": error}


def test_ranks_stop_together_and_a_resumed_run_remembers(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with receiving() as (url, got):
        results = run_ranks(write_rows, 2, tmp_path, str(run), "stop", 10, 0, url)
    assert [body["rollout"] for body in got] == [10]
    assert results[0] == results[1]
    error = results[0]["error"]
    assert "rollout 11: length_jump: rollout/response_length_mean: found 200.0; usual was 20.0" in error
    assert "tracking.alarms = 'log'" in error
    kept = json.loads((run / "evidence" / "alarm_rollout_000010.json").read_text())
    assert [row["rollout/response_length_mean"] for row in kept["rows"]] == [20.0] * 10 + [200.0]
    again = run_ranks(write_rows, 1, tmp_path, str(run), "log", 0, results[0]["offset"])[0]
    assert again["error"] is None, "the same rollout, checked by the rows of metrics.jsonl alone"
    log = (tmp_path / "rank0.log").read_text()
    assert log.count("length_jump") == 1 and "alarm_rollout_000010.json" in log


USUAL_STEP = {"mismatch/tv_p999": 0.004, "routing/agreement_mean": 0.98, "policy/entropy": 1.0}
# By name: the alarm, what differs in the rollout's row, in the first step's row, in the second step's row.
TROUBLES: dict[str, tuple[str, dict[str, float], dict[str, float], dict[str, float]]] = {
    "long": ("length_jump", {"rollout/response_length_mean": 200.0}, {}, {}),
    "short": ("length_jump", {"rollout/response_length_mean": 5.0}, {}, {}),
    "collapse": ("reward_collapse", {"reward/mean": 0.0}, {}, {}),
    "reward": ("not_finite", {"reward/mean": math.nan}, {}, {}),
    "entropy": ("not_finite", {}, {"policy/entropy": math.inf}, {}),
    "second": ("not_finite", {}, {}, {"policy/entropy": math.nan}),
    "tail": ("tv_tail", {}, {"mismatch/tv_p999": 0.3}, {}),
    "routers": ("agreement_drop", {}, {"routing/agreement_mean": 0.7}, {}),
}


def describe_batches(runtime: Runtime, folder: Path) -> dict[str, float]:
    """Write the row of a rollout from a report of batches, and return it."""
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.gradient_steps import BatchReport
    from megatron_dppo.run.logger import RunLogger

    report = BatchReport(
        imbalance=1.25,
        num_samples=40,
        num_moved=10,
        num_tokens=300,
        num_padding_tokens=30,
        num_forwarded_tokens=240,
        max_bytes=4096,
    )
    with RunLogger.open(Config.model_validate({"run": {"folder": folder}}), runtime) as logger:
        logger.start_at(0)
        logger.add_values(logger.describe_batches(report) | USUAL)
        logger.write_rollout(0, SECONDS)
    return json.loads((folder / "metrics.jsonl").read_text())


def test_a_row_has_the_report_of_batches_and_memory(tmp_path: Path) -> None:
    row = run_ranks(describe_batches, 1, tmp_path, tmp_path / "run")[0]
    expected = {
        "batch/imbalance": 1.25,
        "batch/moved_fraction": 0.25,
        "batch/padding_fraction": 0.1,
        "batch/forwarded_fraction": 0.8,
        "batch/max_bytes_per_rank": 4096,
        "time/rollout_s": 0.0,
        "time/sync_s": 0.1,
        "time/total_s": 1.0,
        "throughput/tokens_per_s": 100.0,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert row["memory/host_peak_bytes"] >= row["memory/peak_bytes"] > 2**26


def raise_each(runtime: Runtime, folder: Path) -> dict[str, tuple[int, str]]:
    """Write usual rows and then each trouble's: the rollout at which the run stopped, and the error."""
    from megatron_dppo.config.schema import Config
    from megatron_dppo.errors import TrainingError
    from megatron_dppo.metrics.metrics import Metrics
    from megatron_dppo.run.logger import RunLogger

    def row(values: dict[str, float]) -> Metrics:
        metrics = Metrics()
        for name, value in values.items():
            metrics.add_mean(name, value, 1)
        return metrics

    found: dict[str, tuple[int, str]] = {}
    for name, (_, rollout_row, first, second) in TROUBLES.items():
        config = Config.model_validate({"run": {"folder": folder / name}, "tracking": {"alarms": "stop"}})
        with RunLogger.open(config, runtime) as logger:
            logger.start_at(0)
            for rollout in range(18):
                is_bad = rollout >= 12
                for number, changes in enumerate((first, second)):
                    values = USUAL_STEP if number == 0 else {"policy/entropy": 1.0}
                    logger.write_step(rollout, 2 * rollout + number, row(values | (changes if is_bad else {})))
                reward = {"reward/mean": 0.05 * rollout}
                logger.add_values(USUAL | reward | (rollout_row if is_bad else {}))
                try:
                    logger.write_rollout(rollout, SECONDS)
                except TrainingError as error:
                    found[name] = rollout, str(error)
                    break
    return found


def test_each_alarm_is_raised_through_the_logger(tmp_path: Path) -> None:
    """Each alarm follows from one value in a row: of a rollout, its first step, or a later step."""
    found = run_ranks(raise_each, 1, tmp_path, tmp_path / "runs")[0]
    late = {"collapse": 14, "tail": 14}  # these compare several rollouts
    assert {name: rollout for name, (rollout, _) in found.items()} == {n: late.get(n, 12) for n in TROUBLES}
    for name, (alarm, *_) in TROUBLES.items():
        assert f": {alarm}: " in found[name][1], found[name]
    assert {alarm for alarm, *_ in TROUBLES.values()} == RULES.keys() | {"not_finite"}


LONG, NOISY = {"rollout/response_length_mean": 200.0}, {"trust_region/noise_masked_fraction": 0.5}


def steps_of(rollout: int) -> list[dict[str, float]]:
    """Two gradient steps; noise from rollout 7 on, and second steps that are not finite in 10 and 11."""
    entropy = 1.0 + rollout / 8
    noise = NOISY if rollout >= 7 else {"trust_region/noise_masked_fraction": 0.001}
    second = math.nan if rollout in (10, 11) else 3 * entropy
    longest = {"theory/longest_response": 300.0 if rollout == 9 else 40.0}
    return [{**USUAL_STEP, **noise, **longest, "policy/entropy": entropy}, {"policy/entropy": second}]


def write_a_run(runtime: Runtime, folder: Path, stops: dict[int, int]) -> list[str]:
    """Write 14 rollouts, in which alarms last, and return the messages of the log.

    Args:
        runtime: This process.
        folder: The run's.
        stops: Event before which a checkpoint is saved -> number of events from there until the run
            is killed and resumed.
    """
    from megatron_dppo.config.schema import Config
    from megatron_dppo.metrics.metrics import Metrics
    from megatron_dppo.run.logger import RunLogger
    from megatron_dppo.types import OpenRollout

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_dppo").addHandler(handler)
    rollout = {"engine": "sglang", "max_staleness": 1, "prompts_per_rollout": 64}
    tables = {"run": {"folder": folder}, "rollout": rollout}
    config = Config.model_validate(tables)

    def events(logger: RunLogger, first: int) -> Any:
        """Write everything from an event on; an event is a gradient step, or the end of a rollout."""
        for number in range(first, 14 * 3):
            yield number
            rollout, place = divmod(number, 3)
            if place < 2:
                metrics = Metrics()
                for name, value in steps_of(rollout)[place].items():
                    metrics.add_mean(name, value, 1)
                logger.write_step(rollout, 2 * rollout + place, metrics)
                continue
            row = USUAL | {"reward/mean": 0.05 * rollout} | (LONG if rollout >= 8 else {})
            logger.add_values(row)
            logger.write_rollout(rollout, SECONDS | ({"paired_forward": 0.5} if rollout % 4 == 1 else {}))

    begin, offset, found = 0, 0, list[float | None]()
    opened: OpenRollout | None = None
    for stop, ahead in [*stops.items(), (14 * 3, 0)]:
        with RunLogger.open(config, runtime) as logger:
            logger.start_at(offset, opened)
            found.append(logger.latest("reward/mean"))
            for number in events(logger, begin):
                if number == stop:
                    begin, offset = stop, logger.offset()
                    opened = OpenRollout(0, 0, logger.rollout_metrics, {})
                    kept = len(messages)
                if number == stop + ahead and stop < 14 * 3:
                    break
        if stop < 14 * 3:
            del messages[kept:]
    expected = [None if stop < 3 else pytest.approx(0.05 * (stop // 3 - 1)) for stop in (0, *stops)]
    assert found == expected, "what keep_best looks at"
    logging.getLogger("megatron_dppo").removeHandler(handler)
    cut = "lines written after the checkpoint"
    texts = [text.replace(str(folder), "run") for text in messages if cut not in text]
    return [re.sub(r"  [0-9.]+ s  left .*", "", text) for text in texts]


def test_a_resumed_run_raises_and_logs_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    """Stopped between gradient steps and between rollouts, also some steps after the checkpoint."""
    whole = run_ranks(write_a_run, 1, tmp_path, tmp_path / "whole", {})[0]
    once = (
        "length_jump",
        "not_finite",
        "sits inside the engines' noise",
        "the paired forward of",
    )
    assert [sum(words in text for text in whole) for words in once] == [1] * 4, whole
    stops = {4: 0, 14: 1, 24: 0, 26: 0, 27: 3, 28: 0, 31: 0, 32: 2, 33: 0, 35: 0, 41: 0}
    halved = run_ranks(write_a_run, 1, tmp_path, tmp_path / "halved", stops)[0]
    assert halved == whole
    contents = [
        {file.name: file.read_text() for file in sorted((tmp_path / name).glob("**/*.json*"))}
        for name in ("whole", "halved")
    ]
    for content in contents:
        content.pop("versions.json")
        for name, text in content.items():  # clocks
            content[name] = re.sub(r'"(memory|throughput)/[a-z_]+": [0-9.]+', "", text)
    assert contents[0] == contents[1]
    assert [name for name in contents[0] if "alarm" in name] == [
        "alarm_rollout_000008.json",
        "alarm_rollout_000010.json",
    ]


def test_alarms_that_were_off_are_raised_after_a_resume(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    offset = run_ranks(write_rows, 1, tmp_path, run, "off", 10, 0)[0]["offset"]
    size = (tmp_path / "run" / "metrics.jsonl").stat().st_size
    assert offset < size and not (tmp_path / "run" / "evidence").exists()
    again = run_ranks(write_rows, 1, tmp_path, run, "stop", 0, size)[0]
    assert "length_jump" in again["error"]
