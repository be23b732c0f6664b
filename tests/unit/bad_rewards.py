"""Rewards that fail in the way the response names, for `test_reward_pool.py`."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dppo.rewards.base import RewardResult
from megatron_dppo.types import FinishReason, Prompt

_kept: list[bytearray] = []


def told(prompt: Prompt, response: str, finish_reason: FinishReason) -> Any:
    """Fail in the way that the response names, or reward its length."""
    if response in _DEEDS:
        return _DEEDS[response]()
    cut = float(finish_reason == "length")
    return RewardResult(float(len(response)), {"has_prompt": float(bool(prompt.text)), "is_cut": cut})


def _raise() -> None:
    raise KeyError("lost")


class _NamelessError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def _raise_nameless() -> None:
    raise _NamelessError


def _sleep() -> None:
    """Leave a file in the folder that the test names, and sleep for longer than any test."""
    if folder := os.environ.get("SLEEPERS"):
        Path(folder, str(os.getpid())).touch()
    time.sleep(10_000)


def _spin() -> None:
    while True:
        pass


def _backtrack() -> None:
    """Hold the interpreter for ever: no other thread of this process runs."""
    re.match(r"(a|aa)+$", "a" * 100 + "b")


def _flood() -> None:
    while True:
        print("x" * 1000)


def _eat() -> None:
    eaten: list[bytearray] = []
    while True:
        eaten.append(bytearray(1 << 24))


def _eat_crumbs() -> None:
    eaten: list[str] = []
    while True:
        eaten.append(str(len(eaten)))


def _leak() -> RewardResult:
    _kept.append(bytearray(50 << 20))
    return RewardResult(1.0)


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _last_words() -> None:
    print("so long")
    os._exit(3)


def _fork_and_die() -> None:
    """A child that still holds whatever it inherited."""
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)).start()
    os._exit(7)


def _close_everything() -> None:
    os.closerange(3, 100)
    time.sleep(600)


def _print() -> RewardResult:
    print("{torn")
    sys.stdout.flush()
    os.write(1, b'{"number": 1, "value": 9.0, "info": {}}\n')
    subprocess.run(["echo", "{}"], check=True)
    return RewardResult(5.0)


def _program_that_reads() -> RewardResult:
    program = "import sys; print(len(sys.stdin.read()))"
    return RewardResult(float(subprocess.run([sys.executable, "-c", program], capture_output=True).stdout))


def _program_that_is_terminated() -> RewardResult:
    program = subprocess.Popen(["sleep", "60"])
    program.terminate()
    return RewardResult(float(program.wait()))


def _program_that_hangs() -> None:
    subprocess.run(["sleep", os.environ["SLEEP_S"]], check=True)


_DEEDS: dict[str, Callable[[], Any]] = {
    "raise": _raise,
    "raise nameless": _raise_nameless,
    "sleep": _sleep,
    "spin": _spin,
    "backtrack": _backtrack,
    "flood": _flood,
    "eat": _eat,
    "eat crumbs": _eat_crumbs,
    "leak": _leak,
    "exit": lambda: os._exit(3),
    "leave": lambda: sys.exit(4),
    "crash": _crash,
    "last words": _last_words,
    "fork and die": _fork_and_die,
    "close everything": _close_everything,
    "nan": lambda: RewardResult(float("nan")),
    "infinite info": lambda: RewardResult(0.0, {"x": float("inf")}),
    "huge info": lambda: RewardResult(0.0, {str(number) * 10_000: 0.0 for number in range(90)}),
    "text value": lambda: RewardResult("1.0"),  # pyright: ignore[reportArgumentType]
    "none value": lambda: RewardResult(None),  # pyright: ignore[reportArgumentType]
    "text": lambda: "1.0",
    "none": lambda: None,
    "print": _print,
    "input": lambda: RewardResult(float(len(input()))),
    "program that reads": _program_that_reads,
    "program that is terminated": _program_that_is_terminated,
    "program that hangs": _program_that_hangs,
    "pid": lambda: RewardResult(float(os.getpid())),
}
