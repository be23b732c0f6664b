"""Device and rank of this process, optional libraries, user code, and small files."""

from typing import Any

_OF_PROCESS = ("Runtime", "quiet_library_warnings", "start", "stop")


def __getattr__(name: str) -> Any:
    """Return a name of `process`, imported on demand, so that readers of small files need no PyTorch."""
    if name not in _OF_PROCESS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_dppo.runtime import process

    return getattr(process, name)
