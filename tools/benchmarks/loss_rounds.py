"""Runs the rounds of loss.py: every contender once per round, in rotating order, with its time."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tools.benchmarks.loss_cases import Case
from tools.benchmarks.loss_contenders import Contender, UnavailableError, check, run


@dataclass(frozen=True)
class Row:
    """Result of a contender on a case."""

    form: str
    name: str
    is_ours: bool
    remark: str
    seconds: tuple[float, ...] = ()  # seconds of each round; empty if it was not timed
    extra_bytes: int | None = None  # peak of allocated bytes besides the inputs; None if not measured
    loss_error: float | None = None
    gradient_error: float | None = None
    fault: str = ""  # reason why it was not timed

    @property
    def median_s(self) -> float | None:
        """Median seconds, or `None` if it was not timed."""
        return statistics.median(self.seconds) if self.seconds else None


@dataclass(frozen=True)
class Ready:
    """A contender with a correct result, ready to be timed."""

    contender: Contender
    function: Callable[..., Any]
    loss_error: float | None
    gradient_error: float | None
    extra_bytes: int | None


class Stopwatch:
    """Measures seconds with CUDA events on a GPU, and with the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"

    def seconds(self, function: Callable[[], Any]) -> float:
        """Return the seconds of one run of a function."""
        if not self._is_gpu:
            began = time.perf_counter()
            function()
            return time.perf_counter() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def copy_bytes_per_s(case: Case, num_rounds: int) -> float:
    """Return the bytes read and written per second by a copy of this shard's logits."""
    watch = Stopwatch(case.pristine.device)
    seconds = [watch.seconds(case.restored) for _ in range(num_rounds + 1)][1:]
    return 2 * case.pristine.nbytes / statistics.median(seconds)


def measure(
    contenders: Sequence[Contender], case: Case, num_warm_up: int, num_rounds: int
) -> tuple[list[Row], float]:
    """Return a row per contender, and the bytes per second of a copy at the same time."""
    rows: dict[int, Row] = {}
    ready: dict[int, Ready] = {}
    for number, contender in enumerate(contenders):
        made = prepare(contender, case)
        if isinstance(made, Row):
            rows[number] = made
        else:
            ready[number] = made
    watch = Stopwatch(case.pristine.device)
    seconds: dict[int, list[float]] = {number: [] for number in ready}
    order = list(ready)
    for this_round in range(num_warm_up + num_rounds):
        for number in order[this_round % len(order) :] + order[: this_round % len(order)]:
            one = ready[number]
            inputs = one.contender.inputs(case)
            taken = watch.seconds(lambda one=one, inputs=inputs: run(one.contender, one.function, case, inputs))
            if this_round >= num_warm_up:
                seconds[number].append(taken)
    for number, one in ready.items():
        rows[number] = _row(
            one.contender,
            seconds=tuple(seconds[number]),
            extra_bytes=one.extra_bytes,
            loss_error=one.loss_error,
            gradient_error=one.gradient_error,
        )
    return [rows[number] for number in sorted(rows)], copy_bytes_per_s(case, num_rounds)


def prepare(contender: Contender, case: Case) -> Ready | Row:
    """Load a contender, run it and check its result. Return a row if it cannot run or its result is wrong."""
    device = case.pristine.device
    try:
        function = contender.load()
        if contender.needs_gpu and device.type != "cuda":
            return _row(contender, fault="needs a GPU")
        run(contender, function, case, contender.inputs(case))  # triggers compilation and autotuning
        inputs = contender.inputs(case)
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        outcome = run(contender, function, case, inputs)
        extra = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
        loss_error, gradient_error, fault = check(contender, case, outcome)
    except UnavailableError as error:
        return _row(contender, fault=str(error))
    except torch.OutOfMemoryError:
        return _row(contender, fault="does not fit into memory")
    except Exception as error:  # a failure of another library is a result
        if contender.is_ours:
            raise
        reason = (str(error).strip().splitlines() or [""])[0]
        return _row(contender, fault=f"fails: {type(error).__name__}: {reason}"[:160])
    if fault:
        return _row(contender, fault=f"wrong: {fault}", loss_error=loss_error, gradient_error=gradient_error)
    return Ready(contender, function, loss_error, gradient_error, extra)


def _row(contender: Contender, **measured: Any) -> Row:
    return Row(contender.form, contender.name, contender.is_ours, contender.remark, **measured)
