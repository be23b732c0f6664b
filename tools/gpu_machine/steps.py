"""Defines the steps of a GPU machine: command, time limit, and the output lines that are the finding."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools.benchmarks.benchmarking import OUT as BENCH
from tools.benchmarks.loss_cases import SHARDS

NEEDS_GPU = "needs a GPU"
_PYTEST = r"\b\d+ (passed|failed|error|skipped|tests? collected)|^(FAILED|ERROR) "
_ERRORS = r"|\w*Error\b.*"


@dataclass(frozen=True)
class Step:
    """A program with a time limit."""

    name: str
    command: tuple[str, ...]  # arguments of `program`
    limit_s: float
    finding: str  # pattern of the output lines that are reported; the last one is shown in the table
    program: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict[str, str])
    cannot: str = ""  # pattern of output if this machine does not support the step; then it has not failed
    figures: Path | None = None  # file of the losses' figures that the step writes
    kept: tuple[Path, ...] = ()  # files, from the repository, that are copied to the folder of the log
    left_out: str = ""  # reason why the step does not run

    @property
    def words(self) -> tuple[str, ...]:
        """The complete command."""
        return (self.program, *self.command)


def gpu_steps(out: Path, *, is_rehearsal: bool) -> list[Step]:
    """Return the steps of `make gpu` in order, or the smaller steps of a rehearsal on a CPU.

    Args:
        out: Absolute folder of the results.
        is_rehearsal: Whether to use the small form of each step, and to leave out steps that need a GPU.
    """
    brief = is_rehearsal
    steps = [
        _facts(),
        Step("build", _module("gpu_machine.kernel_build"), 240, r"^(kernels|library|usage)" + _ERRORS),
        _tests("tests", 420, ("tests/gpu", "--ignore=tests/gpu/test_sglang_on_gpu.py"), is_rehearsal=brief),
        *(_sanitizer(tool, limit_s) for tool, limit_s in (("memcheck", 150), ("racecheck", 180))),
        *(_loss(shape, out, is_rehearsal=brief) for shape in (("tp1",) if brief else SHARDS)),
        Step(
            "gpu_step",
            _module("benchmarks.gpu_step", "--out", str(out / "gpu_step.json")),
            400,
            r"peak|^(torch|transformer_engine) |^best" + _ERRORS,
        ),
        Step(
            "loop",
            _module("benchmarks.loop", "--rollouts", "3" if brief else "12"),
            600 if brief else 300,
            r"^(1 process|expert 2|fastest)" + _ERRORS,
            kept=(BENCH / "loop.json",),
        ),
        Step(
            "quickstart",
            ("examples/quickstart/run.py", *(["--short"] if brief else [])),
            600,
            r"held-out|^(reward|paired|tokens|Found)" + _ERRORS,
            kept=(Path("runs/quickstart/summary.json"), Path("runs/quickstart/report.html")),
        ),
        Step(
            "save",
            _module("benchmarks.save", *(["--saves", "1", "--hidden", "64"] if brief else ["--saves", "3"])),
            150,
            r"^(pause|gradient step|the asynchronous)|checkpoint holds" + _ERRORS,
        ),
    ]
    return [_without_gpu(step) for step in steps] if is_rehearsal else [_with_programs(step) for step in steps]


def sglang_steps(out: Path, *, is_rehearsal: bool) -> list[Step]:
    """Return the steps of `make gpu-sglang`: tests and a benchmark of a server on the trainer's GPU."""
    steps = [
        _facts(),
        _tests("sglang_tests", 600, ("tests/gpu/test_sglang_on_gpu.py",), is_rehearsal=is_rehearsal),
        Step(
            "sglang_transfer",
            _module("benchmarks.sglang_transfer", *(["--rounds", "1"] if is_rehearsal else [])),
            600,
            r"^(distributed|disk|tensor|copy|log-probs|top 20|fastest)" + _ERRORS,
            kept=(BENCH / "sglang.json",),
        ),
    ]
    return [_without_gpu(step) for step in steps] if is_rehearsal else steps


def chosen(steps: Sequence[Step], names: Sequence[str]) -> list[Step]:
    """Return the steps with these names, or all steps if `names` is empty.

    Raises:
        ValueError: No step has one of the names.
    """
    known = [step.name for step in steps]
    for name in names:
        if name not in known:
            raise ValueError(f"--only: found {name!r}; expected one of {', '.join(known)}")
    return [step for step in steps if not names or step.name in names]


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"tools.{name}", *arguments)


def _facts() -> Step:
    return Step("facts", _module("gpu_machine.facts"), 90, r"^(python|versions|programs|device|ceiling)")


def _tests(name: str, limit_s: float, paths: Sequence[str], *, is_rehearsal: bool) -> Step:
    """Return a step that runs the GPU tests without compute-sanitizer, which has its own steps."""
    flags = ("-m", "gpu", "-k", "not sanitizer", "-q", "--tb=short", "-p", "no:cacheprovider")
    collect = ("--collect-only",) if is_rehearsal else ()
    return Step(name, ("-m", "pytest", *paths, *flags, *collect), limit_s, _PYTEST + "|^E  ")


def _sanitizer(tool: str, limit_s: float) -> Step:
    """Return a step of compute-sanitizer. Without PyTorch's memory cache, each tensor is one allocation."""
    return Step(
        tool,
        ("--tool", tool, "--error-exitcode", "9", sys.executable, "tests/gpu/sanitized_kernels.py"),
        limit_s,
        r"ERROR SUMMARY|RACECHECK SUMMARY|hazards|Invalid|not supported",
        program="compute-sanitizer",
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        cannot=r"[Dd]evice not supported",
    )


def _loss(shape: str, out: Path, *, is_rehearsal: bool) -> Step:
    figures = out / f"loss_{shape}.json"
    brief = ("--quick", "--tokens", "64") if is_rehearsal else ()
    command = _module("benchmarks.loss", "--shape", shape, "--out", str(figures), *brief)
    finding = r"^(==|ours)|fails|wrong|does not" + _ERRORS
    return Step(f"loss_{shape}", command, 270 if shape == "tp1" else 150, finding, figures=figures)


def _with_programs(step: Step) -> Step:
    is_there = step.program == sys.executable or shutil.which(step.program)
    return step if is_there else replace(step, left_out=f"{step.program} is not on PATH")


def _without_gpu(step: Step) -> Step:
    needs_gpu = step.program != sys.executable or step.name == "gpu_step"
    return replace(step, left_out=NEEDS_GPU) if needs_gpu else step
