"""Trees of agents' episodes, of the last rollout whose samples were written."""

from collections.abc import Sequence
from typing import Any

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
        rows: list[Any] = [row for _, row in read_jsonl(files[-1])] if files else []
        episodes = sorted((row for row in rows if row.get("calls")), key=lambda row: -len(row["calls"]))
        if episodes:
            rollout = int(files[-1].stem.removeprefix("rollout_")) + 1
            drawn = [{"id": row["id"], "tree": draw(row["calls"])} for row in episodes[:MOST]]
            found.append({"name": name, "rollout": rollout, "episodes": drawn})
    return found


def draw(calls: Sequence[dict[str, Any]]) -> str:
    """Return the tree of calls as lines of text, each with its branch of the tree before it."""
    children: dict[int | None, list[int]] = {}
    for number, call in enumerate(calls):
        children.setdefault(call["parent"], []).append(number)
    lines = list[str]()

    def add(number: int, before: str, is_last: bool) -> None:
        call = calls[number]
        said = " ".join(call["response"].split())
        said = said if len(said) <= _SHOWN else said[: _SHOWN - 2] + " …"
        counts = f"{call['num_prompt_tokens']} -> {call['num_tokens']} tokens"
        trained = "" if call["is_trained"] else ", not trained"
        lines.append(f"{before}{'└' if is_last else '├'} {number} {call['kind']}, {counts}{trained}: {said}")
        of = children.get(number, [])
        # A conversation goes on below its call; only branches move to the right.
        inner = before + ("  " if is_last else "│ ") if len(of) > 1 else before
        for place, child in enumerate(of):
            add(child, inner if len(of) > 1 else before, is_last if len(of) == 1 else place == len(of) - 1)

    roots = children.get(None, [])
    for place, root in enumerate(roots):
        add(root, "", place == len(roots) - 1)
    return "\n".join(lines)
