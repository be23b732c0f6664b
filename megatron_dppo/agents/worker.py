"""The process that runs harnesses: `python -m megatron_dppo.agents.worker NAME MEMORY_MB`.

NAME is "package.module:function" or a command as a JSON list. Its main loop is `workers.worker.run_worker`.
"""

import asyncio
import inspect
import json
import os
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dppo.agents.harness import (
    KEY,
    SERVICE,
    AgentOutcome,
    EpisodeTask,
    as_command,
    checked_outcome,
)
from megatron_dppo.errors import AgentFailedError
from megatron_dppo.runtime.user_code import describe_error, import_named
from megatron_dppo.workers.worker import run_worker

_LAST_OUTPUT = 1000  # characters of a command's output that its fault shows
_BEGIN_TIMEOUT_S = 600.0  # the trainer's machine may be loaded

Harness = Callable[[EpisodeTask], AgentOutcome]
"""Runs one episode."""


def load_harness(name: str) -> Harness:
    """Return a function that runs an episode of the harness `name`."""
    command = as_command(name)
    run = _of_function(name) if command is None else _of_command(command)

    def answer(task: EpisodeTask) -> AgentOutcome:
        os.environ.update(variables(task))
        _begin(task)
        return run(task)

    return answer


def variables(task: EpisodeTask) -> dict[str, str]:
    """Return the environment variables by which clients find the policy, without a proxy in between."""
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1"]))
    return {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": task.api_key,
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def _begin(task: EpisodeTask) -> None:
    """Start the clock of the episode, after this process has started."""
    headers = {"Authorization": f"Bearer {task.api_key}"}
    request = urllib.request.Request(f"{task.base_url.removesuffix('/v1')}/", headers=headers, method="HEAD")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        direct.open(request, timeout=_BEGIN_TIMEOUT_S).close()
    except OSError as error:
        raise AgentFailedError(f"prompt {task.prompt.id}: found no reply of the trainer: {error}") from error


def _of_function(name: str) -> Harness:
    function = import_named(KEY, name)
    if not inspect.iscoroutinefunction(function):
        raise AgentFailedError(f"{KEY}: found {name!r}; expected an `async def`. Correct the function.")

    def run(task: EpisodeTask) -> AgentOutcome:
        try:
            workdir = Path(task.workdir)
            found: Any = asyncio.run(function(task.prompt, task.base_url, task.api_key, workdir))
            return checked_outcome(found)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            raise _failed(task, f"the harness raised {describe_error(error)}") from error

    return run


def _of_command(command: list[str]) -> Harness:
    def run(task: EpisodeTask) -> AgentOutcome:
        prompt, file = task.prompt, Path(task.workdir, "task.json")
        file.write_text(json.dumps(vars(prompt), ensure_ascii=False))
        question = prompt.text if prompt.messages is None else prompt.messages[-1]["content"]
        filled = {"{base_url}": task.base_url, "{api_key}": task.api_key, "{prompt}": question or ""}
        filled["{task}"] = str(file)
        words = [_fill(word, filled) for word in command]
        output = Path(task.workdir, "output.txt")
        try:
            with output.open("wb") as written:
                pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": written, "stderr": written}
                done = subprocess.run(words, cwd=task.workdir, check=False, **pipes)
        except OSError as error:
            raise _failed(task, f"the command did not start: {error}") from error
        if done.returncode != 0:
            said = output.read_text(errors="replace")[-_LAST_OUTPUT:].strip()
            raise _failed(task, f"the command ended with status {done.returncode}: {said}")
        return AgentOutcome()

    return run


def _fill(word: str, filled: dict[str, str]) -> str:
    return filled.get(word) or next(
        (word.replace(name, value) for name, value in filled.items() if name in word), word
    )


def _failed(task: EpisodeTask, found: str) -> AgentFailedError:
    return AgentFailedError(f"prompt {task.prompt.id}: {found}")


if __name__ == "__main__":
    run_worker(SERVICE, load_harness)
