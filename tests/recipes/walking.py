"""Runs a guide as it is written: writes its files, and runs its `bash` blocks, in a fresh folder.

The blocks run in a real shell. `megatron-dppo` and `python` there are a client of a few lines, whose server
forks: what takes seconds to import is imported once. The server is this process, for all guides, or another one
for a guide that edits the package.
"""

import array
import contextlib
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_CLIENT = r"""#!{python} -SE
import array, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))]
    server.sendmsg(["\0".join([os.getcwd(), *sys.argv]).encode()], rights)
    sys.exit(int(server.recv(16) or b"1"))
"""
_FILE = re.compile(r"`([\w.]+)`:\n\n```(?:python|toml|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELL = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Walk:
    """A guide that was followed: the folder it leaves, and what its commands printed."""

    folder: Path
    printed: str


def walk(guide: str, folder: Path, *, edits_package: bool = False) -> Walk:
    """Follow the guide's text in `folder`, block after block, until one fails.

    Args:
        guide: Its text.
        folder: An empty one.
        edits_package: The clone gets its own copy of the package, imported with the first command.

    Raises:
        AssertionError: A block ended with another status than 0.
    """
    home, address = folder / "home", str(folder / "forks")
    clone = home / "megatron_dppo"
    _make_clone(clone, address, edits_package=edits_package)
    state, log = folder / "state.sh", folder / "printed"
    state.write_text("")
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("w"))
        if edits_package:
            stack.enter_context(_other_process(clone, address))
            server = None
        else:
            server = stack.enter_context(_listening(address))
        for block in _blocks(guide):
            # The next block continues with this one's variables and folder.
            program = (
                f". {state}\nset -euo pipefail\n{block}\n{{ declare -p REPO PATH; echo cd $PWD; }} >{state}\n"
            )
            shell = subprocess.Popen(
                ["bash", "-c", program],
                cwd=home,
                env=os.environ | {"HOME": str(home)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            while server is not None and shell.poll() is None:
                with contextlib.suppress(TimeoutError):
                    _serve(server)
            assert shell.wait() == 0, f"{block}\n{log.read_text()[-3000:]}"
    return Walk(Path(re.findall(r"^cd (.*)$", state.read_text(), re.MULTILINE)[-1]), log.read_text())


def _make_clone(clone: Path, address: str, *, edits_package: bool) -> None:
    """Make what a user has after `make venv`, as far as guides touch it."""
    programs = clone / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    (clone / "examples").symlink_to(ROOT / "examples")
    if edits_package:
        no_builds = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / "megatron_dppo", clone / "megatron_dppo", ignore=no_builds)
        subprocess.run(["git", "init", "--quiet", clone], check=True)
    for name in ("megatron-dppo", "python"):
        (programs / name).write_text(_CLIENT.format(python=sys.executable, address=address))
        (programs / name).chmod(0o755)


def _blocks(guide: str) -> list[str]:
    """Return the shell blocks and, as one too, each file that a line ending with its name and ":" announces."""
    found = [(match.start(), match.group(1)) for match in _SHELL.finditer(guide)]
    for match in _FILE.finditer(guide):
        name, content = match.groups()
        found.append((match.start(), f"cat >{name} <<'END_OF_FILE'\n{content}END_OF_FILE"))
    return [block for _, block in sorted(found)]


@contextlib.contextmanager
def _listening(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        server.settimeout(0.1)
        yield server


@contextlib.contextmanager
def _other_process(clone: Path, address: str) -> Iterator[None]:
    """Serve from a separate process, which imports the clone's package."""
    environment = os.environ | {"PYTHONPATH": str(clone)}
    process = subprocess.Popen([sys.executable, "-W", "ignore", __file__, address], env=environment, cwd=clone)
    try:
        while not Path(address).exists():
            assert process.poll() is None
        yield
    finally:
        process.terminate()
        process.wait()


def _serve(server: socket.socket) -> None:
    """Run one command in a fork, with the client's folder and output, and reply with its exit status.

    Raises:
        TimeoutError: No client asked.
    """
    connection, _ = server.accept()
    import megatron_dppo.train  # noqa: F401 - with the first command: a guide edits the package before it

    with connection:
        request, rights, *_ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(8))
        descriptors = array.array("i", rights[0][2])
        child = os.fork()
        if child == 0:
            _become(request.decode().split("\0"), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def _forget_forkserver() -> None:
    """Forget the server of the tests, which is no child of this process: a command starts its own."""
    server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    preloaded = server._preload_modules
    server.__init__()
    server._preload_modules = preloaded


def _become(words: list[str], descriptors: Sequence[int]) -> None:
    status = 1
    _forget_forkserver()
    try:
        folder, program, *arguments = words
        os.chdir(folder)
        for own, descriptor in zip((1, 2), descriptors, strict=True):
            os.dup2(descriptor, own)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        if Path(program).name == "python":
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).absolute().parent))
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            from megatron_dppo.cli import main

            sys.argv = ["megatron-dppo", *arguments]
            main()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - a fork must never return into the test
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    with _listening(sys.argv[1]) as listening:
        while True:
            with contextlib.suppress(TimeoutError):
                _serve(listening)
