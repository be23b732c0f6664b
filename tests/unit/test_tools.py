"""tools/convert_checkpoint.py is `megatron-dppo convert`: the same options, by either name."""

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
COMMANDS = ("to-megatron", "to-hf", "to-adapter", "merge-adapter", "upcycle", "inspect", "verify")


@pytest.fixture(autouse=True)
def as_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("COLUMNS", "100")


Ended = tuple[int | str | None, str, str]  # exit status, stdout, stderr


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[Ended]]:
    """Runs arguments in this process: of the file, and of `megatron-dppo convert`."""

    def end(program: str, *arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        with pytest.raises(SystemExit) as ended:
            if program == "megatron-dppo":
                main()
            else:
                runpy.run_path(str(TOOLS / f"{program}.py"), run_name="__main__")
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return lambda *given: [end("convert_checkpoint", *given), end("megatron-dppo", "convert", *given)]


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_both_spellings_have_the_same_options(
    command: tuple[str, ...], run: Callable[..., list[Ended]]
) -> None:
    by_path, by_name = run(*command, "--help")
    assert by_path[0] == by_name[0] == 0
    assert by_path[1].partition("\n\n")[2] == by_name[1].partition("\n\n")[2] != "", "without their first lines"


@pytest.mark.parametrize(
    "arguments", [("to-hf", "--megatron", "{0}", "--out", "{0}"), ("inspect", "{0}/nowhere"), ("to-hf",)]
)
def test_both_spellings_refuse_alike(
    arguments: tuple[str, ...], tmp_path: Path, run: Callable[..., list[Ended]]
) -> None:
    by_path, by_name = run(*(word.format(tmp_path) for word in arguments))
    assert by_path[0] == by_name[0] == 2
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
