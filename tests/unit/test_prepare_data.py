"""`megatron-dppo prepare-data`, on small sets of every spelling: counts add up, faults are named."""

import bz2
import csv
import gzip
import importlib
import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megatron_dppo.cli import app
from megatron_dppo.data.prompts.final_answer import answer_kind, final_answer, last_boxed
from megatron_dppo.data.prompts.problems import language_of
from megatron_dppo.data.prompts.prompts import load_prompts
from megatron_dppo.data.prompts.templates import TEMPLATES
from megatron_dppo.errors import DataError
from tests.support.byte_tokenizers import qwen3_tokenizer, r1_tokenizer, save
from tests.support.math_problems import (
    LONG,
    PROBLEMS,
    aime_rows,
    math_rows,
    sanity_rows,
    slime_rows,
    verl_row,
    verl_rows,
    write_rows,
)

NO_DROPS = {
    "without a problem": 0,
    "without an answer": 0,
    "with contradictory answers": 0,
    "duplicates": 0,
    "that cannot be used": 0,
    "too long": 0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(qwen3_tokenizer(), tmp_path_factory.mktemp("model"))


def run(out: Path, name: str, source: Path | str, tokenizer: Path, *options: str) -> Result:
    arguments = [name, "--source", str(source), "--tokenizer", str(tokenizer), "--out", str(out)]
    template = () if "--template" in options else ("--template", "base")
    return CliRunner().invoke(app, ["prepare-data", *arguments, *template, *options])


def counts(out: Path) -> dict[str, Any]:
    return json.loads(out.with_name(f"{out.stem}.counts.json").read_text())


def test_dapo_with_duplicates_two_languages_and_a_long_prompt(tmp_path: Path, model: Path) -> None:
    source, out = write_rows(tmp_path / "dapo.parquet", verl_rows()), tmp_path / "data" / "dapo_math_17k.jsonl"
    options = ("--language", "en", "--max-prompt-tokens", "200")
    result = run(out, "dapo-math-17k", source, model, *options)
    assert result.exit_code == 0, result.output
    kept = [(text, answer) for text, answer in PROBLEMS if text != LONG and language_of(text) == "en"]
    prompts = load_prompts(out, "prompt", None)
    assert [(p.text, p.answer) for p in prompts] == [(TEMPLATES["base"](text), answer) for text, answer in kept]
    assert prompts[0].id == "dapo_math_17k/1"
    assert prompts[0].source == "dapo_math_17k"
    found = counts(out)
    dropped = {"duplicates": 20, "in another language": 2, "too long": 1}
    assert found["counts"] == NO_DROPS | dropped | {"read": 30, "written": 7}
    assert found["instructions_removed"] == 7
    assert found["schema"]["name"] == "verl"
    assert found["template"] == "base"
    assert "verl (prompt, reward_model.ground_truth)" in result.output
    for line in ("30  read", "20  duplicates", "7  written", f"sha256 {found['sha256']}"):
        assert line in result.output
    assert sorted(path.name for path in out.parent.iterdir()) == [out.stem + ".counts.json", out.name]


@pytest.mark.parametrize(
    ("name", "file", "rows", "schema"),
    [
        ("math", "math.jsonl", math_rows(), "problem and solution"),
        ("aime24", "aime.parquet", aime_rows(), "Problem and Answer"),
        ("aime25", "aime.jsonl", aime_rows() * 4, "Problem and Answer"),
        ("custom", "slime.jsonl", slime_rows(), "slime"),
        ("custom", "sanity.parquet", sanity_rows(), "problem and answer"),
    ],
)
def test_every_spelling(
    tmp_path: Path, model: Path, name: str, file: str, rows: list[dict[str, Any]], schema: str
) -> None:
    source, out = write_rows(tmp_path / file, rows), tmp_path / "out.jsonl"
    result = run(out, name, source, model, "--template", "thinking")
    assert result.exit_code == 0, result.output
    found = counts(out)
    assert found["schema"]["name"] == schema
    is_math = name == "math"
    assert found["counts"]["without an answer"] == int(is_math)
    assert found["counts"]["duplicates"] == (90 if name == "aime25" else 0)
    prompts = load_prompts(out, "prompt", None)
    assert all(prompt.messages is not None for prompt in prompts)
    expected = [str(n * n) for n in range(30)] if "aime" in name else [answer for _, answer in PROBLEMS]
    assert [prompt.answer for prompt in prompts] == expected


def test_prompts_as_they_are_and_a_limit(tmp_path: Path, model: Path) -> None:
    source = write_rows(tmp_path / "dapo.jsonl", verl_rows(2))
    for name in ("a", "b", "c"):
        seed = "1" if name == "c" else "0"
        options = ("--template", "none", "--limit", "4", "--seed", seed)
        assert run(tmp_path / f"{name}.jsonl", "dapo-math-17k", source, model, *options).exit_code == 0
    files = [(tmp_path / f"{name}.jsonl").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]
    rows = [json.loads(line) for line in files[0].splitlines()]
    assert len(rows) == 4
    assert {row["prompt"][0]["content"] for row in rows} <= {r["prompt"][0]["content"] for r in verl_rows(1)}
    assert counts(tmp_path / "a.jsonl")["counts"]["beyond the limit"] == 6
    assert counts(tmp_path / "a.jsonl")["instructions_removed"] == 0


def test_rows_that_lack_something_and_answers_that_contradict(tmp_path: Path, model: Path) -> None:
    rows = [
        verl_row("  What is\n$1 + 1$? ", "2", 0),
        verl_row("What is $1 + 1$?", " 2", 1),
        verl_row("What is $1 + 2$?", "3", 2),
        verl_row("What is $1 + 2$?", "4", 3),
        verl_row("What is $1 + 2$?", "3", 4),
        verl_row("What is $1 + 3$?", None, 5),
        verl_row("What is $1 + 4$?", " ", 6),
        {**verl_row("", "1", 7), "prompt": []},
    ]
    source, out = write_rows(tmp_path / "set.jsonl", rows), tmp_path / "out.jsonl"
    assert run(out, "custom", source, model).exit_code == 0
    dropped = {"without a problem": 1, "without an answer": 2, "with contradictory answers": 3, "duplicates": 1}
    found = counts(out)["counts"]
    assert found == NO_DROPS | dropped | {"read": 8, "written": 1}
    assert found["read"] - found["written"] == sum(dropped.values())


GSM8K = "She sold 48/2 = <<48/2=24>>24 clips in May.\n#### 24"


def test_the_final_answer_is_taken_out_of_a_text_that_marks_it(tmp_path: Path, model: Path) -> None:
    rows = [{"question": "a?", "answer": GSM8K}, {"question": "b?", "answer": "4"}]
    source, out = write_rows(tmp_path / "s.jsonl", rows), tmp_path / "out.jsonl"
    result = run(out, "custom", source, model)
    assert result.exit_code == 0, result.output
    assert [prompt.answer for prompt in load_prompts(out, "prompt", None)] == ["24", "4"]
    assert counts(out)["answers_taken_out_of_texts"] == 1
    assert "1  answers taken out of a text, the first, '24', out of " in result.output
    assert run(tmp_path / "kept.jsonl", "custom", source, model, "--answers", "as-is").exit_code == 0
    assert [prompt.answer for prompt in load_prompts(tmp_path / "kept.jsonl", "prompt", None)] == [GSM8K, "4"]


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        ("4", "bare"),
        (r"\frac{1}{2}", "bare"),
        ("(B) Paris", "bare"),
        ("x = 4", "bare"),
        ("5 m/s", "bare"),
        ("$\\begin{pmatrix} 1 \\\\ 2\n\\end{pmatrix}$", "bare"),
        ("no answer is possible", "bare"),
        ("4 cups", "with_words"),
        ("$12 dollars", "with_words"),
        ("3 + 4 = 7, so she has 7 clips.", "with_words"),
        ("the set of all real numbers", "bare"),
        ("#### Step 1\nAdd.\n#### Step 2\nSubtract.", "prose"),
        ("The answer is that we take all of the apples and divide them among the children.", "prose"),
        ("It holds for all n,\nby induction", "prose"),
        (r"an open \boxed{4", "bare"),
    ],
)
def test_the_kind_of_an_answer(cell: str, kind: str) -> None:
    assert answer_kind(cell) == kind


def test_answers_that_are_texts_are_refused_if_they_are_most(tmp_path: Path, model: Path) -> None:
    cells = ["By the book\nand by heart", "It is so\nand not so", "4 cups"]
    rows = [{"question": f"{place}?", "answer": cell} for place, cell in enumerate(cells)]
    source, out = write_rows(tmp_path / "s.jsonl", rows), tmp_path / "out.jsonl"
    result = run(out, "custom", source, model)
    assert result.exit_code == 2 and not out.exists()
    assert "found 2 of 3 answers that are texts without a marked final answer, such as" in result.output
    assert "--answer-column" in result.output and "--answers as-is" in result.output
    write_rows(source, [*rows, {"question": "c?", "answer": "5"}, {"question": "d?", "answer": "6"}])
    result = run(out, "custom", source, model)
    assert result.exit_code == 0
    assert "warning: 2 of 5 answers are texts without a marked final answer" in result.output
    assert "warning: 1 of 5 answers are a number with words, such as '4 cups' in row 3" in result.output
    assert len(counts(out)["doubts"]) == 2


@pytest.mark.parametrize("template", ["base", "dapo"])
def test_answers_that_math_can_match_as_text_only_are_a_warning(
    tmp_path: Path, model: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = ("5", "Tuesday", r"4\text{ to }9", "2, 3", "4 cups")
    rows = [{"question": f"{cell}?", "answer": cell} for cell in cells]
    source, out = write_rows(tmp_path / "s.jsonl", rows), tmp_path / "out.jsonl"
    result = run(out, "custom", source, model, *("--template", template))
    assert result.exit_code == 0, result.output
    found = "bare answers{} have no value that reward 'math' can parse, such as '4\\\\text{{ to }}9' in row 3"
    assert (f"warning: 1 of 4 {found.format('')}" in result.output) == (template == "base")
    monkeypatch.setattr("megatron_dppo.data.prompts.survey.NUM_BARE", 3)
    result = run(tmp_path / "sampled.jsonl", "custom", source, model, *("--template", template))
    sampled = f"warning: 1 of 2 {found.format(' that were sampled from 4')}"
    assert (sampled in result.output) == (template == "base")


BAD_ROWS: list[Any] = [
    {"question": "a?", "answer": 1.5},
    {"question": ["a?"], "answer": "1"},
    {"quest": "a?", "answer": "1"},
    {"question": "\ud800", "answer": "1"},
    {"question": "b?", "answer": "1", "images": ["b.png"]},
    {"question": [{"role": "user", "content": "c?"}, {"role": "assistant", "content": "1"}], "answer": "1"},
    {"question": [{"role": "system", "content": "s"}, {"role": "user", "content": "d?"}], "answer": "1"},
    {"question": [{"role": "user", "content": "e?"}], "answer": "1", "tools": [{"name": "add"}]},
]


def test_bad_rows_are_named_at_once_or_dropped_and_counted(tmp_path: Path, model: Path) -> None:
    source, out = tmp_path / "s.jsonl", tmp_path / "out.jsonl"
    lines = ["{torn", *map(json.dumps, BAD_ROWS), json.dumps({"question": "f?", "answer": "2"})]
    source.write_text("\n".join(lines) + "\n")
    result = run(out, "custom", source, model)
    assert result.exit_code == 2 and not out.exists()
    assert "found 9 of 10 rows that cannot be used; expected" in result.output
    assert "--bad-rows drop" in result.output and "data.prompt_column" not in result.output
    for number in range(2, 10):
        assert result.output.count(f"{source}, row {number}: ") == 1, number
    assert f"{source}, line 1: " in result.output and "name another --question-column" in result.output
    dropped = run(out, "custom", source, model, "--bad-rows", "drop")
    assert dropped.exit_code == 0, dropped.output
    assert counts(out)["counts"] == NO_DROPS | {"read": 10, "written": 1, "that cannot be used": 9}
    source.write_text("\n".join(lines[:-1] * 3) + "\n" + lines[-1])
    repeated = run(tmp_path / "b.jsonl", "custom", source, model).output
    assert " of 28 rows that cannot be used; expected" in repeated
    assert repeated.count(" (2 more of these rows)") == 6, "the others are found after duplicates are dropped"


def test_a_chat_with_an_instruction(tmp_path: Path, model: Path) -> None:
    system, asked = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "b?"}
    arguments = {"enable_thinking": False}
    rows = [
        {"question": "a?", "answer": "1"},
        {"question": [system, asked], "answer": "2", "chat_template_kwargs": arguments},
        {"question": json.dumps([asked]), "answer": "3"},
    ]
    source = write_rows(tmp_path / "s.jsonl", rows)
    boxed, around = r"End with \boxed{}.", "Solve: {problem} End with a line of the form Answer: x"
    cases = [
        ("plain", (), "PROBLEM", "note: not all prompts ask for an answer in one form"),
        ("below", ("--instruction", boxed), "PROBLEM\n" + boxed, 'data.reward = "math"'),
        ("around", ("--instruction", around), around.replace("{problem}", "PROBLEM"), 'data.reward = "dapo"'),
    ]
    for name, options, text, said in cases:
        out = tmp_path / f"{name}.jsonl"
        result = run(out, "custom", source, model, "--template", "chat", *options)
        assert result.exit_code == 0, result.output
        assert said in result.output
        first, second, third = load_prompts(out, "prompt", None)
        assert first.messages == ({"role": "user", "content": text.replace("PROBLEM", "a?")},)
        assert second.messages == (system, {"role": "user", "content": text.replace("PROBLEM", "b?")})
        assert second.messages is not None and third.messages == second.messages[1:]
        assert (first.template_arguments, second.template_arguments) == (None, arguments)
        assert "warning" not in result.output
    assert "are text, which the tokenizer's chat template never sees" in (
        run(tmp_path / "text.jsonl", "custom", source, model, "--template", "none").output
    )
    refused = run(tmp_path / "x.jsonl", "custom", source, model, "--template", "base", "--instruction", "x")
    assert refused.exit_code == 2 and "expected --template chat" in refused.output
    refused = run(
        tmp_path / "x.jsonl", "custom", source, save(r1_tokenizer(), tmp_path / "r1"), "--template", "chat"
    )
    assert refused.exit_code == 2 and "without a chat template" in refused.output


def test_no_reward_is_named_if_one_prompt_asks_for_no_form(tmp_path: Path, model: Path) -> None:
    rows = [{"question": rf"{n}? Use \boxed{{}}.", "answer": r"4\text{ to }9"} for n in range(3)]
    for name, last in (("all", r"4? \boxed"), ("some", "4?")):
        source = write_rows(tmp_path / f"{name}.jsonl", [*rows, {"question": last, "answer": "5"}])
        result = run(tmp_path / "out" / f"{name}.jsonl", "custom", source, model, "--template", "none")
        assert result.exit_code == 0, result.output
        assert ('data.reward = "math"' in result.output) == (name == "all")
        assert ("note: not all prompts ask for an answer in one form" in result.output) == (name == "some")
        assert ("Only the same text counts as right" in result.output) == (name == "all")


def test_dapos_instruction_gives_way_to_another_alone(tmp_path: Path, model: Path) -> None:
    source = write_rows(tmp_path / "dapo.jsonl", verl_rows(1))
    for name, options, num_removed in (("a", (), 0), ("b", ("--instruction", "Box it."), len(PROBLEMS))):
        out = tmp_path / f"{name}.jsonl"
        assert run(out, "dapo-math-17k", source, model, "--template", "chat", *options).exit_code == 0
        assert counts(out)["instructions_removed"] == num_removed
        messages = load_prompts(out, "prompt", None)[0].messages
        assert messages is not None
        (message,) = messages
        assert message["content"] == (
            PROBLEMS[0][0] + "\nBox it." if options else verl_rows(1)[0]["prompt"][0]["content"]
        )


def test_r1_distill(tmp_path: Path, model: Path) -> None:
    source, out = write_rows(tmp_path / "s.jsonl", sanity_rows()), tmp_path / "out.jsonl"
    r1 = save(r1_tokenizer(), tmp_path / "r1")
    assert run(out, "custom", source, r1, "--template", "r1_distill").exit_code == 0
    assert load_prompts(out, "prompt", None)[-1].text == TEMPLATES["r1_distill"](LONG)
    around = " Please reason step by step, and put your final answer within \\boxed{}.\n<think>\n"
    special = 3  # BOS, User, Assistant; all else is a token for each byte
    assert counts(out)["longest_prompt_tokens"] == special + len(LONG) + len(around)
    failed = run(tmp_path / "b.jsonl", "custom", source, model, "--template", "r1_distill")
    assert failed.exit_code == 2
    assert "DeepSeek-R1-Distill" in failed.output


def test_faults_are_named_and_nothing_is_written(tmp_path: Path, model: Path) -> None:
    sanity = write_rows(tmp_path / "sanity.jsonl", sanity_rows())
    aime = write_rows(tmp_path / "aime.jsonl", aime_rows()[:29])
    strange = write_rows(tmp_path / "strange.jsonl", [{"query": "1 + 1?", "gold": 2}])
    chat = write_rows(
        tmp_path / "chat.jsonl",
        [{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "label": "1"}],
    )
    fields = write_rows(
        tmp_path / "fields.jsonl", [{"q": {"text": "1?"}, "a": "1"}, {"q": {"txt": "2?"}, "a": "2"}]
    )
    by_field = ("--question-column", "q.text", "--answer-column", "a")
    empty = write_rows(tmp_path / "empty.jsonl", [])
    bad_type = write_rows(tmp_path / "type.jsonl", [{"problem": "p", "answer": 1.5}])
    r1 = save(r1_tokenizer(), tmp_path / "r1")
    cases: list[tuple[str, Path, Path, tuple[str, ...], str]] = [
        ("custom", tmp_path / "none.parquet", model, (), "found no such file"),
        ("custom", tmp_path / "sanity.json", model, (), "--source"),
        ("custom", strange, model, (), "--question-column"),
        ("custom", strange, model, ("--question-column", "query"), "both or none"),
        ("custom", strange, model, ("--question-column", "query", "--answer-column", "glod"), "glod"),
        ("custom", fields, model, by_field, "row 2: found columns ['q', 'a']; expected a column 'q.text'"),
        ("custom", empty, model, (), "found no rows"),
        ("custom", bad_type, model, (), "row 1: found float 1.5 as the answer"),
        ("custom", sanity, model, ("--language", "zh", "--max-prompt-tokens", "5"), "no prompt left (read: 10"),
        (
            "custom",
            sanity,
            model,
            ("--too-long", "refuse", "--max-prompt-tokens", "200"),
            "the longest in row 10",
        ),
        ("custom", sanity, model, ("--template", "thinkin"), "'thinking'"),
        ("custom", sanity, tmp_path / "no_model", (), "--tokenizer: found"),
        ("custom", sanity, tmp_path, (), "expected a tokenizer"),
        ("custom", sanity, r1, ("--template", "thinking"), "without a chat template"),
        ("custom", chat, r1, ("--template", "none"), "without a chat template"),
        ("custom", chat, model, (), "messages of system, user"),
        ("aime24", aime, model, (), "found 29 problems"),
        ("math-sanity", sanity, model, (), "expected the 1460 of math_sanity"),
    ]
    out = tmp_path / "out.jsonl"
    for name, source, tokenizer, options, message in cases:
        result = run(out, name, source, tokenizer, *options)
        assert result.exit_code == 2, (message, result.output)
        assert " ".join(message.split()) in " ".join(result.output.split()), (message, result.output)
        assert not out.exists()
    assert run(tmp_path / "out.csv", "custom", sanity, model).exit_code == 2
    assert run(out, "custom", sanity, model).exit_code == 0
    again = run(out, "custom", sanity, model)
    assert "out.jsonl, which exists" in again.output


def test_folders_and_names_on_the_hub(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets: Any = importlib.import_module("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(importlib.import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "published"
    folder.mkdir()
    write_rows(folder / "train.parquet", sanity_rows())
    table = datasets.Dataset.from_list(sanity_rows())
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": table}).save_to_disk(str(tmp_path / "several"))
    for source, options in ((folder, ()), (tmp_path / "one", ()), (tmp_path / "several", ("--split", "test"))):
        out = tmp_path / f"{source.name}.jsonl"
        result = run(out, "custom", source, model, *options)
        assert result.exit_code == 0, result.output
        assert [prompt.answer for prompt in load_prompts(out, "prompt", None)] == [a for _, a in PROBLEMS]
    for source, message in ((tmp_path / "several", "train"), ("nobody/nothing", "downloaded before")):
        failed = run(tmp_path / "failed.jsonl", "custom", source, model)
        assert failed.exit_code == 2
        assert message in failed.output


def test_a_converted_folder_has_the_tokenizer_too(tmp_path: Path, model: Path) -> None:
    converted, source = tmp_path / "converted", write_rows(tmp_path / "aime.jsonl", aime_rows())
    shutil.copytree(model, converted / "hf")
    (converted / "hf" / "config.json").write_text("{}")
    for folder, out in ((model, tmp_path / "a.jsonl"), (converted, tmp_path / "b.jsonl")):
        result = run(out, "aime24", source, folder)
        assert result.exit_code == 0, result.output
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text()


def test_the_last_box() -> None:
    assert last_boxed(r"\boxed{1} then $\boxed{\frac{1}{2}}$.") == r"\frac{1}{2}"
    assert last_boxed(r"\fbox {a\}b}") == r"a\}b"
    assert last_boxed(r"\boxed{1\\2\\}.") == r"1\\2\\"
    assert last_boxed(r"\boxed{1} then \boxed{2") == ""
    assert last_boxed("none") == ""
    assert last_boxed(r"\boxed{\boxed{5}}") == "5"
    assert last_boxed(r"not \boxed{1}: $\boxed{-2}$, \boxed{\frac{1}{2}} or \fbox{9}.") == r"-2, \frac{1}{2}, 9"
    assert last_boxed(r"\boxed{4} and \boxed{4}") == "4"


@pytest.mark.parametrize(
    ("cell", "answer"),
    [
        (GSM8K, "24"),
        ("#### 18\nThe answer is: 18", "18"),
        (r"Add both. So $x = \boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"$\boxed{7}$", "7"),
        ("The answer is 4", "4"),
        ("The final answer is $4.5$. I hope it is correct.", "4.5"),
        ("Final Answer: The final answer is $42$. I hope it is correct.", "42"),
        ("**Answer:** (B)", "(B)"),
        ("First this.\n<answer> 12 </answer>", "12"),
        ("so the correct answer is (A). It is obvious.", "(A)"),
        ("答案是 4。", "4"),
        ("The correct choice is D.", "D"),
        ("Therefore, the right option is (B)", "(B)"),
        ("Answer B is the correct one", "B"),
        ("so choice (A) is right", "A"),
        (r"either $\boxed{1}$ or $\boxed{6}$", "1, 6"),
        ("Option C is not correct", None),
        ("4 apples", None),
    ],
)
def test_texts_that_mark_a_final_answer(cell: str, answer: str | None) -> None:
    assert final_answer(cell) == answer


TABLE = [  # text of cells, which no reader may take for numbers, lines or missing values
    {"question": "What is 3 + 4,\nin three digits?", "answer": "007", "level": "1"},
    {"question": 'Say "true", or not.', "answer": "True", "level": "NA"},
    {"question": "Zwei\tund é?", "answer": "1.50", "level": ""},
]
OPENERS: dict[str, Any] = {"": open, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def write_table(path: Path, rows: list[dict[str, str]], begin: str = "") -> Path:
    opener = OPENERS[path.suffix if path.suffix in OPENERS else ""]
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        file.write(begin)
        if ".jsonl" in path.name:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            table = csv.DictWriter(file, [*rows[0]], delimiter="\t" if ".tsv" in path.name else ",")
            table.writeheader()
            table.writerows(rows)
    return path


def test_tables_and_compressed_files_are_the_same_prompts(tmp_path: Path, model: Path) -> None:
    """With a mark of the byte order, as spreadsheets write it."""
    names = [f"table{kind}{compression}" for kind in (".jsonl", ".csv", ".tsv") for compression in OPENERS]
    outs = [tmp_path / f"{number}.jsonl" for number in range(len(names))]
    for name, out in zip(names, outs, strict=True):
        source = write_table(tmp_path / name, TABLE, "" if ".jsonl" in name else "\ufeff")
        result = run(out, "custom", source, model, "--template", "chat")
        assert result.exit_code == 0, result.output
        assert out.read_text() == outs[0].read_text(), name
    assert [prompt.answer for prompt in load_prompts(outs[0], "prompt", "answer")] == ["007", "True", "1.50"]


def test_formats_that_check_points_to_prepare_data_are_read_or_refused(tmp_path: Path, model: Path) -> None:
    out, table = tmp_path / "out.jsonl", write_table(tmp_path / "table.csv", TABLE)
    with pytest.raises(DataError, match=r"prepare-data --source FILE converts \.csv"):
        load_prompts(table, "question", "answer")
    write_table(tmp_path / "cut.csv.gz", TABLE * 200)
    cut = (tmp_path / "cut.csv.gz").read_bytes()
    (tmp_path / "cut.csv.gz").write_bytes(cut[: len(cut) // 2])
    (tmp_path / "fake.tsv.xz").write_text("question\tanswer\n1?\t1\n")
    (tmp_path / "latin.csv").write_bytes("question,answer\né?,1\n".encode("latin-1"))
    (tmp_path / "short.csv").write_text("question,answer\n1 + 1?,2\n3, or 4?,4\n")
    (tmp_path / "long.csv").write_text("question,answer\n1 + 1?,2,\n3?,4,\n")
    (tmp_path / "quoted.csv").write_text('question,answer\n"1 + 1"?,2\n')
    (tmp_path / "twice.csv").write_text("answer,answer\n1,2\n")
    (tmp_path / "empty.csv").write_text("question,answer\n")
    (tmp_path / "book.xlsx").write_bytes(b"PK")
    (tmp_path / "a.jsonl.zst").write_bytes(b"1")
    for name, message in {
        "cut.csv.gz": "EOFError",
        "fake.tsv.xz": "LZMAError",
        "latin.csv": "expected a complete file of the kind that its name ends with, in UTF-8",
        "short.csv": "row 2: found 3 cells; expected 2, one per column",
        "long.csv": "row 1: found 3 cells; expected 2, one per column",
        "quoted.csv": "found Error: ',' expected after",
        "twice.csv": "expected different names",
        "empty.csv": "found no rows",
        "book.xlsx": "'.xlsx'; expected a file that ends in .jsonl, .csv or .tsv",
        "a.jsonl.zst": "'.zst'; expected a file that ends in .jsonl, .csv or .tsv",
    }.items():
        result = run(out, "custom", tmp_path / name, model)
        assert result.exit_code == 2 and message in " ".join(result.output.split()), (name, result.output)
        assert not out.exists()
