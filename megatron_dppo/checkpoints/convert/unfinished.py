"""Runs the jobs of a conversion. Its output appears completely or not at all; a repeated command resumes it."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from megatron_dppo.checkpoints.checkpoint_folder import sync
from megatron_dppo.errors import ConversionError
from megatron_dppo.runtime.files import byte_count, free_bytes
from megatron_dppo.runtime.process import Runtime

T = TypeVar("T")
_PLAN = "conversion.json"


class UnfinishedOutput:
    """Folder next to the output, under another name until it is complete.

    Its files stay when the conversion stops. The same conversion resumes with them when it is started again.
    Any other conversion starts from the beginning.
    """

    def __init__(self, out: Path, plan: dict[str, Any], num_bytes: int) -> None:
        """Find an earlier start's files, or create a new folder.

        Equal plans write equal files.

        Raises:
            ConversionError: `out` exists, or its parent is missing, not writable or too full.
        """
        refuse_existing(out)
        self.out = out
        self.folder = out.with_name(f".{out.name}.unfinished")
        plan_file = self.folder / _PLAN
        text = json.dumps(plan, indent=1, sort_keys=True)
        try:
            if not (plan_file.is_file() and plan_file.read_text() == text):
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(parents=True)
            written = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
            self._require_free(num_bytes - written)
            plan_file.write_text(text)
        except OSError as error:
            raise ConversionError(
                f"{self.folder}: {error}. Expected a folder that can be written to; give another --out."
            ) from error

    def _require_free(self, num_bytes: int) -> None:
        free = free_bytes(self.folder)
        if num_bytes > free:
            raise ConversionError(
                f"{self.out}: {byte_count(free)} are free on its disk; expected at least "
                f"{byte_count(num_bytes)}. Make room, or give an --out on another disk."
            )

    def file(self, name: str) -> Path:
        """Return the path of a file while the output is unfinished."""
        return self.folder / name

    def write(self, name: str, write: Callable[[Path], Any]) -> None:
        """Write a file that appears under its name once it is completely on disk.

        Raises:
            ConversionError: The disk is full, or fails in another way.
        """
        file = self.file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.partial")
        with disk_errors(file):
            write(partial)
            sync([partial])
            partial.rename(file)

    def write_json(self, name: str, content: Any, indent: int = 1) -> None:
        """Write `content` as JSON, like `write`."""
        self.write(name, lambda path: path.write_text(json.dumps(content, indent=indent) + "\n"))

    def publish(self) -> None:
        """Rename the folder to the output's name."""
        (self.folder / _PLAN).unlink()
        refuse_existing(self.out)
        sync({file.parent for file in self.folder.rglob("*")})
        self.folder.rename(self.out)
        sync([self.out.parent])


@contextmanager
def disk_errors(file: Path) -> Iterator[None]:
    """Turn disk errors into an error that names the file.

    Raises:
        ConversionError: An OSError occurred, or safetensors' error for one.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConversionError(
            f"{file}: {error}. Is the disk full? Nothing has the output's name yet. Make room and start the "
            f"same command again to resume with {file.parent}, or remove that folder."
        ) from error


def refuse_existing(out: Path) -> None:
    """Raise an error if the output exists already.

    Raises:
        ConversionError: `out` exists.
    """
    if out.exists():
        raise ConversionError(f"--out: {out} exists. Give a new folder, or remove that one first.")


def fingerprint(files: Iterable[Path]) -> str:
    """Return a fingerprint of files: names, sizes and times of change."""
    digest = hashlib.sha256()
    for file in sorted(files):
        found = file.stat()
        digest.update(f"{file.resolve()}\0{found.st_size}\0{found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def run_jobs(runtime: Runtime, jobs: Sequence[T], work: Callable[[T], None], num_threads: int) -> None:
    """Run this process's jobs in threads, and wait for the other processes; all processes call this together.

    Raises:
        ConversionError: A job of another process failed. An error of this process's job is raised unchanged.
    """
    own: BaseException | None = None
    with ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(work, job) for job in jobs]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        own = next((error for future in done if (error := future.exception()) is not None), None)
        if own is not None:
            pool.shutdown(cancel_futures=True)
    failures = runtime.all_gather(None if own is None else f"{type(own).__name__}: {own}")
    if own is not None:
        raise own
    other = next(((rank, text) for rank, text in enumerate(failures) if text is not None), None)
    if other is not None:
        raise ConversionError(f"rank {other[0]}: {other[1]}")
