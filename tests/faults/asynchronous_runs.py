"""Runs of `megatron-dppo train` that sample ahead from stand-in servers, and a ledger of prompt indices."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import tomli_w

from megatron_dppo.data.batches.batch_file import group_files, kept_rollouts, read_batches
from megatron_dppo.data.prompts import sanity_task
from megatron_dppo.data.prompts.prompts import PromptStream, load_prompts
from megatron_dppo.engines.sglang.records import ServerRecord
from megatron_dppo.runtime.files import write_jsonl
from tests.faults.starting import start_ranks
from tests.support.records import metrics_of
from tests.support.sanity_run import make_task, settings
from tests.support.sglang_stand_in import LiveStandIn

STALENESS = 2
_ORPHANS_S = 120.0


def stand_ins(num_servers: int, stack: ExitStack, **options: Any) -> list[LiveStandIn]:
    """Servers that run until the stack is closed, and reply with digits, words and the end of the sanity task.

    A response that `is_marked` consists of "#".
    """
    tokens = tuple(sanity_task.VOCABULARY[token] for token in (*"0123456789", "w0", "w1", "+", "-", "#"))
    end = sanity_task.VOCABULARY[sanity_task.EOS]
    servers = [LiveStandIn(end_token=end, tokens=tokens, **options) for _ in range(num_servers)]
    for server in servers:
        stack.enter_context(server.running())
    return servers


class AsynchronousRun:
    """One run folder, started again and again."""

    def __init__(self, folder: Path, servers: Sequence[LiveStandIn], **changes: dict[str, Any]) -> None:
        """Write the model, the prompts, the servers' registrations and the config, with `changes`."""
        self.servers, self._folder, self._num_starts = servers, folder, 0
        tables: dict[str, dict[str, Any]] = {
            "rollout": {
                "engine": "sglang",
                "max_staleness": STALENESS,
                "over_sampling": 2.5,
                "routing_replay": "off",
                "num_topk_log_probs": 0,
                "sglang": {"weight_sync": "disk", "probe_every": 0},
            },
            "data": {"reward": "tests.faults.rewards:digits"},
            "checkpoint": {"every": 1, "reserve_gib": 0.0},
            "tracking": {"batches_every": 1},
        }
        for section, table in changes.items():
            tables[section] = tables.get(section, {}) | table
        tables = settings(make_task(folder), "run", **tables)
        tables["algorithm"] = {"preset": "dppo_binary_tv", "minibatches_per_rollout": 2}
        self.run, self._prompts = Path(tables["run"]["folder"]), Path(tables["data"]["prompts"])
        self._config, self._tables = folder / "run.toml", tables
        (self.run / "servers").mkdir(parents=True)
        for number, server in enumerate(servers):
            name = f"stand-in-{number}"
            record = ServerRecord(name, server.url, "here", 1, "0.5.23", "now", 1)
            write_jsonl(self.run / "servers" / f"{name}.json", [asdict(record)])

    def start(self, num_ranks: int, *faults: dict[str, Any], timeout_s: float = 1800.0) -> "Job":
        """Start all ranks, with faults as `rank.py` describes them, and this time-out of collectives."""
        self._num_starts += 1
        self._tables["run"]["timeout_s"] = timeout_s
        self._config.write_text(tomli_w.dumps(self._tables))
        log = self._folder / f"log_{self._num_starts}.txt"
        return Job(start_ranks(num_ranks, self._config, faults, log), log)

    def require_no_orphans(self) -> None:
        """Wait until no server works on a request any more."""
        deadline = time.monotonic() + _ORPHANS_S
        while any(server.running_ids for server in self.servers):
            left = [list(server.running_ids) for server in self.servers]
            assert time.monotonic() < deadline, f"servers still sample {left}"
            time.sleep(0.05)

    def require_ledger(self) -> int:
        """Compare the places trained on with the newest checkpoint's cursor; returns their number.

        A place trained on twice, or neither trained on nor given again, fails; so does a token of weights that
        are older than the bound allows. Without a checkpoint the run starts over, and the result is 0.
        """
        folder = self.run / "checkpoints"
        if not (folder / "latest").exists():
            return 0
        state = json.loads((folder / (folder / "latest").read_text().strip() / "state.json").read_text())
        run_state, num_begun = state["state"], state["state"]["rollout"] + (state["open_rollout"] is not None)
        trained = Counter[int]()
        for rollout in kept_rollouts(self.run / "batches"):
            if rollout >= num_begun:  # of a trainer that was killed before it saved
                continue
            places, versions = self.trained_on(rollout)
            assert rollout - STALENESS <= min(versions) <= max(versions) <= rollout, (rollout, versions)
            trained.update(places)
        stream = PromptStream(
            load_prompts(self._prompts, "prompt", "answer"), 0, True, run_state["data_cursor"]
        )
        top, again = stream.upcoming
        assert sorted([*trained.elements(), *again]) == list(range(top)), (trained, again, top)
        return len(trained)

    @property
    def begun(self) -> set[int]:
        """Places of all prompts of training whose requests servers received."""
        asked = (rid.partition("+")[0] for server in self.servers for rid in server.num_asked)
        return {int(group.removeprefix("place")) for group in asked if group.startswith("place")}

    def trained_on(self, rollout: int) -> tuple[list[int], set[int]]:
        """Places of the prompts that a rollout trained on, and versions of what sampled its tokens."""
        groups, versions = set[str](), set[int]()
        for file in group_files(self.run / "batches", rollout):
            for microbatch in (each for step in read_batches(file) for each in step.microbatches):
                groups |= {sample.partition("+")[0] for sample in microbatch.sample_ids}
                assert microbatch.weight_versions is not None
                versions |= set(microbatch.weight_versions[microbatch.loss_mask].tolist())
        return [int(group.removeprefix("place")) for group in groups], versions

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl of a kind."""
        return metrics_of(self.run, kind)


class Job:
    """The processes of one start."""

    def __init__(self, processes: list[BaseProcess], log: Path) -> None:
        self._processes, self._log, self._started = processes, log, time.monotonic()

    @property
    def log(self) -> str:
        """What all ranks have printed so far."""
        return self._log.read_text() if self._log.exists() else ""

    def wait(self, timeout_s: float = 600.0) -> list[int | None]:
        """Return exit codes; fail if a process still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        try:
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()))
            codes = [process.exitcode for process in self._processes]
        finally:
            for process in self._processes:
                process.kill()
                process.join()
        assert None not in codes, f"{codes} after {timeout_s} s:\n{self.log[-6000:]}"
        return codes

    def kill_after(self, seconds: float) -> None:
        """Kill each process that is still there after so long."""
        deadline = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float = 600.0) -> None:
        """Wait for something while the job runs."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            is_running = all(process.is_alive() for process in self._processes)
            assert is_running and time.monotonic() < deadline, self.log[-6000:]
            time.sleep(0.02)
