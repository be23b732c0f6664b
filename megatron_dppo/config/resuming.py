"""Find the settings in which a resumed run differs, and those that make it another experiment."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from megatron_dppo.algorithms.objective import DELTAS
from megatron_dppo.algorithms.presets import OVERRIDABLE, PRESETS, overrides_in, preset
from megatron_dppo.config.load import LEFT_OUT, flat, shown
from megatron_dppo.config.markers import (
    ALL_SETS,
    MEMORY,
    TIME_LIMIT,
    TRAINING,
    Effect,
    Evaluated,
    Section,
    sections_in,
)
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError


def effects_of(section: type[Section], prefix: str, effect: Effect) -> Iterator[tuple[str, Effect]]:
    """Yield the settings of a section with their own effects, or with the one of the section."""
    for name, info in section.model_fields.items():
        own = next((marker for marker in info.metadata if isinstance(marker, Effect)), effect)
        inner = sections_in(info.annotation)
        for each in inner:
            yield from effects_of(each, f"{prefix}{name}.", own)
        if not inner:
            yield f"{prefix}{name}", own


EFFECTS: Mapping[str, Effect] = {key: effect for key, effect in effects_of(Config, "", ALL_SETS) if "." in key}
"""The effect of each key of the schema. A setting without a marker changes the experiment and all scores."""

OPTION_MAY_CHANGE: Mapping[str, str] = {
    option: reason
    for reason, options in {
        MEMORY.resume or "": """
            megatron.recompute_granularity megatron.recompute_method megatron.recompute_num_layers
            megatron.recompute_modules
        """,
        "The interpreter of the servers.": "sglang.python",
        "Addresses of the servers.": "sglang.host sglang.port sglang.base_gpu_id",
        "The layout of a server.": """
            sglang.tp_size sglang.pp_size sglang.dp_size sglang.ep_size sglang.attn_cp_size
            sglang.attn_dp_size sglang.moe_dp_size sglang.moe_dense_tp_size sglang.shared_experts_tp_size
        """,
        "Memory of a server.": "sglang.mem_fraction_static",
        "Load of a server.": """
            sglang.max_prefill_tokens sglang.max_queued_requests sglang.max_running_requests
            sglang.max_total_tokens sglang.chunked_prefill_size sglang.page_size
            sglang.pp_max_micro_batch_size sglang.schedule_policy sglang.schedule_conservativeness
            sglang.schedule_low_priority_values_first
        """,
        "How a server launches kernels.": """
            sglang.cuda_graph_backend_decode sglang.cuda_graph_backend_prefill sglang.cuda_graph_bs_decode
            sglang.cuda_graph_bs_prefill sglang.cuda_graph_config sglang.cuda_graph_max_bs_decode
            sglang.cuda_graph_max_bs_prefill sglang.cuda_graph_max_seq_len_prefill
            sglang.cuda_graph_prefill_max_context sglang.disable_cuda_graph sglang.disable_cuda_graph_padding
        """,
        "A server's log.": """
            sglang.log_level sglang.log_level_http sglang.log_requests sglang.log_requests_format
            sglang.log_requests_level sglang.log_requests_target
        """,
        TIME_LIMIT.resume or "": "sglang.dist_timeout sglang.watchdog_timeout sglang.soft_watchdog_timeout",
    }.items()
    for option in options.split()
}
"""Options of the pass-through tables that a resume may change, and why."""


def may_change(key: str) -> bool:
    """Return whether a resume may change a setting.

    Args:
        key: A dotted key of a resolved config. An entry of a table, such as `data.reward.math`, has the class
            of the table. An option of [megatron] or [sglang] is part of the experiment, but for those above.
    """
    return key in OPTION_MAY_CHANGE or _effect(key).resume is not None


def free_settings() -> Mapping[str, list[str]]:
    """Return the settings that a resume may change, by the reason."""
    reasons: dict[str, list[str]] = {}
    for key, effect in EFFECTS.items():
        if effect.resume is not None:
            reasons.setdefault(effect.resume, []).append(key)
    for key, reason in OPTION_MAY_CHANGE.items():
        reasons.setdefault(reason, []).append(key)
    return reasons


def effect_on_evaluation(key: str) -> Evaluated:
    """Return whether results of `evaluate` depend on a setting, and the place that records it."""
    return "all sets" if key.startswith("sglang.") else _effect(key).evaluated


def _effect(key: str) -> Effect:
    while key not in EFFECTS and "." in key:
        key = key.rpartition(".")[0]
    return EFFECTS.get(key, TRAINING)


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
    """Return every setting whose effective value differs between two resolved configs.

    A setting that is left out has its default: of the schema, of the preset, or of the setting that it follows.
    Files and folders are compared by their absolute path.
    """
    before, after = _alike(_with_defaults(was), _with_defaults(now))
    if before[_PRECISION] != after[_PRECISION]:  # "model" is another name of the model's type
        for settings in (before, after):
            settings[_PRECISION] = settings["model.dtype" if settings[_PRECISION] == "model" else _PRECISION]
    keys = sorted(before.keys() | after.keys())
    pairs = [(key, before.get(key), after.get(key)) for key in keys]
    different = [(key, old, new) for key, old, new in pairs if not _same(key, old, new)]
    return _with_one_delta([SettingChange(key, shown(old), shown(new)) for key, old, new in different])


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
    given = {key: value for key, value in given.items() if key not in LEFT_OUT}  # runs of earlier versions
    tables = {key.rpartition(".")[0] for key in given}
    defaults = flat(Config().model_dump(mode="json"))
    values = {key: value for key, value in defaults.items() if key not in tables} | given
    return {key: value for key, value in values.items() if value is not None}


_Values = dict[str, Any]

_FOLLOWS: Mapping[str, str] = {
    "model.reference": "model.load",
    "parallel.expert_tensor": "parallel.tensor",
    "rollout.max_turn_tokens": "rollout.max_response_tokens",
    "evaluation.max_response_tokens": "rollout.max_response_tokens",
}
"""Settings without a default, and the setting whose value they have when they are left out."""
_SETS, _OF_SETS = "evaluation.sets.", ("samples_per_prompt", "temperature", "top_p", "max_response_tokens")
_PATHS = ("model.load", "model.reference", "data.prompts", f"{_SETS}*.prompts")


def _alike(before: _Values, after: _Values) -> tuple[_Values, _Values]:
    """Fill in what one config names and the other leaves to the preset, or to the setting that it follows."""
    objectives = _objective(before), _objective(after)
    if before.get("algorithm.preset") == after.get("algorithm.preset") and None not in objectives:
        before, after = ({**each, **own} for each, own in zip((before, after), objectives, strict=True) if own)
        before, after = (
            {key: value for key, value in each.items() if key != "algorithm.delta"} for each in (before, after)
        )
    for key in before.keys() ^ after.keys():
        for values in (before, after):
            if key not in values and (followed := _followed(key, values)) is not None:
                values[key] = followed
    return before, after


def _followed(key: str, values: _Values) -> Any:
    """Return the value that a setting has when it is left out; None if it follows no other."""
    name = key.rpartition(".")[2]
    if key in _FOLLOWS:
        return values.get(_FOLLOWS[key], _followed(_FOLLOWS[key], values))
    if key.startswith(_SETS) and f"{key.rpartition('.')[0]}.prompts" in values:
        if name in _OF_SETS:
            return values.get(f"evaluation.{name}", _followed(f"evaluation.{name}", values))
        return values.get("data.reward") if name == "reward" else None
    return None


def _objective(values: _Values) -> _Values | None:
    """Return the fields of the objective that a preset and its overrides make; None if they make none."""
    name = values.get("algorithm.preset")
    if not isinstance(name, str) or name not in PRESETS:
        return None
    try:
        made = preset(name, **overrides_in({each: values.get(f"algorithm.{each}") for each in OVERRIDABLE}))
    except (ConfigError, TypeError):
        return None
    found = {field: getattr(made, field) for field in made.fields_in_use if field != "delta"}
    return {f"algorithm.{field}": value for field, value in found.items() if value is not None}


def _same(key: str, old: Any, new: Any) -> bool:
    if any(fnmatchcase(key, each) for each in _PATHS):
        return bool(_located(old) == _located(new))
    return bool(old == new)


def _located(value: Any) -> Any:
    """Return a path, a list of them, or tables with one, with absolute paths."""
    if isinstance(value, list):
        return [_located(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return {**table, "path": _located(table.get("path"))}
    return os.path.realpath(value) if isinstance(value, str) else value


def _with_one_delta(changes: Sequence[SettingChange]) -> list[SettingChange]:
    """Return the changes with both sides of delta as one, if they change alike."""
    sides = {f"algorithm.{side}" for side in DELTAS if side != "delta"}
    of_sides = [change for change in changes if change.setting in sides]
    if len(of_sides) < len(sides) or len({(change.was, change.now) for change in of_sides}) > 1:
        return list(changes)
    delta = SettingChange("algorithm.delta", of_sides[0].was, of_sides[0].now)
    others = [change for change in changes if change.setting not in sides]
    return sorted([*others, delta], key=lambda change: change.setting)
