"""Keeps the rows and masked tokens of a run. Alarms from the rows are the same after a resume."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer

from megatron_dppo.checkpoints.megatron_folder import hf_files
from megatron_dppo.config.schema import Config
from megatron_dppo.metrics.alarms import AlarmWatch, NoiseWatch
from megatron_dppo.metrics.masked_tokens import ClippedTokens, TokenLists
from megatron_dppo.run_folder.reader import Run
from megatron_dppo.runtime.files import write_jsonl

Row = Mapping[str, float]

# Measured before the sampling weights change, so they describe the rollout and not a gradient step.
_OF_THE_ROLLOUT = ("mismatch/", "mismatch_age_", "routing/", "trust_region/noise_")
_PAIRED_S = "time/paired_forward_s"
_LIST_FILE = re.compile(r"(rollout|step)_(\d+)\.jsonl")


@dataclass(frozen=True)
class PastRows:
    """Rows of metrics.jsonl that a resumed run continues from.

    Attributes:
        rollouts: Finished rollouts, in order.
        last_steps: Gradient steps of the last finished rollout.
        open_steps: Gradient steps taken on the open rollout.
        evaluated: Metrics of the evaluation after the last finished rollout; empty if there was none.
    """

    rollouts: Sequence[Row] = ()
    last_steps: Sequence[Row] = ()
    open_steps: Sequence[Row] = ()
    evaluated: Row = field(default_factory=dict[str, float])

    @classmethod
    def read(cls, run: Run) -> "PastRows":
        """Extract the rows that `RunHistory` needs from a run; the result goes to every rank."""
        last = run.rollouts[-1].rollout if run.rollouts else -1
        steps: dict[int, list[Row]] = {}
        for row in run.steps:
            if row.rollout >= last:
                steps.setdefault(row.rollout, []).append(dict(row.values))
        evaluated: dict[str, float] = {}
        for row in run.evaluations:
            evaluated |= row.values if row.rollout == last + 1 else {}
        rollouts = [dict(row.values) for row in run.rollouts]
        return cls(rollouts, steps.get(last, []), steps.get(last + 1, []), evaluated)


class RunHistory:
    """Finds alarms and warnings in the rows of a run; the same on every rank.

    After `resume`, it finds the same as in an uninterrupted run. Alarms that were already raised are not
    repeated.
    """

    def __init__(self, config: Config) -> None:
        """Start without rows."""
        self._config = config
        self._is_watched = config.tracking.alarms != "off"
        self._latest: dict[str, float] = {}
        self._alarms, self._noise = AlarmWatch(), NoiseWatch()
        self._is_cost_known = False

    def resume(self, past: PastRows, opened: Row, *, raised_alarms: bool) -> None:
        """Continue after these rows.

        Args:
            past: Rows that the run has written.
            opened: Metrics of the open rollout so far; empty if none is open.
            raised_alarms: Whether the alarms of these rows were raised; False if tracking.alarms was off.
        """
        self._alarms = AlarmWatch(past.rollouts, past.last_steps, is_raised=raised_alarms)
        self._noise = self._noise.restarted()
        for row in past.rollouts:
            self._noise.check(of_the_rollout(row))
            self.paired_cost(row)
        self._latest = {**(past.rollouts[-1] if past.rollouts else {}), **past.evaluated}
        for number, values in enumerate(past.open_steps):
            self.add_step({**(opened if number == 0 else {}), **values})

    def latest(self, metric: str) -> float | None:
        """Return a metric of the last finished rollout or of a later evaluation; None unless it is finite."""
        value = self._latest.get(metric)
        return value if value is not None and math.isfinite(value) else None

    @property
    def rows(self) -> Sequence[Row]:
        """Rows of the finished rollouts, in order."""
        return self._alarms.rows

    def add_step(self, values: Row) -> str | None:
        """Add a gradient step of the current rollout, and return a warning of the engines' noise, if any."""
        if self._is_watched:
            self._alarms.add_step(values)
        return self._noise.check(of_the_rollout(values))

    def add_evaluation(self, values: Row) -> None:
        """Add the metrics of an evaluation."""
        self._latest |= values

    def check(self, row: Row) -> dict[str, str]:
        """Add the row of a finished rollout, and return its new alarms; empty if tracking.alarms is off."""
        self._latest = dict(row)
        return self._alarms.check(row) if self._is_watched else {}

    def paired_cost(self, row: Row) -> float | None:
        """Return the seconds of the run's first paired forward once, and None for every other row."""
        if self._is_cost_known or _PAIRED_S not in row:
            return None
        self._is_cost_known = True
        return row[_PAIRED_S]

    def good_until(self, found: Mapping[str, str]) -> int:
        """Return the number of rollouts finished before the trouble of these alarms began."""
        return self._alarms.good_until(found)


def of_the_rollout(values: Row) -> dict[str, float]:
    """Return the metrics that a gradient step measures for its rollout's row."""
    return {name: value for name, value in values.items() if name.startswith(_OF_THE_ROLLOUT)}


class OpenTokenLists:
    """Sums of the masked tokens of the open rollout's gradient steps so far; lives as long as the run.

    `clipped_tokens/rollout_<n>.jsonl` gets the tokens that each mask dropped most often over the rollout.
    `masked_tokens/step_<n>.jsonl` gets the tokens of each gradient step farthest outside the trust region. Both
    count from 0.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        """Start without a rollout.

        Args:
            folder: Run folder.
            model: Folder of model.load; its tokenizer decodes the tokens.
        """
        self._folder, self._model = folder, model
        self._num_steps, self._clipped = 0, ClippedTokens()

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Continue with a checkpoint's sums of an open rollout; start from zero if they are empty."""
        self._num_steps = int(kept.get("num_steps", 0))
        self._clipped = ClippedTokens.from_json(kept.get("sums", ()))

    @property
    def kept(self) -> dict[str, Any]:
        """Sums for a checkpoint in the middle of a rollout, as JSON values; empty if no step was listed."""
        return {"num_steps": self._num_steps, "sums": self._clipped.to_json()} if self._num_steps else {}

    def add_step(self, merged: TokenLists) -> None:
        """Add a gradient step's masked tokens of all ranks."""
        self._num_steps += 1
        self._clipped.merge([merged.clipped.state()])

    def write_farthest(self, rollout: int, step: int, merged: TokenLists) -> None:
        """Write a gradient step's masked tokens farthest outside the trust region, over all ranks."""
        file = self._folder / "masked_tokens" / f"step_{step:06d}.jsonl"
        write_jsonl(file, merged.masked.rows(self._tokenizer().decode, rollout))

    def write_rollout(self, rollout: int) -> None:
        """Write the list of a finished rollout, unless no gradient step of it was listed."""
        if self._num_steps:
            of_all = {"rollout": rollout, "num_steps": self._num_steps}
            rows = self._clipped.rows(self._tokenizer().decode)
            file = self._folder / "clipped_tokens" / f"rollout_{rollout:06d}.jsonl"
            write_jsonl(file, (of_all | row for row in rows))

    def _tokenizer(self) -> Any:
        return cast(Any, AutoTokenizer).from_pretrained(hf_files(self._model), trust_remote_code=False)


def remove_undone(run: Run) -> None:
    """Remove the lists of rollouts and gradient steps without rows in metrics.jsonl: a resume undid them."""
    done = {"rollout": {row.rollout for row in run.rollouts}, "step": {row.step for row in run.steps}}
    for file in _lists(run.path):
        match = _LIST_FILE.fullmatch(file.name)
        if match and int(match[2]) not in done[match[1]]:
            file.unlink()


def _lists(run: Path) -> Iterable[Path]:
    return (file for name in ("clipped_tokens", "masked_tokens") for file in (run / name).glob("*.jsonl"))
