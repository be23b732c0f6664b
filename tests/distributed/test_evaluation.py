"""Evaluation of real runs: it does not change what is learned, and equals itself on any number of ranks."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tomli_w

from megatron_dppo import evaluate as evaluation
from megatron_dppo.config.markers import Section, sections_in
from megatron_dppo.config.resuming import effect_on_evaluation as class_of
from megatron_dppo.config.resuming import may_change
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, RolloutError
from megatron_dppo.evaluate import _keep_unchanged
from megatron_dppo.rollout.scores import metric_names
from megatron_dppo.runtime.process import Runtime
from tests.distributed.test_resharding import stored
from tests.distributed.test_training_run import train
from tests.support.commands import python
from tests.support.ranks import run_ranks
from tests.support.records import lines_of, metrics_of
from tests.support.samples import assert_same
from tests.support.sanity_run import make_task, settings, without_clocks

ROOT = Path(__file__).parents[2]
REWARD = "tests.faults.rewards:digits"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the sanity task's tokenizer, and prompts; one of them too long to be asked."""
    task = make_task(tmp_path_factory.mktemp("evaluation"))
    long = {"prompt": "<bos> " + "1 " * 20 + "=", "answer": "1", "id": "long"}
    with (task / "held_out.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    (task / "few.jsonl").write_text("".join((task / "prompts.jsonl").read_text().splitlines(keepends=True)[:3]))
    return task


def tables_of(task: Path, name: str, **changes: dict[str, Any]) -> dict[str, Any]:
    """A run of two rollouts that is evaluated on two sets, before each and at the end."""
    evaluation = {
        "every": 1,
        "samples_per_prompt": 4,
        "sets": {
            "held-out": {"prompts": str(task / "held_out.jsonl")},
            "few": {
                "prompts": str(task / "few.jsonl"),
                "samples_per_prompt": 2,
                "max_response_tokens": 6,
                "reward": "arithmetic",
            },
        },
    }
    changes = {"run": {"num_rollouts": 2}, "evaluation": evaluation, "data": {"reward": REWARD}} | changes
    changes["rollout"] = {"max_dropped_fraction": 0.2} | changes.get("rollout", {})  # one prompt is too long
    return settings(task, name, **changes)


def evaluations(run: Path) -> list[dict[str, Any]]:
    return metrics_of(run, "evaluation")


def train_both(runtime: Runtime, *runs: dict[str, Any]) -> None:
    """One run after the other."""
    for tables in runs:
        train(runtime, tables)


@pytest.fixture(scope="module")
def evaluated(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of a run with two evaluation sets on two ranks; "without" next to it has no evaluation."""
    split: Any = {"parallel": {"expert": 2}}
    runs = tables_of(task, "two", **split), tables_of(task, "without", evaluation={}, **split)
    run_ranks(train_both, 2, tmp_path_factory.mktemp("two"), *runs)
    return task / "two"


def test_every_metric_and_every_response_of_two_sets(evaluated: Path) -> None:
    rows = evaluations(evaluated)
    assert [row["rollout"] for row in rows] == [0, 1, 2]
    names = [*metric_names("held-out", 4, (1, 2, 4)), *metric_names("few", 2, (1, 2))]
    assert all({*names, "time/evaluation_s"} == row.keys() - {"kind", "rollout"} for row in rows)
    files = sorted(file.name for file in (evaluated / "evaluations").iterdir())
    assert files == sorted(f"{name}_{n:06d}.jsonl" for name in ("held-out", "few") for n in range(3))
    for row in rows:
        responses = lines_of(evaluated / "evaluations" / f"held-out_{row['rollout']:06d}.jsonl")
        assert [(r["index"], r["sample"]) for r in responses] == [(i, k) for i in range(4) for k in range(4)]
        earned = sum(response["reward"] for response in responses)
        assert row["eval/held-out/avg_at_4"] == pytest.approx(earned / 20), "the prompt that is too long counts"
        assert row["eval/held-out/dropped"] == 4
        mean = sum(response["response_length"] for response in responses) / 16
        assert row["eval/held-out/response_length_mean"] == pytest.approx(mean)
        assert (
            row["eval/held-out/avg_at_4_low"]
            < row["eval/held-out/avg_at_4"]
            < row["eval/held-out/avg_at_4_high"]
        )
        short = lines_of(evaluated / "evaluations" / f"few_{row['rollout']:06d}.jsonl")
        assert len(short) == 6 and all(response["response_length"] <= 6 for response in short)
        assert row["eval/few/truncated_fraction"] == sum(r["finish_reason"] == "length" for r in short) / 6


def sections(section: type[Section] = Config, prefix: str = "") -> dict[type[Section], str]:
    """Return the prefix of the dotted keys of each section class."""
    found: dict[type[Section], str] = {section: prefix}
    for name, field in section.model_fields.items():
        for inner in sections_in(field.annotation):
            found |= sections(inner, f"{prefix}{name}.")
    return found


@contextmanager
def recorded_reads() -> Iterator[set[str]]:
    """Yield the set of dotted keys of the config that are read from here on."""
    reads, prefixes, plain = set[str](), sections(), Section.__getattribute__

    def recording(section: Section, name: str) -> Any:
        value = plain(section, name)
        if type(section) in prefixes and name in type(section).model_fields and not isinstance(value, Section):
            reads.add(prefixes[type(section)] + name)
        return value

    with mock.patch.object(Section, "__getattribute__", recording):
        yield reads


def evaluate_alone(
    runtime: Runtime, tables: dict[str, Any], out: Path
) -> tuple[list[dict[str, int]], set[str]]:
    """Evaluate the base model three times, with other settings of one set the last.

    Returns the times of writing of the files after each, and the keys that sampling and scoring read.
    """
    times, reads = list[dict[str, int]](), set[str]()

    def recording(*arguments: Any) -> None:
        with recorded_reads() as found:
            evaluate_rest(*arguments)
        reads.update(found)

    evaluate_rest = evaluation._evaluate_rest
    with mock.patch.object(evaluation, "_evaluate_rest", recording):
        for num_samples in (2, 2, 3):
            tables["evaluation"]["sets"]["few"]["samples_per_prompt"] = num_samples
            evaluation.evaluate(Config.model_validate(tables), out)
            times.append({file.name: file.stat().st_mtime_ns for file in out.glob("*.jsonl")})
    return times, reads


def test_separate_evaluation_scores_as_the_run_and_keeps_finished_sets(
    task: Path, evaluated: Path, tmp_path: Path
) -> None:
    tables = tables_of(task, "nowhere")
    tables["data"]["prompts"] = "none.jsonl"
    (first, again, other), reads = run_ranks(evaluate_alone, 1, tmp_path, tables, tmp_path / "out")[0]
    unclassified = {key for key in reads if class_of(key) == "no" and not may_change(key)} - {
        "data.reward_values"
    }  # a set's are 0 and 1
    assert "data.max_prompt_tokens" in reads, "the recorder works"
    assert unclassified == set(), "read by an evaluation, but not recorded in kept results"
    assert first == again and first.keys() == {"held-out.jsonl", "few.jsonl"}
    assert other["held-out.jsonl"] == first["held-out.jsonl"] and other["few.jsonl"] > first["few.jsonl"]
    results = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert results["held-out"]["metrics"].items() <= evaluations(evaluated)[0].items()
    assert lines_of(tmp_path / "out" / "held-out.jsonl") == lines_of(
        evaluated / "evaluations" / "held-out_000000.jsonl"
    )
    assert len(lines_of(tmp_path / "out" / "few.jsonl")) == 9
    assert not (task / "nowhere").exists(), "the run folder is not touched"


OWN_REWARD = """
import graders.limits
from pathlib import Path

def score(prompt, response, finish_reason):
    return graders.limits.VALUE + float(Path(__file__).with_name("bonus.txt").read_text())
"""


def scores_after_changes(runtime: Runtime, tables: dict[str, Any], out: Path) -> list[tuple[float, int]]:
    """Score of "few" and mtime of its responses file: first, again, and after each kind of change."""
    found = list[tuple[float, int]]()

    def score() -> None:
        results = evaluation.evaluate(Config.model_validate(tables), out)
        found.append((results["few"]["metrics"]["eval/few/avg_at_2"], (out / "few.jsonl").stat().st_mtime_ns))

    for name, content in ((None, ""), (None, ""), ("graders/limits.py", "VALUE = 0.5"), ("bonus.txt", "0.125")):
        if name is not None:
            Path(name).write_text(content)
        score()
    with mock.patch.object(evaluation, "__version__", "0.0.0"):
        score()
    return found


def test_results_are_kept_until_a_file_of_the_reward_changes(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A helper module, a table that is read with the first response, or this package."""
    (tmp_path / "graders").mkdir()
    (tmp_path / "graders/limits.py").write_text("VALUE = 0")
    (tmp_path / "own.py").write_text(OWN_REWARD)
    (tmp_path / "bonus.txt").write_text("0.25")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    tables = tables_of(task, "kept")
    tables["evaluation"]["sets"]["few"]["reward"] = "own:score"
    ((first, again, *others),) = run_ranks(
        scores_after_changes, 1, tmp_path, tables, tmp_path / "out", is_fresh=True
    )
    assert first[0] == 0.25 and again == first
    assert [score for score, _ in others] == [0.75, 0.625, 0.625]
    assert len({time for _, time in (first, *others)}) == 4


def drop_too_many(runtime: Runtime, tables: dict[str, Any], out: Path | None) -> str:
    """Evaluate with a reward that fails, alone if there is a folder for it, else in a run; the message."""
    from megatron_dppo.config.schema import Config
    from megatron_dppo.evaluate import evaluate

    with pytest.raises(RolloutError) as error:
        train(runtime, tables) if out is None else evaluate(Config.model_validate(tables), out)
    return str(error.value)


def test_too_many_dropped_responses_end_an_evaluation(task: Path, tmp_path: Path) -> None:
    tables = tables_of(task, "dropping", tracking={"alarms": "off"})
    tables["evaluation"]["sets"]["few"]["reward"] = "tests.faults.rewards:raises_for_most"
    (alone,), (in_a_run,) = (
        run_ranks(drop_too_many, 1, tmp_path, tables, out) for out in (tmp_path / "out", None)
    )
    assert alone == in_a_run and "evaluation.sets.few: found " in alone and "'injected'" in alone
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()).keys() == {"held-out"}
    dropped = [row["dropped"] for row in lines_of(tmp_path / "out" / "few.jsonl")]
    assert dropped.count("reward_failed") >= 2 and len(dropped) == 6


def test_a_folder_with_metrics_of_something_else_is_refused(tmp_path: Path) -> None:
    for content in ('{"reward/mean": 0.5}', "[]", "{"):
        (tmp_path / "metrics.json").write_text(content)
        with pytest.raises(ConfigError, match="which no evaluation wrote"):
            _keep_unchanged(tmp_path, {})
        assert (tmp_path / "metrics.json").read_text() == content


def test_the_command_evaluates_a_checkpoint_as_the_run_did(task: Path, evaluated: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(tomli_w.dumps(tables_of(task, "two")))
    command = ["-m", "megatron_dppo", "evaluate", config, "-o", tmp_path / "out"]
    checkpoint = evaluated / "checkpoints" / "step_00000004"
    done = python(*command, "--checkpoint", checkpoint, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    row = evaluations(evaluated)[2]
    results = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert {k: v for each in results.values() for k, v in each["metrics"].items()} == {
        name: value for name, value in row.items() if name.startswith("eval/")
    }
    for name in ("held-out", "few"):
        in_the_run = evaluated / "evaluations" / f"{name}_000002.jsonl"
        assert (tmp_path / "out" / f"{name}.jsonl").read_text() == in_the_run.read_text()
    assert f"avg_at_4{row['eval/held-out/avg_at_4']:>24.4f}" in done.stdout
    assert "pass_at_2" in done.stdout


def test_a_run_learns_the_same_bits_without_evaluation(task: Path, evaluated: Path) -> None:
    rows, others = (lines_of(run / "metrics.jsonl") for run in (evaluated, task / "without"))
    assert without_clocks([row for row in rows if row["kind"] != "evaluation"]) == without_clocks(others)
    ends = (stored(run / "checkpoints" / "step_00000004") for run in (evaluated, task / "without"))
    assert_same(next(ends), next(ends))
