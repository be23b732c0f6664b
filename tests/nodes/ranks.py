"""Ranks without a model: forked from a process of each node that has imported torch, which takes no time.

`python -m tests.nodes.ranks` reads a line of JSON for each rank: the module and arguments of its `main`, the
environment, and the file that gets its output; `*.status` next to it gets the exit status.
"""

import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.nodes.lab import Node
from tests.support.processes import wait_until


@dataclass(frozen=True)
class Rank:
    """A started rank."""

    log: Path
    started: float

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def status(self) -> int | None:
        """How it ended; None while it runs."""
        file = self.log.with_suffix(".status")
        return int(file.read_text()) if file.exists() else None

    def wait(self, timeout_s: float) -> int:
        """Exit status, at most `timeout_s` seconds from now."""
        try:
            wait_until(lambda: self.status is not None, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{self.log.stem}: {error}; output:\n{self.output}") from None
        assert self.status is not None, "waited for"
        return self.status


class Ranks:
    """A process of each node that starts ranks there."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._starters = [
            subprocess.Popen(
                [*node.prefix, sys.executable, "-m", "tests.nodes.ranks"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
            for node in nodes
        ]
        self._ports = itertools.count(29500)  # a rank that hangs holds its port
        for starter in self._starters:
            assert starter.stdout is not None, "a pipe"
            assert starter.stdout.readline(), "a starter ended; its error is above"

    def start(self, folder: Path, program: str, *arguments: object, master: str, count: int = 2) -> list[Rank]:
        """Start a rank of a module of tests/nodes/programs on each of the first nodes; their port is new."""
        port = next(self._ports)
        ranks: list[Rank] = []
        for number, starter in enumerate(self._starters[:count]):
            log = folder / f"{program}_{port}_rank_{number}.log"
            meeting = {"MASTER_ADDR": master, "MASTER_PORT": port, "RANK": number, "WORLD_SIZE": count}
            order = {
                "program": program,
                "arguments": arguments,
                "log": str(log),
                "environment": {name: str(value) for name, value in meeting.items()},
            }
            assert starter.stdin is not None, "a pipe"
            starter.stdin.write(f"{json.dumps(order)}\n")
            starter.stdin.flush()
            ranks.append(Rank(log, time.monotonic()))
        return ranks

    def close(self) -> None:
        """End the processes; ranks that still run end with their node."""
        for starter in self._starters:
            starter.kill()
            starter.wait()


@contextmanager
def starting_ranks(nodes: Sequence[Node]) -> Iterator[Ranks]:
    """Start ranks inside the block."""
    ranks = Ranks(nodes)
    try:
        yield ranks
    finally:
        ranks.close()


def main() -> None:
    """Start a rank for each line, until there is none."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for program in ("meet", "watch"):
        importlib.import_module(f"tests.nodes.programs.{program}")
    print("ready", flush=True)
    for line in sys.stdin:
        if os.fork() == 0:
            _serve(json.loads(line))


def _serve(order: dict[str, Any]) -> None:
    """Run a rank in a separate process and write its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = Path(order["log"])
    rank = os.fork()
    if rank == 0:
        with log.open("wb") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.environ |= order["environment"]
        program = importlib.import_module(f"tests.nodes.programs.{order['program']}")
        sys.exit(program.main(*order["arguments"]))
    _, status = os.waitpid(rank, 0)
    part = log.with_suffix(".part")
    part.write_text(str(os.waitstatus_to_exitcode(status)))
    part.rename(log.with_suffix(".status"))
    os._exit(0)


if __name__ == "__main__":
    main()
