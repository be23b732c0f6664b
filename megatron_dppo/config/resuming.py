"""Find the settings in which a resumed run differs, and those that make it another experiment."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.config.effects import may_change
from megatron_dppo.config.schema import Config
from megatron_dppo.config.settings import flat, shown

_LENGTH = "run.num_rollouts"
_SCHEDULE = "optimizer.schedule"
_LAG = "rollout.lag"
_PRECISION = "rollout.transformers.weights"


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
    if before[_PRECISION] != after[_PRECISION]:  # "model" is another name of the model's type
        for settings in (before, after):
            settings[_PRECISION] = settings["model.dtype" if settings[_PRECISION] == "model" else _PRECISION]
    keys = sorted(before.keys() | after.keys())
    pairs = [(key, before.get(key), after.get(key)) for key in keys]
    return [SettingChange(key, shown(old), shown(new)) for key, old, new in pairs if old != new]


def experiment_changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[SettingChange]:
    """Return the settings that differ and make another experiment: all that `may_change` does not allow."""
    sees_the_end = any(
        of_run[_SCHEDULE] != "constant" or of_run[_LAG] != 0 for of_run in map(_with_defaults, (was, now))
    )
    return [
        change
        for change in setting_changes(was, now)
        if not may_change(change.setting) or (change.setting == _LENGTH and sees_the_end)
    ]


def change_table(changes: Sequence[SettingChange]) -> str:
    """Return the changes as lines of text: setting, was, is."""
    rows = [("setting", "was", "is"), *((change.setting, change.was, change.now) for change in changes)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"  {key:<{widths[0]}}  {was:<{widths[1]}}  {now}" for key, was, now in rows)


def _with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings by dotted key, without those that are none."""
    given = flat(json.loads(json.dumps(settings, default=str)))
    tables = {key.rpartition(".")[0] for key in given}
    defaults = flat(Config().model_dump(mode="json"))
    values = {key: value for key, value in defaults.items() if key not in tables} | given
    return {key: value for key, value in values.items() if value is not None}
