"""An alarm on all ranks: they stop together, with the evidence, and a resumed run knows what was usual."""

import json
from pathlib import Path
from typing import Any

from ranks import run_ranks

from megatron_dppo.runtime.process import Runtime

USUAL = {"rollout/num_response_tokens": 100, "rollout/response_length_mean": 20.0}
AHEAD = {"engine/busy_in_training": 0.5, "engine/requests_in_training": 4.0, "rollout/whole_groups": 64.0}
SECONDS = {"total": 1.0, "rollout": 0.0, "sync": 0.1}


def write_rows(runtime: Runtime, folder: str, mode: str, num_usual: int, offset: int) -> dict[str, Any]:
    """Usual rollouts, then one with responses ten times longer: the file's end before it, and the error."""
    from megatron_dppo.config.schema import Config
    from megatron_dppo.errors import TrainingError
    from megatron_dppo.metrics.metrics import Metrics
    from megatron_dppo.run.logger import RunLogger

    tables = {"run": {"folder": folder}, "tracking": {"alarms": mode}, "rollout": {"max_staleness": 1}}
    config = Config.model_validate(tables)
    offsets, error = list[int](), None
    with RunLogger.open(config, runtime) as logger:
        logger.start_at(offset, {})
        first = 10 if offset else 0
        for rollout in range(first, first + num_usual + 1):
            is_last = rollout == first + num_usual
            logger.write_step(rollout, rollout, Metrics())
            logger.add_values(USUAL | AHEAD | ({"rollout/response_length_mean": 200.0} if is_last else {}))
            offsets.append(logger.offset())
            try:
                logger.write_rollout(rollout, SECONDS)
            except TrainingError as found:
                error = str(found)
    return {"offset": offsets[-1], "error": error}


def test_ranks_stop_together_and_a_resumed_run_remembers(tmp_path: Path) -> None:
    """Rank 0 alone gives advice on servers, once in ten rollouts."""
    run = tmp_path / "run"
    results = run_ranks(write_rows, 2, tmp_path, str(run), "stop", 10, 0)
    assert results[0] == results[1]
    error = results[0]["error"]
    assert "rollout 11: length_jump: rollout/response_length_mean: found 200.0; usual was 20.0" in error
    assert "tracking.alarms = 'log'" in error
    kept = json.loads((run / "evidence" / "alarm_rollout_000010.json").read_text())
    assert [row["rollout/response_length_mean"] for row in kept["rows"]] == [20.0] * 10 + [200.0]
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in (0, 1)]
    assert [log.count("servers had no request for 50% of training") for log in logs] == [1, 0]
    assert "rollout 10: servers had no request" in logs[0]
    again = run_ranks(write_rows, 1, tmp_path, str(run), "log", 0, results[0]["offset"])[0]
    assert again["error"] is None, "the same rollout, checked by the rows of metrics.jsonl alone"
    log = (tmp_path / "rank0.log").read_text()
    assert log.count("length_jump") == 1 and "alarm_rollout_000010.json" in log
