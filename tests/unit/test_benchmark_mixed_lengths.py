"""The teacher and the prompts of the benchmark with responses of mixed length."""

from pathlib import Path

import torch

from megatron_dppo.data.prompts import sanity_task
from tests.support.records import lines_of
from tools.benchmarks.mixed_lengths import IGNORED, LONGEST, LONGEST_PROMPT, teacher_batch, write_prompts


def test_most_responses_are_short_and_some_are_long() -> None:
    tokens, labels = teacher_batch(400, torch.Generator().manual_seed(0))

    lengths = (labels != IGNORED).sum(1)
    assert torch.equal(labels[labels != IGNORED], tokens[labels != IGNORED])
    assert lengths.min() == sanity_task.RESPONSE_LENGTH
    assert 0.9 * LONGEST < lengths.max() <= LONGEST
    assert 0.15 < (lengths > sanity_task.RESPONSE_LENGTH).float().mean() < 0.35


def test_the_teacher_counts_down_from_the_word_that_a_prompt_names() -> None:
    tokens, labels = teacher_batch(400, torch.Generator().manual_seed(0))

    row, label = next(pair for pair in zip(tokens, labels, strict=True) if (pair[1] != IGNORED).sum() > 30)
    words = [sanity_task.TOKENS[token] for token in row[label != IGNORED].tolist()]
    named = int(sanity_task.TOKENS[row[1]].removeprefix("w"))
    assert words[: named + 1] == [*(f"w{word}" for word in range(named - 1, -1, -1)), "-"]
    assert len(words) == named + 1 + sanity_task.RESPONSE_LENGTH


def test_a_quarter_of_the_prompts_name_a_word(tmp_path: Path) -> None:
    sanity_task.write_prompts(tmp_path / "start.jsonl", 400, 0)
    write_prompts(tmp_path / "start.jsonl", tmp_path / "mixed.jsonl")

    rows = lines_of(tmp_path / "mixed.jsonl")
    named = [row["prompt"].split()[1] for row in rows if row["prompt"].split()[1].startswith("w")]
    assert 60 < len(named) < 140
    assert all(len(row["prompt"].split()) <= LONGEST_PROMPT for row in rows)
