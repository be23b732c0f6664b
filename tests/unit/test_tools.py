"""The programs in tools/ are the commands of `megatron-dppo`: the same options, by either name."""

import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_dppo.cli import main
from tools.benchmarks.benchmarking import OtherPrograms

TOOLS = Path(__file__).parents[2] / "tools"
SPELLINGS = [
    ("convert_checkpoint", ("convert",)),
    *(
        ("convert_checkpoint", ("convert", name))
        for name in ("to-megatron", "to-hf", "to-adapter", "merge-adapter", "upcycle", "inspect", "verify")
    ),
    ("quantize_checkpoint", ("quantize",)),
    ("prepare_data", ("prepare-data",)),
    ("measure_mismatch", ("measure-mismatch",)),
]


@pytest.fixture(autouse=True)
def as_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("COLUMNS", "100")


Ended = tuple[int | str | None, str, str]  # exit status, stdout, stderr
Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs in this process, by the path of a file in tools/, or as the command `megatron-dppo`."""

    def run(program: str, *arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        with pytest.raises(SystemExit) as ended:
            if program == "megatron-dppo":
                main()
            else:
                runpy.run_path(str(TOOLS / f"{program}.py"), run_name="__main__")
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


def without_usage(text: str) -> str:
    """The help without its first paragraph, which names the program."""
    return text.partition("\n\n")[2]


@pytest.mark.parametrize(("tool", "command"), SPELLINGS, ids=lambda value: str(value))
def test_both_spellings_have_the_same_options(tool: str, command: tuple[str, ...], run: Run) -> None:
    by_path, by_name = run(tool, *command[1:], "--help"), run("megatron-dppo", *command, "--help")
    assert by_path[0] == by_name[0] == 0
    assert without_usage(by_path[1]) == without_usage(by_name[1])
    assert "Options:" in by_path[1]


@pytest.mark.parametrize(
    ("tool", "command", "arguments", "message"),
    [
        ("convert_checkpoint", ("convert",), ("to-hf", "--megatron", "{0}", "--out", "{0}"), "exists"),
        ("convert_checkpoint", ("convert",), ("inspect", "{0}/nowhere"), "nowhere"),
        ("convert_checkpoint", ("convert",), ("to-hf",), "--megatron"),
        (
            "quantize_checkpoint",
            ("quantize",),
            ("--hf", "{0}", "--out", "{0}", "--prompts", "p.jsonl", "--format", "fp8"),
            "exists",
        ),
        (
            "prepare_data",
            ("prepare-data",),
            ("custom", "--tokenizer", "{0}", "--template", "base", "--out", "{0}/a.jsonl"),
            "--source",
        ),
    ],
)
def test_both_spellings_refuse_alike(
    tool: str,
    command: tuple[str, ...],
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    run: Run,
) -> None:
    given = [word.format(tmp_path) for word in arguments]
    by_path, by_name = run(tool, *given), run("megatron-dppo", *command, *given)
    assert by_path[0] == by_name[0] == 2
    assert message in by_path[2]
    assert by_path[2].splitlines()[-1] == by_name[2].splitlines()[-1]


def test_help_lists_the_commands_and_loads_no_megatron() -> None:
    code = (
        "import sys; from megatron_dppo.cli import app; app(['--help'], standalone_mode=False); "
        "app(['convert', 'to-hf', '--help'], standalone_mode=False); print('megatron.core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert {"train", "convert", "quantize", "prepare-data", "measure-mismatch"} <= listed
    assert done.stdout.splitlines()[-1] == "False"


def test_the_programs_are_those_that_users_call() -> None:
    names = {path.stem for path in TOOLS.glob("*.py")} - {"__init__", "release", "versions"}
    assert names == {tool for tool, _ in SPELLINGS}


def test_the_work_of_a_descendant_is_not_counted_as_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of ranks that a server of forks has started: the server lives on when they have ended."""
    monkeypatch.setattr(psutil, "cpu_times", lambda: psutil.Process().cpu_times()._replace(user=1000.0))
    busy = "import time\nwhile time.process_time() < 1: pass"
    others = OtherPrograms()
    script = f"{shlex.quote(sys.executable)} -c {shlex.quote(busy)}; echo done; exec sleep 60"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "done\n"
        own_s = others._busy_s - others._other_s()
        server.kill()
    assert own_s >= 0.9
