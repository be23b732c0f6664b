"""`make gpu`'s program on stand-in steps: time limits, failures, and small steps on a CPU."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megatron_dppo.cli.options import program
from tests.support.processes import is_alive, wait_until
from tools.gpu_machine import __main__ as gpu_machine
from tools.gpu_machine.execution import run_step
from tools.gpu_machine.steps import Step, gpu_steps, sglang_steps

ROOT = Path(__file__).parents[2]
# A child in a separate session that ignores SIGTERM, and this process too; both write their numbers.
HANGS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) < 3:
    subprocess.Popen([sys.executable, "-c", open(sys.argv[1] + "/hangs.py").read(), sys.argv[1], "child"],
                     start_new_session=True)
open(f"{sys.argv[1]}/{os.getpid()}.pid", "w").close()
print("begun", flush=True)
time.sleep(600)
"""
LEAVES = 'import subprocess, sys; print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid); '


def python(name: str, code: str, *arguments: str, limit_s: float = 300, **options: Any) -> Step:
    return Step(name, ("-c", code, *arguments), limit_s, r"^found|^\d+$", **options)


@pytest.fixture(autouse=True)
def as_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program changes both in its process."""
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.fixture
def run_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Result, list[dict[str, Any]]]]:
    """Run the program with stand-in steps; return the result and results.jsonl."""

    def run(steps: Sequence[Step], *flags: str) -> tuple[Result, list[dict[str, Any]]]:
        monkeypatch.setattr(gpu_machine, "gpu_steps", lambda out, is_rehearsal: list(steps))
        done = CliRunner().invoke(
            program(gpu_machine.main), ["--rehearse", "--out", str(tmp_path / "out"), *flags]
        )
        rows = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
        return done, [json.loads(row) for row in rows]

    return run


def numbers_in(folder: Path) -> list[int]:
    """Of the processes that have written theirs."""
    return [int(file.stem) for file in folder.glob("*.pid")]


def test_a_step_that_hangs_is_stopped_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    step, wait = python("hangs", HANGS, str(tmp_path), limit_s=1), subprocess.Popen.wait

    def wait_from_then_on(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        wait_until(lambda: len(numbers_in(tmp_path)) == 2, 120)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_from_then_on)
    result = run_step(step, ROOT, tmp_path / "log", dict(os.environ), grace_s=0.5)
    assert (result.outcome, result.exit_status) == ("timed out", None)
    assert result.found[0] == "begun" and 1 <= result.seconds < 300
    assert len(numbers_in(tmp_path)) == 2
    assert not any(map(is_alive, numbers_in(tmp_path)))


def test_each_step_runs_and_the_rows_have_how_it_ended(
    run_steps: Callable[..., tuple[Result, list[dict[str, Any]]]],
) -> None:
    steps = {
        "fails": python("fails", "print('found a fault'); raise SystemExit(3)"),
        "sleeps": python("sleeps", "import time; time.sleep(600)", limit_s=1),
        "dies": python("dies", "raise ValueError('some reason')"),
        "passes": python("passes", "print('found 7 things')"),
        "leaves": python("leaves", LEAVES),
        "cannot": python("cannot", "print('not supported'); raise SystemExit(9)", cannot="not supported"),
        "absent": Step("absent", (), 60, "", left_out="some_program is not on PATH"),
    }
    done, (machine, *rows) = run_steps(list(steps.values()))
    assert done.exit_code == 1
    assert machine["kind"] == "machine" and machine["is_rehearsal"]
    assert [(row["name"], row["outcome"], row["exit_status"]) for row in rows] == [
        ("fails", "failed", 3),
        ("sleeps", "timed out", None),
        ("dies", "failed", 1),
        ("passes", "passed", 0),
        ("leaves", "passed", 0),
        ("cannot", "left out", None),
        ("absent", "left out", None),
    ]
    found = {row["name"]: row["found"] for row in rows}
    assert (found["fails"], found["passes"]) == (["found a fault"], ["found 7 things"])
    assert found["dies"] == ["ValueError: some reason"]
    assert not is_alive(int(found["leaves"][0]))
    table = {line.split()[0] for line in done.output.partition("\nstep ")[2].splitlines() if line}
    assert steps.keys() <= table
    done, _ = run_steps([steps["passes"], steps["cannot"], steps["absent"]])
    assert done.exit_code == 0


def test_step_without_enough_time_left_is_skipped(
    run_steps: Callable[..., tuple[Result, list[dict[str, Any]]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [python("first", "print('found')", limit_s=60), python("second", "")]
    seconds = iter([0.0, 10.0, 40.5])  # begun, before the first step, before the second
    monkeypatch.setattr(gpu_machine, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    done, rows = run_steps(steps, "--within-s", "60")
    assert done.exit_code == 0
    assert (rows[1]["outcome"], rows[1]["limit_s"]) == ("passed", 50)
    assert rows[2]["outcome"] == "left out"


def test_stopping_the_program_stops_the_step_that_runs(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    code = (
        "import sys; from pathlib import Path; from tools.gpu_machine import __main__ as program, execution\n"
        "from tools.gpu_machine.steps import Step; from megatron_dppo.cli.options import program as app\n"
        "folder = sys.argv.pop(1); execution.GRACE_S = 0.5\n"
        "step = Step('hangs', ('-c', Path(folder, 'hangs.py').read_text(), folder), 600, 'begun')\n"
        "program.gpu_steps = lambda out, is_rehearsal: [step]; app(program.main)()"
    )
    command = [sys.executable, "-c", code, str(tmp_path), "--rehearse", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: len(numbers_in(tmp_path)) == 2, 300)
    process.terminate()
    process.communicate(timeout=300)
    assert process.returncode == 130
    assert len(numbers_in(tmp_path)) == 2
    assert not any(map(is_alive, numbers_in(tmp_path)))


def command_line(*flags: str) -> Result:
    return CliRunner().invoke(program(gpu_machine.main), list(flags))


def test_rehearsal_runs_small_steps_on_a_cpu(tmp_path: Path) -> None:
    done = command_line("--rehearse", "--only", "facts", "--only", "memcheck", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert all(word in done.output for word in ("PyTorch version", "attention: padded batches", "needs a GPU"))
    assert done.output.splitlines()[-1] == gpu_machine.REHEARSAL


def test_every_step_is_listed_and_is_of_this_repository() -> None:
    steps = [*gpu_steps(ROOT / "runs", is_rehearsal=False), *sglang_steps(ROOT / "runs", is_rehearsal=False)]
    for step in steps:
        module = step.command[1] if step.command[0] == "-m" else ""
        if module.startswith("tools."):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
        for word in step.command:
            if word.startswith(("tests/", "examples/")):
                assert (ROOT / word).exists(), word
        assert step.limit_s > 0
    listed = command_line("--dry-run").output
    assert all(f"{step.name} " in listed for step in gpu_steps(ROOT / "runs", is_rehearsal=False))
    assert "sglang_transfer " in command_line("--sglang", "--dry-run").output


@pytest.mark.parametrize(
    ("flags", "words"), [((), "--rehearse"), (("--only", "nothing", "--rehearse"), "'nothing'")]
)
def test_unrunnable_options_are_refused_in_one_line(
    flags: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = command_line(*flags)
    assert done.exit_code == 2
    assert words in done.output and len(done.output.splitlines()) == 1
