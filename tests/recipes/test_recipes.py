"""Every algorithm of every experiment trains for real, with examples/tiny.toml as its last layer."""

import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from examples.make_tiny import write_tiny
from megatron_dppo.algorithms import Objective, preset
from megatron_dppo.algorithms.presets import overrides_in
from megatron_dppo.cli import app
from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.runtime.files import write_jsonl
from tests.support.experiments import ALGORITHMS, EXPERIMENTS, ROOT, Algorithm, tiny_family
from tests.support.records import metrics_of

TIMEOUT_S = 1500
_CONTEXT = get_context("forkserver")  # imports once; a fork of this process would inherit its threads' locks
_CONTEXT.set_forkserver_preload(["megatron_dppo.train", "megatron_dppo.cli", "transformers.modeling_utils"])


def train(arguments: list[str], folder: Path, log: Path) -> int:
    """The exit status of `megatron-dppo train`, started in `folder`; what it prints goes to `log`."""
    return command(["train", *arguments], folder, log)


def command(words: list[str], folder: Path, log: Path) -> int:
    """The exit status of `megatron-dppo WORDS`, started in `folder`; what it prints goes to `log`."""
    return forked(_run, words, folder, log)


def forked(function: Callable[..., Any], *arguments: Any) -> int:
    """The exit status of a process that calls the function."""
    process = _CONTEXT.Process(target=function, args=arguments)
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


CONVERTED = "-megatron"  # the end of the name of a converted folder


@dataclass(frozen=True)
class TinyRun:
    """A finished run of a recipe on the tiny model."""

    full_size: Config
    config: Config  # as the run resolved it
    rollouts: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @property
    def objective(self) -> Objective:
        """What the overlay asks for."""
        algorithm = self.full_size.algorithm
        return preset(algorithm.preset, **overrides_in(algorithm.model_dump()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's working directory: contains examples/ and the tiny models."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "examples").symlink_to(ROOT / "examples")
    assert forked(write_tiny, folder / "runs" / "tiny") == 0
    assert forked(convert_all, folder / "runs" / "tiny") == 0
    return folder


def convert_all(folder: Path) -> None:
    """Convert each model in a folder; the result's name ends with `CONVERTED`."""
    for model in [path.parent for path in folder.glob("*/config.json")]:
        app(
            ["convert", "to-megatron", "--hf", str(model), "--out", f"{model}{CONVERTED}"],
            standalone_mode=False,
        )


def _kinds() -> list[tuple[Algorithm, str]]:
    """Return each algorithm with the end of its model folder's name; an experiment has both kinds."""
    found: list[tuple[Algorithm, str]] = []
    for experiment in EXPERIMENTS:
        own = [each for each in ALGORITHMS if each.experiment == experiment]
        found += [(algorithm, ("", CONVERTED)[number % 2]) for number, algorithm in enumerate(own)]
        if len(own) == 1:
            found.append((own[0], CONVERTED))
    return found


@pytest.mark.parametrize(("algorithm", "kind"), _kinds(), ids=str)
def test_the_recipe_of_an_algorithm_trains(folder: Path, algorithm: Algorithm, kind: str) -> None:
    run = _train(folder, algorithm, kind)
    assert [row["step"] for row in run.steps] == list(range(4 * run.config.algorithm.epochs_per_rollout))
    assert all(f"eval/{name}/avg_at_2" in row for row in run.evaluations for name in run.config.evaluation.sets)
    assert [row["rollout"] for row in run.evaluations] == [0, 2]
    for row in (*run.rollouts, *run.steps, *run.evaluations):
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float)), row
    assert all(row["optimizer/skipped_steps"] == 0 for row in run.steps)
    if algorithm.earns_tiny_reward:
        first_steps = [step for step in run.steps if step["drift/mini_step"] == 0]
        assert all(row["optimizer/grad_norm"] > 0 for row in first_steps), "first steps of a rollout learn"
        assert _acts_as(run.objective, run.steps)
    assert _of_the_experiment(run.config) == _of_the_experiment(run.full_size)
    has_routes = run.full_size.rollout.routing_replay != "off"
    assert all(("routing/agreement_mean" in row) == has_routes for row in run.rollouts)
    has_turns = run.full_size.rollout.max_turns > 1
    assert all((row["rollout/num_turns_mean"] > 1) == has_turns for row in run.rollouts)


def _train(folder: Path, algorithm: Algorithm, kind: str) -> TinyRun:
    run = Path("runs") / "recipes" / algorithm.experiment / f"{algorithm.name}{kind}"
    log = folder / f"{algorithm}{kind}.log"
    settings = [f"run.folder='{run}'", f"model.load=runs/tiny/{tiny_family(algorithm)}{kind}"]
    arguments = [*map(str, algorithm.tiny_layers), *(word for each in settings for word in ("--set", each))]
    assert train(arguments, folder, log) == 0, log.read_text()[-3000:]
    rows = metrics_of(folder / run)
    kinds = ("rollout", "step", "evaluation")
    rollouts, steps, evaluations = ([row for row in rows if row["kind"] == kind] for kind in kinds)
    full_size = load_config([ROOT / layer for layer in algorithm.layers])
    return TinyRun(full_size, load_config([folder / run / "config.toml"]), rollouts, steps, evaluations)


SMALL = (
    ("quickstart/base", "quickstart/measure"),
    ("quickstart/base", "quickstart/replay"),
    ("sudoku/base",),
    ("miniature_study/base",),
    ("smollm2/base",),
)
"""Configs of the examples without a job script."""
FITTED = {
    "smollm2/base": {
        "data.max_prompt_tokens": "16",
        "rollout.max_response_tokens": "24",
        "evaluation.sets.held_out.prompts": "small.jsonl",
    }
}
"""What the tiny model and the folder here need of them."""


def test_every_small_example_is_tested() -> None:
    others = {path.parent.name for path in (ROOT / "examples").glob("*/base.toml")} - set(EXPERIMENTS)
    assert {layer.partition("/")[0] for layers in SMALL for layer in layers} == others


@pytest.mark.parametrize("layers", SMALL, ids=lambda layers: layers[-1])
def test_a_small_example_is_checked_alike_with_both_kinds_of_folder(
    folder: Path, layers: tuple[str, ...]
) -> None:
    rows = [{"id": f"{n}", "prompt": f"{n % 10} + 1 =", "answer": f"{1 + n % 3}"} for n in range(64)]
    write_jsonl(folder / "small.jsonl", rows)
    files = [f"examples/{layer}.toml" for layer in layers]
    printed: list[str] = []
    for kind in ("", CONVERTED):
        model, log = f"runs/tiny/qwen3_moe{kind}", folder / f"{layers[-1].replace('/', '_')}{kind}.log"
        options = ["--world-size", "2", "--set", "data.prompts=small.jsonl", "--set", f"model.load={model}"]
        fitted = FITTED.get(layers[-1], {}).items()
        options += [word for key, value in fitted for word in ("--set", f"{key}={value}")]
        status = command(["check", *files, *options], folder, log)
        assert status == 0, log.read_text()
        text = re.sub(r"[\d.]+ GiB free", "FREE", log.read_text())  # others write to the disk meanwhile
        printed.append(text.replace(model, "MODEL"))
    assert printed[0] == printed[1]


def _acts_as(objective: Objective, steps: list[dict[str, Any]]) -> bool:
    """Whether tokens were masked and ratios capped by what does that, and by nothing else.

    On which side of one a mask acts is left to the tests of masks: a tiny run has some 30 tokens of either sign
    to a step, of which one or none may pass a threshold, as the machine's arithmetic has it.
    """

    def has_any(name: str) -> bool:
        return any(row.get(f"trust_region/{name}", 0) > 0 for row in steps)

    is_capped_by_right = objective.ratio_cap < math.inf or not has_any("ratio_capped_fraction")
    above, below = has_any("masked_fraction_positive"), has_any("masked_fraction_negative")
    if objective.rule == "negative":  # random distributions hardly move as far as it lets them
        return is_capped_by_right and not above
    return is_capped_by_right and (above or below) == (objective.rule != "none")


def _of_the_experiment(config: Config) -> dict[str, Any]:
    """Returns the settings that a recipe test shares with the run at full size."""
    algorithm = config.algorithm.model_dump(exclude={"minibatches_per_rollout"})
    rollout = config.rollout.model_dump(
        include={"routing_replay", "num_topk_log_probs", "temperature", "environment", "max_turns"}
    )
    return algorithm | rollout | config.lora.model_dump() | {"dtype": config.model.dtype}
