"""The user's cache folder; everything in it may be deleted at any time."""

import json
import os
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/megatron_dppo, by default under ~/.cache; it need not exist."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "megatron_dppo"


def write_json(path: Path, content: Any) -> None:
    """Keep `content` for the next start, whole or not at all; failing costs seconds, nothing else."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        return
