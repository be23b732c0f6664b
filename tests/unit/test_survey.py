"""A file of prompts as a run would meet it: rows that fail, lengths in tokens, and what prompts ask for."""

import hashlib
import json
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.data.prompts.prompts import PromptsDigest, load_prompts
from megatron_dppo.data.prompts.survey import Survey, survey
from megatron_dppo.data.prompts.templates import TEMPLATES, asked_form, prompt_tokens
from megatron_dppo.errors import DataError
from megatron_dppo.types import Prompt
from tests.support.byte_tokenizers import byte_tokenizer, qwen3_tokenizer


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, tokenizer: Any = None, longest: int = 8) -> Survey:
    return survey(path, "prompt", "answer", tokenizer or byte_tokenizer(()), longest)


def test_rows_are_counted_and_prompts_measured_as_a_rollout_measures_them(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1 + 1?"}]
    file = write(
        tmp_path / "p.jsonl",
        {"prompt": "1 + 1 =", "answer": "2"},
        {"prompt": "1 + 1 + 1 =", "answer": "3"},
        {"prompt": chat, "answer": "2"},
    )
    found = read(file, qwen3_tokenizer(), longest=8)
    lengths = [
        len(prompt_tokens(qwen3_tokenizer(), p.text, p.messages))
        for p in load_prompts(file, "prompt", "answer")
    ]
    assert (found.num_rows, found.num_prompts, found.num_faulty) == (3, 3, 0)
    assert found.longest == max(lengths) and found.num_too_long == sum(length > 8 for length in lengths) == 2
    assert found.first == Prompt("1", "2", "p", text="1 + 1 =")
    digest = PromptsDigest()
    for prompt in load_prompts(file, "prompt", "answer"):
        digest.add(prompt)
    assert found.digest == digest.hexdigest(), "what a checkpoint keeps of the prompts"


def test_prompts_without_tools_keep_the_digest_that_older_checkpoints_have() -> None:
    fields = {"id": "1", "answer": "2", "source": "p", "text": "1 + 1 =", "messages": None}
    digest = PromptsDigest()
    digest.add(Prompt("1", "2", "p", text="1 + 1 ="))
    expected = hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16)
    assert digest.hexdigest() == expected.hexdigest()
    digest.add(Prompt("2", "2", "p", None, ({"role": "user", "content": "1"},), ({"name": "add"},), {"a": 1}))
    assert digest.hexdigest() != expected.hexdigest()


def test_every_fault_is_counted_and_the_first_of_each_cause_is_named_by_its_row(tmp_path: Path) -> None:
    good, torn, missing = {"prompt": "1 =", "answer": "1"}, '{"prompt"\n', {"prompt": "1 ="}
    lone, chat = (
        {"prompt": "\ud800", "answer": "1"},
        {"prompt": [{"role": "user", "content": "1"}], "answer": "1"},
    )
    rows = [good, torn, missing, lone, chat, *repeat(missing, 20), good]
    found = read(write(tmp_path / "p.jsonl", *rows))
    assert (found.num_rows, found.num_faulty, found.num_prompts) == (26, 24, 2)
    lines = found.faulty.lines.splitlines()
    for line, start in zip(lines, ["line 2", "row 3", "row 4", "row 5"], strict=True):
        assert line.startswith(f"  {tmp_path / 'p.jsonl'}, {start}: ")
    assert lines[1].endswith(" (20 more of these rows)") and not found.faulty.shown
    assert "expected a prompt that it encodes" in lines[2]
    assert "without a chat template" in lines[3]


def test_the_first_fault_stops_loading(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", {"prompt": "1 =", "answer": "1"}, {"prompt": "1 ="}, {"answer": "1"})
    with pytest.raises(DataError, match="row 2") as raised:
        load_prompts(file, "prompt", "answer")
    assert "row 3" not in str(raised.value)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("is_named", [True, False])
def test_a_template_is_known_by_its_name_and_by_its_words(
    tmp_path: Path, template: str, is_named: bool
) -> None:
    asked = TEMPLATES[template]("What is 1 + 1?")
    row = {"prompt": asked, "answer": "2"} | ({"template": template} if is_named else {})
    assert read(write(tmp_path / "p.jsonl", row), qwen3_tokenizer()).num_asking == {
        TEMPLATES[template].asks_for: 1
    }


@pytest.mark.parametrize("text", ["What is 1 + 1? Answer:", "Give the answer.", "box it"])
def test_prompts_without_a_requested_form_have_none(text: str) -> None:
    assert asked_form(Prompt("1", "2", "p", text=text), None) is None
    assert asked_form(Prompt("1", "2", "p", text=text), "mine") is None


def test_words_do_not_overrule_a_name() -> None:
    assert asked_form(Prompt("1", "2", "p", text=r"\boxed"), "dapo") == "answer_line"


def test_rows_stream(tmp_path: Path) -> None:
    """Progress sees each row as it is read."""
    seen: list[int] = []

    def counting(rows: Any) -> Any:
        return (seen.append(n) or row for n, row in enumerate(rows))

    rows = chain([{"prompt": "1", "answer": "1"}], ({"prompt": "", "answer": "1"} for _ in range(3)))
    survey(write(tmp_path / "p.jsonl", *rows), "prompt", None, None, 8, counting)
    assert seen == [0, 1, 2, 3]
