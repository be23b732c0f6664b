"""Defines the steps of a GPU machine: command, time limit, and the output lines that are the finding."""

import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools.benchmarks.loss_cases import SHARDS

# Prints PyTorch's report of the environment, and the kernels of attention that a run takes on this machine.
_FACTS = """
import torch; from torch.utils import collect_env; collect_env.main()
from megatron_dppo.runtime.process import gpu_libraries; gpu_libraries()  # before Megatron
from megatron_dppo.models.attention import choose_flash_attention
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print("attention:", choose_flash_attention(device, torch.bfloat16, 128))
"""
_BUILD = "from megatron_dppo.kernels.build import cuda_library; print('library', cuda_library({}))"
# Patterns of the output lines that are reported; the last line found is shown in the table.
_FOUND = {
    "facts": r"^(attention|PyTorch|Python version|CUDA|GPU|Nvidia|CPU\(s\)|Model name|\[pip3\])",
    "build": r"^library",
    "tests": r"\b\d+ (passed|failed|error|skipped|tests? collected)|^(FAILED|ERROR) |^E  ",
    "sanitizer": r"ERROR SUMMARY|RACECHECK SUMMARY|hazards|Invalid|not supported",
    "loss": r"^(==|ours|goals:|  missed)|fails|wrong|does not",
    "gpu_step": r"peak|^(torch|transformer_engine) |^rates",
    "loop": r"^(1 process|expert 2|fastest)",
    "quickstart": r"held-out|^(reward|paired|tokens|Found)",
    "save": r"^(pause|gradient step|the asynchronous)|checkpoint holds",
    "sglang_transfer": r"^(distributed|disk|tensor|copy|log-probs|top 20|fastest)",
}


@dataclass(frozen=True)
class Step:
    """A program with a time limit."""

    name: str
    command: tuple[str, ...]  # arguments of `program`
    limit_s: float
    finding: str  # pattern of the output lines that are reported
    program: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict[str, str])
    cannot: str = ""  # pattern of output if this machine does not support the step; then it has not failed
    kept: tuple[str, ...] = ()  # files, from the repository, that are copied to the folder of the log
    left_out: str = ""  # reason why the step does not run

    @property
    def words(self) -> tuple[str, ...]:
        """The complete command."""
        return (self.program, *self.command)


def gpu_steps(out: Path, *, is_rehearsal: bool) -> list[Step]:
    """Return the steps of `make gpu`, which write to the absolute folder `out`. A rehearsal has small ones."""
    brief = is_rehearsal
    rates = ("--out", str(out / "gpu_step.json"), "--rates", str(out / "rates.json"))
    quickstart, short = ("runs/quickstart/summary.json", "runs/quickstart/report.html"), ("--short",) * brief
    steps = [
        _step("facts", 90, "-c", _FACTS),
        _step("build", 240, "-c", _BUILD.format("('90',)" if brief else "")),
        _tests("tests", 600, "tests/gpu", "--ignore=tests/gpu/test_sglang_on_gpu.py", is_rehearsal=brief),
        *(_sanitizer(tool, limit_s) for tool, limit_s in (("memcheck", 150), ("racecheck", 180))),
        *(_loss(shape, out, is_rehearsal=brief) for shape in (("tp1",) if brief else SHARDS)),
        _benchmark("gpu_step", 600, *rates),
        _benchmark("loop", 600 if brief else 300, "--rollouts", "3" if brief else "12"),
        _step("quickstart", 600, "examples/quickstart/run.py", *short, kept=quickstart),
        _benchmark("save", 150, *(("--saves", "1", "--hidden", "64") if brief else ("--saves", "3"))),
    ]
    return [_possible(step, is_rehearsal=brief) for step in steps]


def sglang_steps(out: Path, *, is_rehearsal: bool) -> list[Step]:
    """Return the steps of `make gpu-sglang`: tests and a benchmark of a server on the trainer's GPU."""
    return [
        _step("facts", 90, "-c", _FACTS),
        _tests("sglang_tests", 600, "tests/gpu/test_sglang_on_gpu.py", is_rehearsal=is_rehearsal),
        _benchmark("sglang_transfer", 600, *(("--rounds", "1") if is_rehearsal else ())),
    ]


def _step(name: str, limit_s: float, *command: str, kind: str = "", kept: tuple[str, ...] = ()) -> Step:
    return Step(name, command, limit_s, _FOUND[kind or name] + r"|\w*Error\b.*", kept=kept)


def _benchmark(name: str, limit_s: float, *arguments: str) -> Step:
    kept = {"loop": ("runs/bench/loop_quickstart.json",), "sglang_transfer": ("runs/bench/sglang.json",)}
    return _step(name, limit_s, "-m", f"tools.benchmarks.{name}", *arguments, kept=kept.get(name, ()))


def _tests(name: str, limit_s: float, *paths: str, is_rehearsal: bool) -> Step:
    """Return a step that runs the GPU tests without compute-sanitizer, which has its own steps."""
    flags = ("-m", "gpu", "-k", "not sanitizer", "-q", "--tb=short", "-p", "no:cacheprovider")
    collect = ("--collect-only",) if is_rehearsal else ()
    return Step(name, ("-m", "pytest", *paths, *flags, *collect), limit_s, _FOUND["tests"])


def _sanitizer(tool: str, limit_s: float) -> Step:
    """Return a step of compute-sanitizer. Without PyTorch's memory cache, each tensor is one allocation."""
    command = ("--tool", tool, "--error-exitcode", "9", sys.executable, "tests/gpu/sanitized_kernels.py")
    environment, cannot = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, r"[Dd]evice not supported"
    return Step(tool, command, limit_s, _FOUND["sanitizer"], "compute-sanitizer", environment, cannot)


def _loss(shape: str, out: Path, *, is_rehearsal: bool) -> Step:
    command = ("-m", "tools.benchmarks.loss", "--shape", shape, "--out", str(out / f"loss_{shape}.json"))
    brief = ("--quick", "--tokens", "64") if is_rehearsal else ()
    return _step(f"loss_{shape}", 270 if shape == "tp1" else 150, *command, *brief, kind="loss")


def _possible(step: Step, *, is_rehearsal: bool) -> Step:
    """Return the step, left out if its program is missing, or if it needs a GPU in a rehearsal."""
    if is_rehearsal and (step.program != sys.executable or step.name == "gpu_step"):
        return replace(step, left_out="needs a GPU")
    return step if shutil.which(step.program) else replace(step, left_out=f"{step.program} is not on PATH")
