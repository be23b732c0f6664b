"""The output of a conversion: its options, the loss of a narrower dtype, and the jobs that write it.

An output appears completely or not at all, and a repeated command resumes it.
"""

import hashlib
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_dppo.architectures.published_names import stays_float32
from megatron_dppo.checkpoints.checkpoint_folder import sync
from megatron_dppo.checkpoints.convert.sources import WeightSource
from megatron_dppo.errors import ConversionError
from megatron_dppo.runtime.files import byte_count, free_bytes
from megatron_dppo.runtime.process import Runtime

logger = logging.getLogger(__name__)
_ELEMENTS = 1 << 22
"""Elements that are compared at a time, so that temporary tensors stay small."""
T = TypeVar("T")
_PLAN = "conversion.json"


@dataclass
class Loss:
    """Sums over the rounded weights.

    Attributes:
        num_weights: Number of rounded weights.
        num_changed: Number of weights that rounding changes.
        relative: Sum of |rounded - weight| / |weight| over weights other than 0.
        largest: Largest of these quotients.
        num_moved: Number of weights that differ from the base model.
        num_lost: Number of `num_moved` weights with the same rounded value as the base model's.
    """

    num_weights: int = 0
    num_changed: int = 0
    relative: float = 0.0
    largest: float = 0.0
    num_moved: int = 0
    num_lost: int = 0

    def add(self, other: "Loss") -> None:
        """Add the sums of other weights."""
        largest = max(self.largest, other.largest)
        sums = [mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)]
        self.__init__(*sums)
        self.largest = largest

    def lines(self, dtype: torch.dtype, base: Path | None) -> Iterator[str]:
        """Yield sentences about the loss; yield nothing if no weight was rounded."""
        name = str(dtype).removeprefix("torch.")
        if not self.num_weights:
            return
        changed, mean = self.num_changed / self.num_weights, self.relative / self.num_weights
        yield (
            f"--dtype {name} changed {changed:.2%} of {self.num_weights:,} weights, by {mean:.2%} of "
            f"their size on average and {self.largest:.2%} at most"
        )
        if base is not None and self.num_moved:
            lost = self.num_lost / self.num_moved
            yield (
                f"of {self.num_moved:,} weights that differ from {base}, {lost:.2%} have its value again in "
                f"{name}: this part of the training is lost"
            )


@dataclass
class Rounding:
    """Rounds weights and adds up the loss; threads may share an instance.

    Attributes:
        base: Model that training started from; None if it is not known.
        loss: Loss so far.
    """

    base: WeightSource | None = None
    loss: Loss = field(default_factory=Loss)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def base_tensors(self, names: Sequence[str], is_rounding: bool) -> Mapping[str, Tensor]:
        """Read the base model's tensors of one group, if they are compared."""
        return dict(self.base.read(names)) if self.base is not None and is_rounding else {}

    def cast(self, tensor: Tensor, dtype: torch.dtype, base: Tensor | None = None) -> Tensor:
        """Return a tensor in a dtype, and count its loss if the dtype cannot hold each value.

        Args:
            tensor: Floating-point tensor; returned unchanged if it has the dtype.
            dtype: Dtype of the result.
            base: Base model's tensor, of the same shape.
        """
        cast = tensor.to(dtype)
        if torch.promote_types(tensor.dtype, dtype) != dtype:
            found = Loss()
            for parts in _pieces(tensor, cast, base):
                found.add(_loss(*parts))
            with self._lock:
                self.loss.add(found)
        return cast


@dataclass(frozen=True)
class WriteOptions:
    """Options of writing a checkpoint.

    Attributes:
        dtype: Dtype that tensors are rounded to, except tensors that stay float32. None keeps the source's.
        file_bytes: Most bytes per file. A new file starts when the current one would exceed this.
        num_writers: Number of files that a process writes at a time.
        on_bytes: Callback, in any thread, with the bytes of each finished tensor.
        rounding: Object that casts the tensors, and adds up the loss.
    """

    dtype: torch.dtype | None = None
    file_bytes: int = 4 << 30
    num_writers: int = 1
    on_bytes: Callable[[int], object] = lambda _: None
    rounding: Rounding = field(default_factory=Rounding)

    def dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype that a tensor is written in."""
        return tensor.dtype if self.dtype is None or stays_float32(name) else self.dtype

    def log_rounded(self, float32_parts: Mapping[str, Sequence[str]]) -> None:
        """Log the parts that the dtype rounds though the source keeps them in float32 among other weights."""
        if self.dtype == torch.bfloat16 and float32_parts:
            logger.info(
                "--dtype bfloat16 rounds %s, which the checkpoint keeps in float32; without --dtype they stay",
                listed_parts(float32_parts),
            )


def listed_parts(float32_parts: Mapping[str, Sequence[str]]) -> str:
    """Return the parts for a message: "3 x linear_attn.A_log"."""
    return ", ".join(f"{len(names)} x {part}" for part, names in float32_parts.items())


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the dtype that --dtype names; None keeps the checkpoint's dtype."""
    if name is None:
        return None
    if name not in ("float32", "bfloat16"):
        raise ConversionError(
            f"--dtype: found {name!r}; expected float32 or bfloat16. Leave it out to keep every bit."
        )
    return getattr(torch, name)


def _pieces(
    tensor: Tensor, cast: Tensor, base: Tensor | None
) -> Iterable[tuple[Tensor, Tensor, Tensor | None]]:
    flat = [each.reshape(-1).split(_ELEMENTS) for each in (tensor, cast, *(() if base is None else (base,)))]
    for parts in zip(*flat, strict=True):
        yield parts[0], parts[1], parts[2] if len(parts) > 2 else None


def _loss(weights: Tensor, rounded: Tensor, base: Tensor | None) -> Loss:
    exact = weights.double()
    error = (rounded.double() - exact).abs()
    relative = torch.where(exact == 0, 0.0, error / exact.abs())
    moved = (
        weights != base.to(weights.dtype) if base is not None else torch.zeros_like(weights, dtype=torch.bool)
    )
    lost = moved & (rounded == base.to(rounded.dtype)) if base is not None else moved
    return Loss(
        num_weights=weights.numel(),
        num_changed=int((error > 0).sum()),
        relative=float(relative.sum()),
        largest=float(relative.max()),
        num_moved=int(moved.sum()),
        num_lost=int(lost.sum()),
    )


class UnfinishedOutput:
    """Folder next to the output, under another name until it is complete.

    Its files stay when the conversion stops. The same conversion resumes with them when it is started again.
    Any other conversion starts from the beginning.
    """

    def __init__(self, out: Path, plan: dict[str, Any], num_bytes: int) -> None:
        """Find an earlier start's files, or create a new folder.

        Equal plans write equal files.
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
        """Write a file that appears under its name once it is completely on disk."""
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
    """Turn disk errors into an error that names the file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConversionError(
            f"{file}: {error}. Is the disk full? Nothing has the output's name yet. Make room and start the "
            f"same command again to resume with {file.parent}, or remove that folder."
        ) from error


def refuse_existing(out: Path) -> None:
    """Raise an error if the output exists already."""
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
    """Run this process's jobs in threads, and wait for the other processes; all of them call this."""
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
