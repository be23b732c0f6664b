"""Where secrets are that they must not be: in files that other users may read, and on command lines."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path


def readable_secrets(folder: Path, secrets: Mapping[str, str]) -> list[str]:
    """Files below a folder that hold a secret and that another user may read."""
    return [f"{name} in {file}" for file, name in secret_files(folder, secrets) if _is_open(file, folder)]


def secret_files(folder: Path, secrets: Mapping[str, str]) -> list[tuple[Path, str]]:
    """Files below a folder that hold a secret, and its name."""
    found: list[tuple[Path, str]] = []
    # walk passes over folders that a running program removes meanwhile, and rglob fails
    for file in (Path(at) / name for at, _, names in os.walk(folder) for name in names):
        with contextlib.suppress(OSError):  # removed meanwhile
            content = file.read_bytes()
            found += [(file, name) for name, value in secrets.items() if value.encode() in content]
    return found


def secrets_on_command_lines(secrets: Mapping[str, str]) -> list[str]:
    """Processes of this machine whose arguments have a secret."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            line = (process / "cmdline").read_bytes()
            found += [f"{name} in {line!r}" for name, value in secrets.items() if value.encode() in line]
    return found


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().split("=", 1) for entry in entries if b"=" in entry)


def _is_open(file: Path, top: Path) -> bool:
    """Whether another user may read a file, by its mode and the modes of its folders below `top`."""
    folders = [folder for folder in file.parents if folder != top and folder.is_relative_to(top)]
    return all(path.stat().st_mode & 0o077 for path in (file, *folders))
