"""Formats bytes, counts, times, layouts and settings for reports; applies settings to a config."""

import json
import math
import re
import shlex
from collections.abc import Mapping
from types import UnionType
from typing import Any

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.config.rollout import EmbeddedRollout, SglangRollout, with_engine
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem

Settings = Mapping[str, Any]  # "parallel.tensor" -> 4

GIB = 1 << 30
_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def require_number(
    where: str, found: Any, expected: str, below: float = math.inf, kinds: type | UnionType = int | float
) -> None:
    """Refuse a value that is no number of these kinds above 0 and below a limit."""
    if isinstance(found, bool) or not isinstance(found, kinds) or not 0 < found < below:
        raise ConfigError(Problem(where, repr(found), expected, "Correct or remove it."))


def parse_bytes(text: str, where: str) -> int:
    """Parse bytes such as "80GB" (80e9) or "79.6GiB".

    Args:
        text: Number above 0 with a unit: MB, GB, TB, MiB, GiB or TiB.
        where: Option or key of the text, for the message.

    Raises:
        ConfigError: The text is not a number of bytes.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, re.IGNORECASE)
    factor = _UNITS.get(match.group(2).upper()) if match else None
    amount = float(match.group(1)) if match else 0.0
    if factor is None or not 0 < amount < math.inf or amount * factor < 1:
        expected = "a number above 0 and a unit, one of MB, GB, TB, MiB, GiB, TiB"
        raise ConfigError(Problem(where, repr(text), expected, f"Write for example {where} 80GB."))
    return int(amount * factor)


def format_count(number: int, noun: str) -> str:
    """Format the number with its noun, as in "1 GPU" and "2 GPUs"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def in_billions(number: int) -> str:
    """Format a number of parameters, as in "30.53 B" and "1.30 M"."""
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def in_gib(num_bytes: float, digits: int = 1) -> str:
    """Format bytes as GiB, rounded to `digits` digits after the point."""
    return f"{num_bytes / GIB:.{digits}f}"


def in_seconds(seconds: float) -> str:
    """Format a duration, as in "3.1 s" and "72 s"; two digits suffice for an estimate."""
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def layout_text(layout: Layout) -> str:
    """Format the sizes above 1, as in "tensor 4, expert 8, data 2"."""
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "virtual_pipeline": layout.virtual_pipeline}
    sizes |= {"context": layout.context, "expert": layout.expert, "data": layout.data}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if layout.expert_tensor != layout.tensor:
        parts.append(f"expert_tensor {layout.expert_tensor}")
    return ", ".join(parts) or "one process"


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
    if isinstance(section, EmbeddedRollout | SglangRollout) and key == "engine":
        return with_engine(section, value)
    changed = _with(getattr(section, key), rest, value) if rest else value
    return section.model_copy(update={key: changed})


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
