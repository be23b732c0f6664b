"""Runs pairs of tiny training runs that differ in one setting, and reads what each left.

All runs are played by one process, one after the other. `PHASES` orders what a setting may change first.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.config import Config
from megatron_dppo.errors import MegatronDppoError
from megatron_dppo.runtime.files import read_jsonl, write_jsonl
from megatron_dppo.runtime.process import Runtime
from tests.distributed.seam_scenarios import make_prompts, train
from tests.support.records import lines_of
from tests.support.tiny import write_model

OWN = "tests.distributed.seam_rewards"
Tables = Mapping[str, Any]
"""Settings by dotted key."""


def make_task(folder: Path) -> Path:
    """Write prompts, a model, and other models and prompts to change to."""
    make_prompts(folder)
    write_model(folder / "other", seed=1, num_hidden_layers=2, **_sizes(folder / "model"))
    for file in (folder / "model").glob("*token*"):
        (folder / "other" / file.name).write_bytes(file.read_bytes())
        (folder / "deep" / file.name).write_bytes(file.read_bytes())
    rows: list[Any] = [row for _, row in read_jsonl(folder / "prompts.jsonl")]
    for number, row in enumerate(rows):
        row["longer"] = row["question"] + " 1" * (number % 3)
        row["wrong"] = row["reference"] + " 1"
    write_jsonl(folder / "prompts.jsonl", rows)
    write_jsonl(folder / "reversed.jsonl", rows[::-1])
    return folder


def _sizes(model: Path) -> dict[str, int]:
    config = json.loads((model / "config.json").read_text())
    return {name: config[name] for name in ("vocab_size", "eos_token_id")}


BASE: Tables = {
    "run.num_rollouts": 1,
    "model.load": "{task}/model",
    "model.dtype": "float32",
    "parallel.max_tokens_per_microbatch": 90,
    "data.prompts": "{task}/prompts.jsonl",
    "data.prompt_column": "question",
    "data.answer_column": "reference",
    "data.reward": f"{OWN}:by_answer",
    "data.max_prompt_tokens": 17,
    "rollout.prompts_per_rollout": 6,
    "rollout.samples_per_prompt": 3,
    "rollout.max_response_tokens": 9,
    "algorithm.minibatches_per_rollout": 3,
    "optimizer.lr": 1e-3,
    "tracking.samples_every": 1,
    "tracking.shadow": False,
}
"""Settings of each run: float32 on both sides, so that pi is mu until the first update."""


@dataclass(frozen=True)
class Effect:
    """A setting, two values of it, and what differs between their runs.

    Attributes:
        setting: Dotted key.
        values: Values of the first and second run; a setting that is absent from the first keeps its default.
        first: The first phase that differs; `None` if all phases are equal. An evaluation is not in this order.
        holds: Check of both runs, in addition to the first phase that differs.
        base: Settings of both runs.
    """

    setting: str
    values: tuple[Any, Any]
    first: str | None
    holds: Callable[["Left", "Left"], bool]
    base: Tables = field(default_factory=dict[str, Any])

    def settings(self, number: int) -> Tables:
        return {**BASE, **self.base, self.setting: self.values[number]}

    @property
    def id(self) -> str:
        """For a test's name."""
        base = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.base.items())
        return f"{self.setting}={self.values[1]}" + (f"[{base}]" if base else "")


@dataclass(frozen=True)
class Left:
    """What a run left behind.

    Attributes:
        folder: The run's.
        error: Message of the error that ended it; empty if none did.
        num_threads: CPU threads of the process at its end.
        log: Messages of the package's log.
    """

    folder: Path
    error: str
    num_threads: int
    log: str

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        file = self.folder / "metrics.jsonl"
        return lines_of(file) if file.is_file() else []

    def column(self, kind: str, name: str) -> list[Any]:
        """Return a metric of all rows of a kind that have it."""
        return [row[name] for row in self.rows if row["kind"] == kind and name in row]

    def steps(self, name: str) -> list[Any]:
        return self.column("step", name)

    def rollouts(self, name: str) -> list[Any]:
        return self.column("rollout", name)

    def evaluations(self, name: str) -> list[Any]:
        return self.column("evaluation", f"eval/held-out/{name}")

    @cached_property
    def samples(self) -> list[Any]:
        """Return the samples of the first rollout."""
        files = sorted((self.folder / "samples").glob("*.jsonl"))
        return [row for _, row in read_jsonl(files[0])] if files else []

    @cached_property
    def versions(self) -> dict[str, Any]:
        return json.loads((self.folder / "versions.json").read_text())

    def names(self, pattern: str) -> list[str]:
        """Return the names of files or folders, in order."""
        return sorted(path.name for path in self.folder.glob(pattern))

    def checkpoints(self) -> list[int]:
        return [int(name.removeprefix("step_")) for name in self.names("checkpoints/step_????????")]

    @cached_property
    def phases(self) -> dict[str, Any]:
        """Return what each phase made, by its name and in their order."""
        found: dict[str, Any] = {
            "prompts": list(dict.fromkeys(sample["prompt_id"] for sample in self.samples)),
            "responses": [(sample["prompt"], sample["response"]) for sample in self.samples],
            "rewards": [sample["reward"] for sample in self.samples],
            "advantages": [sample["advantage"] for sample in self.samples],
        }
        for number, row in enumerate(row for row in self.rows if row["kind"] == "step"):
            for phase, areas in _OF_A_STEP.items():
                found[f"{phase} {number}"] = {
                    name: value for name, value in row.items() if name.startswith(areas) and name not in _PLACE
                }
        return found


_OF_A_STEP = {
    "policy": ("drift/", "policy/entropy"),
    "loss": ("loss/", "trust_region/", "policy/ref", "theory/"),
    "gradient": ("optimizer/grad_norm",),
}
_PLACE = ("drift/mini_step",)
PHASES = ("prompts", "responses", "rewards", "advantages", "policy <n>", "loss <n>", "gradient <n>")
"""Phases in the order of a run. Those after the advantages repeat for each gradient step."""


def tables_of(settings: Tables, task: Path) -> dict[str, Any]:
    """Return nested tables of settings by dotted key."""
    tables: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = _placed(value, task)
    return tables


def _placed(value: Any, task: Path) -> Any:
    """Put the task's folder into a value."""
    if isinstance(value, str):
        return value.replace("{task}", str(task))
    if isinstance(value, dict):
        return {key: _placed(item, task) for key, item in value.items()}
    return value


def play_all(runtime: Runtime, task: Path, runs: Sequence[Tables]) -> list[Left]:
    """Run each of these, and return what they left."""
    left: list[Left] = []
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_dppo").addHandler(handler)
    for number, settings in enumerate(runs):
        tables, error = tables_of({"run.folder": f"{{task}}/run_{number:03d}", **settings}, task), ""
        folder = Path(tables["run"]["folder"])
        try:
            train(Config.model_validate(tables), runtime)
        except MegatronDppoError as found:
            error = f"{type(found).__name__}: {found}"
        left.append(Left(folder, error, torch.get_num_threads(), "\n".join(messages)))
        messages.clear()
    return left
