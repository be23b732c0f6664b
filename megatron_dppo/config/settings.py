"""Flattens settings to dotted keys, and formats their values."""

from collections.abc import Mapping
from typing import Any, cast


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
