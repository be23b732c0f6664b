"""Applies and formats settings: keys of the config with new values, as `--set` accepts them."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from megatron_dppo.config.schema import Config

Settings = Mapping[str, Any]  # "parallel.tensor" -> 4


def with_settings(config: Config, settings: Settings) -> Config:
    """Return the config with other values, without changing the original."""
    for key, value in settings.items():
        config = _with(config, key.split("."), value)
    return config


def as_overrides(settings: Settings) -> str:
    """Format the settings for a shell, as in "--set parallel.tensor=4 --set optimizer.offload=true"."""
    return " ".join(f"--set {shlex.quote(f'{key}={_written(value)}')}" for key, value in settings.items())


def _with(section: Any, keys: list[str], value: Any) -> Any:
    key, *rest = keys
    if isinstance(section, dict):  # a pass-through table
        return {**section, key: value}
    changed = _with(getattr(section, key), rest, value) if rest else value
    return section.model_copy(update={key: changed})


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
