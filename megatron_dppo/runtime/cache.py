"""Keeps small files in the user's cache folder, which may be deleted at any time."""

import json
import os
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/megatron_dppo, by default under ~/.cache; it may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "megatron_dppo"


def write_json(path: Path, content: Any) -> None:
    """Write `content` to the cache, completely or not at all; a failure to write is ignored."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        return
