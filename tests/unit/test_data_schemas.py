"""Files of verl and slime are read as they are, and columns that are not there are named."""

import logging
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.data.prompts.prompts import load_prompts, read_prompts
from megatron_dppo.data.prompts.rows import PROBLEM_SCHEMAS, TRAINING_SCHEMAS, cell, detect
from megatron_dppo.errors import DataError
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
    assert cell({"a.b": 1, "a": {"b": 2}}, "a.b") == 1


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
