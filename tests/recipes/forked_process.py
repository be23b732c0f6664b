"""A function, or `megatron-dppo train`, in a process forked from this one, where all is imported already."""

import os
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import transformers.modeling_utils  # noqa: F401

import megatron_dppo.train  # noqa: F401
from megatron_dppo.cli import app

TIMEOUT_S = 300


def train(arguments: list[str], folder: Path, log: Path) -> int:
    """The exit status of `megatron-dppo train`, started in `folder`; what it prints goes to `log`."""
    return command(["train", *arguments], folder, log)


def command(words: list[str], folder: Path, log: Path) -> int:
    """The exit status of `megatron-dppo WORDS`, started in `folder`; what it prints goes to `log`."""
    return forked(_run, words, folder, log)


def forked(function: Callable[..., Any], *arguments: Any) -> int:
    """The exit status of a process that calls the function.

    This process computes nothing with torch itself: a fork would inherit threads' locks, and not the threads.
    """
    process = get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join(TIMEOUT_S)
    process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(words: list[str], folder: Path, log: Path) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.stdout = sys.stderr = log.open("w")
    for descriptor in (1, 2):  # what other languages and processes print
        os.dup2(sys.stdout.fileno(), descriptor)
    app(words)
