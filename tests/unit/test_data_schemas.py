"""Files of verl and slime are read as they are, and columns that are not there are named."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dppo.cli import app
from megatron_dppo.data.prompts.prompts import load_prompts, read_prompts
from megatron_dppo.data.prompts.rows import PROBLEM_SCHEMAS, TRAINING_SCHEMAS, cell, detect
from megatron_dppo.errors import DataError
from megatron_dppo.rewards import RewardFault, RewardPool, RewardRequest, RewardResult
from tests.support.byte_tokenizers import qwen3_tokenizer, save
from tests.support.math_problems import (
    PROBLEMS,
    aime_rows,
    math_rows,
    sanity_rows,
    slime_rows,
    verl_rows,
    write_rows,
)
from tests.support.refusals import refused

ROWS: dict[str, list[dict[str, Any]]] = {
    "verl": verl_rows(1),
    "slime": slime_rows(),
    "megatron_dppo": [{"prompt": problem, "answer": answer} for problem, answer in PROBLEMS],
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("schema", ROWS)
def test_training_reads_them_as_they_are(
    tmp_path: Path, schema: str, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path / f"set.{suffix}", ROWS[schema])
    with caplog.at_level(logging.INFO):
        assert len(list(read_prompts(path, "prompt", None))) == len(PROBLEMS)  # as a survey does, before
        prompts = load_prompts(path, "prompt", None)
    assert caplog.text.count(f"{schema}'s columns") == 1
    assert [prompt.answer for prompt in prompts] == [answer for _, answer in PROBLEMS]
    asked = [prompt.text or str(prompt.messages) for prompt in prompts]
    problems = [problem for problem, _ in PROBLEMS]
    assert all(
        problem in text or repr(problem)[1:-1] in text for text, problem in zip(asked, problems, strict=True)
    )
    assert {prompt.source for prompt in prompts} == {"math_dapo" if schema == "verl" else "set"}
    assert [prompt.id for prompt in prompts] == [str(n) for n in range(1, 11)]


def test_a_field_of_a_column_can_be_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "set.parquet", verl_rows(1))
    by_name = load_prompts(path, "prompt", "reward_model.ground_truth")
    assert by_name == load_prompts(path, "prompt", None)
    assert load_prompts(path, "prompt", "reward_model.style")[0].answer == "rule-lighteval/MATH_v2"
    with refused(f"{path}, row 1", "'reward_model.truth'", error=DataError):
        load_prompts(path, "prompt", "reward_model.truth")
    assert cell("", {"a.b": 1, "a": {"b": 2}}, "a.b") == 1


def test_a_file_of_no_known_schema_lists_them(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "set.jsonl", [{"prompt": "p", "gold": "a"}])
    with pytest.raises(DataError, match=r"\['prompt', 'gold'\].*data\.answer_column"):
        load_prompts(path, "prompt", None)


def test_every_data_set_has_its_schema() -> None:
    sets = [ROWS["verl"], ROWS["slime"], sanity_rows(), aime_rows(), math_rows()]
    found = [detect(rows[0], PROBLEM_SCHEMAS) for rows in sets]
    names = ["verl", "slime", "problem and answer", "Problem and Answer", "problem and solution"]
    assert [schema.name for schema in found if schema] == names
    assert detect(sanity_rows()[0], TRAINING_SCHEMAS) is None
    assert detect({"problem": 1, "solution": 2, "answer": 3}, PROBLEM_SCHEMAS) == PROBLEM_SCHEMAS[3]


LABELS: list[Any] = [7, 0, -3, 0.5, True, False, ["a", 1], {"x": [1.5]}, "7", "0x1F", 10**20]


def types_seen(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, Any]:
    """A verl function that is right only if the label has the type and value of the row's number."""
    expected = LABELS[int(solution_str)]
    return {"score": float(type(ground_truth) is type(expected) and ground_truth == expected)}


def batch_types_seen(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> list[Any]:
    given = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [types_seen(*each) for each in given]


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("name", ["verl:{}:types_seen", "verl-batch:{}:batch_types_seen"])
def test_labels_keep_their_type_on_the_way_to_verls_functions(
    tmp_path: Path, name: str, is_prepared: bool
) -> None:
    """From the file, also through `prepare-data`, into a worker."""
    path = tmp_path / "labels.jsonl"
    rows = (
        {
            "prompt": [{"role": "user", "content": f"{n}?"}],
            "reward_model": {"ground_truth": label},
            "id": f"{n}",
        }
        for n, label in enumerate(LABELS)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if is_prepared:
        model, out = save(qwen3_tokenizer(), tmp_path / "model"), tmp_path / "out.jsonl"
        command = ["custom", "--source", str(path), "--tokenizer", str(model), "--out", str(out)]
        done = CliRunner().invoke(app, ["prepare-data", *command, "--template", "none", "--answers", "as-is"])
        assert done.exit_code == 0, done.output
        path = out
    prompts = load_prompts(path, "prompt", None)
    assert [prompt.answer for prompt in prompts[:5]] == ["7", "0", "-3", "0.5", "true"]
    with RewardPool(name.format(__name__), num_workers=1, timeout_s=300.0, memory_mb=0) as pool:
        results = [
            pool.score_together([RewardRequest(prompt, str(n), "stop")]) for n, prompt in enumerate(prompts)
        ]
    assert [result.value for (result,) in results if isinstance(result, RewardResult)] == [1.0] * len(LABELS)


@pytest.mark.parametrize("label", [True, ["1"], {"x": 1}])
def test_a_registered_reward_compares_texts_and_numbers_only(tmp_path: Path, label: Any) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1?", "answer": each}) + "\n" for each in (label, 0.5, 1)))
    prompts = load_prompts(path, "prompt", None)
    with RewardPool("math", num_workers=1, timeout_s=300.0, memory_mb=0) as pool:
        boxed = (f"\\boxed{{{prompt.answer}}}" for prompt in prompts)
        pairs = zip(prompts, boxed, strict=True)
        fault, *results = pool.score([RewardRequest(prompt, response, "stop") for prompt, response in pairs])
    assert isinstance(fault, RewardFault) and "expected a text or a number" in fault.message
    assert [result.value for result in results if isinstance(result, RewardResult)] == [1.0, 1.0]
