"""Trees of agents' episodes, of the last rollout whose samples were written."""

import heapq
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.errors import DataError
from megatron_dppo.run_folder.reader import Run
from megatron_dppo.runtime.files import read_jsonl

MOST = 3
"""Episodes of a run that are drawn: those with the most calls."""
_SHOWN = 80  # characters of a response


def episode_trees(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return each run's rollout and its episodes as text, of runs with agents.

    Raises:
        DataError: A file has the wrong format.
    """
    found = list[dict[str, Any]]()
    for run, name in zip(runs, names, strict=True):
        files = sorted((run.path / "samples").glob("rollout_*.jsonl"))
        has_agent = run.option("rollout.agent.harness") or run.option("rollout.agent.command")
        if files and has_agent:
            rollout = int(files[-1].stem.removeprefix("rollout_")) + 1
            found.append({"name": name, "rollout": rollout, "episodes": _longest(files[-1])})
    return found


def _longest(file: Path) -> list[dict[str, str]]:
    """Return the ids and trees of the episodes with the most calls."""
    rows: Any = (row for _, row in read_jsonl(file) if row.get("calls"))
    try:
        episodes = heapq.nlargest(MOST, rows, key=lambda row: len(row["calls"]))
        return [{"id": str(row["id"]), "tree": draw(row["calls"])} for row in episodes]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file}: found calls of another form ({error!r}). Restore or remove the file."
        ) from error


def draw(calls: Sequence[Mapping[str, Any]]) -> str:
    """Return the tree of calls as lines: a conversation goes straight down, branches move to the right."""
    children: dict[int | None, list[int]] = {}
    for number, call in enumerate(calls):
        children.setdefault(call["parent"], []).append(number)
    lines, roots = list[str](), children.get(None, [])
    left = [
        (root, "", root == roots[-1]) for root in reversed(roots)
    ]  # a stack: episodes have up to 10,000 calls
    while left:
        number, before, is_last = left.pop()
        lines.append(f"{before}{'└' if is_last else '├'} {number} {_described(calls[number])}")
        below = children.get(number, [])
        if len(below) == 1:
            left.append((below[0], before, is_last))
        else:
            inner = before + ("  " if is_last else "│ ")
            left += [(child, inner, child == below[-1]) for child in reversed(below)]
    return "\n".join(lines)


def _described(call: Mapping[str, Any]) -> str:
    said = " ".join(call["response"].split())
    said = said if len(said) <= _SHOWN else said[: _SHOWN - 2] + " …"
    trained = "" if call["is_trained"] else ", not trained"
    return f"{call['kind']}, {call['num_prompt_tokens']} -> {call['num_tokens']} tokens{trained}: {said}"
