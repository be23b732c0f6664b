"""Flattens settings to dotted keys, and formats them as text and TOML."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import tomli_w


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one table with dotted keys; an empty table leaves nothing."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def shown(value: Any) -> str:
    """Return a setting's value as text; a value that is none is "not set"."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, cast("list[Any]", value)))
    return str(value)


def to_toml(settings: Mapping[str, Any]) -> str:
    """Return nested settings as TOML, without those that are none."""
    return tomli_w.dumps(_for_toml(settings))


def _for_toml(value: Any) -> Any:
    """Convert a value to what TOML can hold: no None, and paths as strings."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        return {str(key): _for_toml(item) for key, item in table.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_for_toml(item) for item in cast("list[Any]", value)]
    return str(value) if isinstance(value, Path) else value
