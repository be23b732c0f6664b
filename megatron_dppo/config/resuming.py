"""Which settings may differ when a run is resumed; every other setting is part of the experiment."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megatron_dppo.config.schema import Config
from megatron_dppo.config.settings import flat, shown

_LENGTH = "run.num_rollouts"
_SCHEDULE = "optimizer.schedule"
_LAG = "rollout.lag"

MAY_CHANGE: Mapping[str, str] = {
    "run.folder": "The run was moved.",
    _LENGTH: f"The length of the run, while {_SCHEDULE} is constant and {_LAG} is 0: both look at its end.",
    "run.num_threads": "CPU threads.",
    "run.timeout_s": "A time-out.",
    "parallel.*": "The layout; a checkpoint that cannot be resharded is refused when it is loaded.",
    "data.reward_workers": "Processes.",
    "data.reward_timeout_s": "A time-out.",
    "data.reward_memory_mb": "A memory limit.",
    "rollout.max_data_gib": "A memory limit.",
    "rollout.max_dropped_fraction": "A limit that only ends a run.",
    "rollout.release_trainer": "Where memory is; the numbers are the same.",
    "rollout.transformers.batch_size": "Sequences decoded at once.",
    "rollout.sglang.*": "How servers are started, asked and updated.",
    "algorithm.loss_from": "Where memory is; the numbers are the same to rounding.",
    "algorithm.logits_chunk_bytes": "Where memory is; the numbers are the same to rounding.",
    "optimizer.distributed": "Where memory is; a checkpoint that stores states the other way is refused.",
    "optimizer.offload": "Where memory is; the numbers are the same.",
    "optimizer.max_skipped_steps": "A limit that only ends a run.",
    "checkpoint.*": "Saving.",
    "evaluation.every": "How often the sets are evaluated.",
    "tracking.*": "What is measured and written, and what an alarm does.",
    "megatron.recompute_*": "Where memory is; the numbers are the same.",
    "sglang.python": "The interpreter of the servers.",
    "sglang.host": "Where servers are.",
    "sglang.port": "Where servers are.",
    "sglang.*_size": "The layout of a server.",
    "sglang.base_gpu_id": "Where servers are.",
    "sglang.mem_fraction_static": "Memory of a server.",
    "sglang.max_*": "Load of a server.",
    "sglang.chunked_prefill_size": "Load of a server.",
    "sglang.schedule_*": "Load of a server.",
    "sglang.cuda_graph_*": "How a server launches kernels.",
    "sglang.disable_cuda_graph*": "How a server launches kernels.",
    "sglang.log_*": "A server's log.",
    "sglang.*_timeout": "A time-out.",
}
"""What may change freely when a run is resumed, as patterns of dotted keys, and why it may."""


@dataclass(frozen=True)
class SettingChange:
    """A setting whose value differs from the one that a run was trained with."""

    setting: str  # dotted key
    was: str  # as a person reads it
    now: str


def setting_changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[SettingChange]:
    """Return every setting that differs between two resolved configs.

    Args:
        was: Nested settings, as config.toml holds them; what is missing had its default.
        now: Likewise.
    """
    before, after = _with_defaults(was), _with_defaults(now)
    keys = sorted(before.keys() | after.keys())
    pairs = [(key, before.get(key), after.get(key)) for key in keys]
    return [SettingChange(key, shown(old), shown(new)) for key, old, new in pairs if old != new]


def experiment_changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[SettingChange]:
    """Return the settings that differ and make another experiment: all that `MAY_CHANGE` does not name."""
    sees_the_end = any(
        of_run[_SCHEDULE] != "constant" or of_run[_LAG] != 0 for of_run in map(_with_defaults, (was, now))
    )
    return [
        change
        for change in setting_changes(was, now)
        if not _may_change(change.setting) or (change.setting == _LENGTH and sees_the_end)
    ]


def change_table(changes: Sequence[SettingChange]) -> str:
    """Return the changes as lines of text: setting, was, is."""
    rows = [("setting", "was", "is"), *((change.setting, change.was, change.now) for change in changes)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"  {key:<{widths[0]}}  {was:<{widths[1]}}  {now}" for key, was, now in rows)


def _may_change(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)


def _with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings by dotted key, without those that are none."""
    given = flat(json.loads(json.dumps(settings, default=str)))
    tables = {key.rpartition(".")[0] for key in given}
    defaults = flat(Config().model_dump(mode="json"))
    values = {key: value for key, value in defaults.items() if key not in tables} | given
    return {key: value for key, value in values.items() if value is not None}
