"""Records packages, platform, git commit and command line for versions.json."""

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import megatron_dppo
from megatron_dppo.runtime.libraries import installed_versions, untested_versions

PACKAGES = (
    *("torch", "megatron-core", "transformer-engine", "apex", "flash-attn-3"),
    *("transformers", "sglang", "numpy"),
)


def versions() -> dict[str, Any]:
    """Return versions as plain values for JSON; null means a missing package, or no git checkout."""
    return {
        "megatron-dppo": megatron_dppo.__version__,
        "git_commit": git_commit(Path(megatron_dppo.__file__).parent),
        "python": platform.python_version(),
        **{name: _installed(name) for name in PACKAGES},
        "untested": untested_versions(installed_versions()),
        "platform": platform.platform(),
        "host": platform.node(),
        "argv": list(sys.argv),
    }


def git_commit(folder: Path) -> str | None:
    """Return the commit of the checkout that tracks `folder`, with "+changes" if files differ from it."""
    try:
        # An installed package may be inside another repository, so check that this one tracks it.
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(folder, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
