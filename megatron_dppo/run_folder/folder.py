"""Writes a run folder: config, versions and metrics; truncates metrics when a run resumes.

    config.toml     the resolved config (keys without a value are left out)
    versions.json   packages, platform, git commit, command line
    metrics.jsonl   one JSON object per line: "kind" is step, rollout, evaluation, or change (of a setting)
    samples/  checkpoints/
    servers/        records and logs of servers, readable by their owner only
    tracker_run.json  the run's id in wandb and Trackio
    evaluations/    <set>_<rollouts finished>.jsonl: every response of an evaluation

JSON has no NaN or infinity: metrics.jsonl writes them as the strings "NaN", "Infinity" and "-Infinity", and
`read_run` turns them back. A run resumed with another config or other versions keeps the earlier files as
config.1.toml, versions.1.json and so on.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
import time
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_dppo.config.load import to_toml
from megatron_dppo.config.resuming import SettingChange, change_table, setting_changes
from megatron_dppo.errors import CheckpointError, ConfigError, Problem
from megatron_dppo.run_folder.trackers import Backend, open_backends
from megatron_dppo.runtime.files import ABSENT, entries_of, make_private, read_patiently, require_reachable
from megatron_dppo.runtime.libraries import versions

log = logging.getLogger(__name__)

SUBFOLDERS = ("samples", "checkpoints", "servers")
NO_CHECKPOINT = "no_checkpoint_yet"
"""File of a run that has published no checkpoint: only such a run may begin again with its first rollout."""
_CHECKPOINT = re.compile(r"step_\d{8,}|\.step_\d{8,}\.replaced\..*")
_TRACE = re.compile(r"latest|step_\d{8,}\..*")


class RunFolder:
    """Writes a run's folder during the run. Only rank 0 opens it.

    Rows count rollouts and gradient steps from 0. The log line shows the number of finished ones.
    """

    def __init__(
        self, path: Path, backends: Sequence[Backend] = (), earlier_config: Mapping[str, Any] | None = None
    ) -> None:
        """Use `RunFolder.open`; `earlier_config` is the former content of config.toml, if there was one."""
        self.path = path
        self.earlier_config = earlier_config
        self.samples, self.checkpoints, self.servers = (path / name for name in SUBFOLDERS)
        self._backends = backends
        self._metrics = (path / "metrics.jsonl").open("ab", buffering=0)
        self._must_truncate = self._metrics.tell() > 0  # rows after the checkpoint, perhaps a torn one
        self._steps_of_rollout: list[Mapping[str, float]] = []
        self._last_rollout_at: float | None = None
        self._seconds: deque[float] = deque(maxlen=10)

    @classmethod
    def open(
        cls,
        path: Path,
        config: Mapping[str, Any],
        resume: bool,
        *,
        backends: Sequence[str] = (),
        decisions: Mapping[str, Any] | None = None,
    ) -> RunFolder:
        """Create the folder, or resume in it.

        If `resume` is true, the caller must then call `truncate` with its checkpoint's offset (0 without a
        checkpoint). Differences from the earlier config are logged. If `resume` is false, the folder may
        contain a launcher's logs and `servers/`, but no earlier run. `decisions` are this run's choices that
        depend on installed packages, and are written to versions.json.
        """
        path = Path(path)
        _refuse_unusable(path, resume)
        opened = open_backends(backends, path, config)
        try:
            is_new = not (path / "config.toml").exists()
            for name in SUBFOLDERS:
                (path / name).mkdir(parents=True, exist_ok=True)
            if is_new:
                (path / NO_CHECKPOINT).touch()
            make_private(path / "servers")
            earlier = _earlier_config(path / "config.toml")
            _log_changes(earlier, config)
            _write_keeping_earlier(path / "config.toml", to_toml(config))
            ran_with = versions() | dict(decisions or {})
            _write_keeping_earlier(path / "versions.json", json.dumps(ran_with, indent=2) + "\n")
            return cls(path, opened, earlier)
        except BaseException:
            for backend in opened:
                backend.close()
            raise

    def write_step(self, rollout: int, step: int, metrics: Mapping[str, float]) -> None:
        """Append the row of one gradient step."""
        self._append({"kind": "step", "rollout": rollout, "step": step}, metrics)
        self._steps_of_rollout.append(metrics)
        for backend in self._backends:
            backend.log({f"step/{name}": value for name, value in metrics.items()}, "step", step)

    def write_rollout(self, rollout: int, metrics: Mapping[str, float], *, num_rollouts: int) -> None:
        """Append the row of one rollout, after the gradient steps' rows, and log one readable line."""
        self._append({"kind": "rollout", "rollout": rollout}, metrics)
        steps, self._steps_of_rollout = self._steps_of_rollout, []
        seconds = self._seconds_of_rollout(metrics)
        seconds_left = (num_rollouts - rollout - 1) * sum(self._seconds) / max(len(self._seconds), 1)
        line = rollout_line(rollout, num_rollouts, _with_step_means(metrics, steps), seconds, seconds_left)
        log.info("%s", line)
        for backend in self._backends:
            backend.log(metrics, "rollout", rollout + 1)

    def write_evaluation(self, rollout: int, metrics: Mapping[str, float]) -> None:
        """Append the row of one evaluation; `rollout` is the number of rollouts finished before it."""
        self._append({"kind": "evaluation", "rollout": rollout}, metrics)
        for backend in self._backends:
            backend.log(metrics, "rollout", rollout)

    def send_alarms(self, rollout: int, found: Mapping[str, str]) -> None:
        """Report the alarms of a rollout, an index from 0, to the trackers that take them."""
        for backend in self._backends:
            backend.alarm(rollout, found)

    def write_change(self, rollout: int, change: SettingChange) -> None:
        """Append the row of a setting that changed after `rollout` finished rollouts."""
        row = {"setting": change.setting, "was": change.was, "is": change.now}
        self._append_row({"kind": "change", "rollout": rollout, **row})
        log.warning("after %d rollouts: %s from %s to %s", rollout, change.setting, change.was, change.now)

    @property
    def offset(self) -> int:
        """Bytes of metrics.jsonl that are synced to disk, for a checkpoint."""
        os.fsync(self._metrics.fileno())
        return os.fstat(self._metrics.fileno()).st_size

    def copy_rows(self, offset: int, to: Path) -> None:
        """Append the rows of metrics.jsonl after `offset` to another file."""
        to.parent.mkdir(parents=True, exist_ok=True)
        with (self.path / "metrics.jsonl").open("rb") as rows, to.open("ab") as copy:
            rows.seek(offset)
            shutil.copyfileobj(rows, copy)

    def truncate(self, offset: int) -> None:
        """Truncate metrics.jsonl to a checkpoint's offset, so that no row is lost or repeated.

        The rows of a run that begins again, since it had no checkpoint yet, are kept in another file.
        """
        file = self.path / "metrics.jsonl"
        if offset == 0 and file.stat().st_size:
            kept = copy_under_free_name(file)
            log.warning("%s: the run begins again; its rows so far are kept as %s", file, kept.name)
        with file.open("rb") as existing:
            size = os.fstat(existing.fileno()).st_size
            if not 0 <= offset <= size:
                raise CheckpointError(
                    f"{file} has {size} bytes; the checkpoint was written when it had {offset}. "
                    "The checkpoint belongs to another run folder, or the file was cut; restore the file, "
                    "or start a new run.folder."
                )
            existing.seek(max(offset - 1, 0))
            if offset > 0 and existing.read(1) != b"\n":
                raise CheckpointError(
                    f"{file}: no line ends at byte {offset}, the checkpoint's offset. "
                    "The file was edited; restore it, or start a new run.folder."
                )
            existing.seek(offset)
            num_lines = existing.read().count(b"\n")
        os.ftruncate(self._metrics.fileno(), offset)
        os.fsync(self._metrics.fileno())
        self._steps_of_rollout.clear()
        self._must_truncate = False
        if num_lines:
            log.warning("%s: cut %d lines written after the checkpoint; they will come again", file, num_lines)

    def continue_rollout(self, steps: Sequence[Mapping[str, float]]) -> None:
        """Count the gradient steps already taken on an open rollout, for its log line."""
        self._steps_of_rollout = list(steps)

    def close(self) -> None:
        """Flush and close everything."""
        os.fsync(self._metrics.fileno())
        self._metrics.close()
        for backend in self._backends:
            backend.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, head: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        clash = head.keys() & metrics.keys()
        assert not clash, f"metrics may not be called {sorted(clash)}"
        self._append_row({**head, **{name: json_number(value) for name, value in metrics.items()}})

    def _append_row(self, row: Mapping[str, Any]) -> None:
        """Write one line in one call, so that a reader sees a complete line or a torn last one."""
        assert not self._must_truncate, "a resumed run calls truncate() before it writes"
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        written = self._metrics.write(line)
        if written != len(line):
            file = self.path / "metrics.jsonl"
            raise OSError(errno.ENOSPC, f"wrote {written} of {len(line)} bytes", str(file))

    def _seconds_of_rollout(self, metrics: Mapping[str, float]) -> float:
        """Return wall-clock seconds since the previous row, including evaluation and saving.

        The time before a process's first row includes its start, so the first row uses `time/total_s`.
        """
        now, before = time.monotonic(), self._last_rollout_at
        seconds = metrics.get("time/total_s", 0.0) if before is None else now - before
        self._last_rollout_at = now
        self._seconds.append(seconds)
        return seconds


def rollout_line(
    rollout: int, num_rollouts: int, metrics: Mapping[str, float], seconds: float, seconds_left: float
) -> str:
    """Format a rollout's metrics as one line; metrics that were not measured are left out."""
    fields = (
        ("reward/mean", "reward {:.2f}"),
        ("rollout/response_length_mean", "length {:.1f}"),
        ("policy/entropy", "entropy {:.2f}"),
        ("mismatch/abs_prob_diff_mean", "|pi-mu| {:.4f}"),
    )
    parts = [f"rollout {rollout + 1:>{len(str(num_rollouts)) + 1}}/{num_rollouts}"]
    parts += [text.format(metrics[name]) for name, text in fields if name in metrics]
    of_files = [
        f"{name.split('/')[1]} {value:.2f}"
        for name, value in sorted(metrics.items())
        if name.startswith("source/") and name.endswith("/reward_mean")
    ]
    if of_files:
        parts[1] += f" ({', '.join(of_files)})"
    signs = (("+", "positive"), ("-", "negative"))
    masked = [(mark, metrics.get(f"trust_region/masked_fraction_{sign}")) for mark, sign in signs]
    if any(value is not None for _, value in masked):
        parts.append("masked " + " ".join(f"{mark}{value:.1%}" for mark, value in masked if value is not None))
    if "routing/agreement_mean" in metrics:
        parts.append(f"agreement {metrics['routing/agreement_mean']:.2f}")
    parts += [f"{seconds:.1f} s", f"left {_duration(seconds_left)}"]
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours:
        return f"{hours}h{m:02d}m"
    return f"{m}m{s:02d}s" if m else f"{s}s"


def _with_step_means(metrics: Mapping[str, float], steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the rollout's metrics, and the means of metrics that only its gradient steps have."""
    values: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            values.setdefault(name, []).append(value)
    return {name: sum(of_steps) / len(of_steps) for name, of_steps in values.items()} | dict(metrics)


def json_number(value: float) -> float | int | str:
    """Return the value as JSON has it; non-finite ones become the string "NaN", "Infinity" or "-Infinity"."""
    if isinstance(value, int):
        return int(value)
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def json_values(value: Any) -> Any:
    """Convert nested mappings and lists to JSON values, with numbers as in `json_number`."""
    if isinstance(value, Mapping):
        return {str(key): json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    return json_number(value) if isinstance(value, float) else value


def _refuse_unusable(path: Path, resume: bool) -> None:
    """Raise an error if the path is not a folder, or contains another run or one that lost its checkpoints."""
    require_reachable(path)
    if not read_patiently(path, path.exists):
        return
    if not path.is_dir():
        raise ConfigError(Problem("run.folder", f"a file, {path}", "a folder", "Choose another run.folder."))
    metrics, config, checkpoints = path / "metrics.jsonl", path / "config.toml", path / "checkpoints"
    for place in (metrics, checkpoints):
        require_reachable(place)
    num_bytes = read_patiently(metrics, lambda: metrics.stat().st_size if metrics.exists() else 0)
    names = [each.name for each in entries_of(checkpoints)]
    if not resume and (num_bytes or names):
        raise ConfigError(
            Problem(
                "run.folder",
                f"an earlier run in {path} ({num_bytes} bytes of metrics)",
                "a new or empty folder",
                "Choose another run.folder, or set checkpoint.resume = true to continue it.",
            )
        )
    if (num_bytes or names) and not config.exists():
        raise CheckpointError(
            f"{path} cannot be resumed: it holds metrics or checkpoints but no config.toml. "
            "Restore config.toml, or choose another run.folder."
        )
    if any(map(_CHECKPOINT.fullmatch, names)):
        if not metrics.exists():
            raise CheckpointError(
                f"{path}: found checkpoints and no metrics.jsonl; expected the rows of earlier rollouts. "
                "Restore the file, or choose another run.folder."
            )
        return
    traces = sorted(filter(_TRACE.fullmatch, names))
    if num_bytes and not (path / NO_CHECKPOINT).exists():
        traces.append(f"{num_bytes} bytes of metrics")
    if traces:
        raise CheckpointError(
            f"{checkpoints}: found no checkpoint, and {', '.join(traces[:4])} of a run that has saved some; "
            "expected one to resume from. If its disk is not mounted, mount it. If the checkpoints are lost, "
            "restore one, or choose another run.folder: nothing here was changed."
        )


def _earlier_config(file: Path) -> dict[str, Any] | None:
    """Read the former config.toml, if there is one."""
    try:
        return tomllib.loads(read_patiently(file, file.read_text))
    except ABSENT:
        return None
    except ValueError as error:
        raise CheckpointError(
            f"{file}: found {error}; expected the config that the run wrote. Restore the file, or choose "
            "another run.folder."
        ) from error


def _log_changes(earlier: Mapping[str, Any] | None, config: Mapping[str, Any]) -> None:
    changes = setting_changes(earlier, config) if earlier is not None else []
    if changes:
        log.info("settings that differ from the run's earlier config:\n%s", change_table(changes))


def copy_under_free_name(file: Path) -> Path:
    """Copy a file to the next free name, such as metrics.1.jsonl, and return the copy's path."""
    number = 1
    while (copy := file.with_name(f"{file.stem}.{number}{file.suffix}")).exists():
        number += 1
    shutil.copy2(file, copy)
    return copy


def _write_keeping_earlier(file: Path, text: str) -> None:
    """Write a file atomically; an earlier, different file is kept under the next free number."""
    if file.exists():
        if file.read_text() == text:
            return
        earlier = copy_under_free_name(file)  # a kill here leaves both: without config.toml none can resume
        log.warning("%s differs from the earlier one, kept as %s", file, earlier.name)
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(file)
