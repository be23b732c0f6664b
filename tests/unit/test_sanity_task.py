from pathlib import Path

import pytest
import torch

from megatron_dppo.data.prompts import sanity_task
from megatron_dppo.data.prompts.prompts import load_prompts
from megatron_dppo.data.prompts.sanity_task import (
    SLIP_PROBABILITY,
    TOKENS,
    VOCABULARY,
    Split,
    make_prompts,
    teacher_batch,
)
from megatron_dppo.rewards.text import arithmetic_reward
from megatron_dppo.types import Prompt
from tests.support.records import lines_of
from tests.support.refusals import refused

NUM_TRAIN, NUM_HELD_OUT = 8986, 1014


def text(tokens: torch.Tensor) -> str:
    return " ".join(TOKENS[int(token)] for token in tokens)


def teacher_passes(questions: torch.Tensor, responses: torch.Tensor) -> list[float]:
    answers = {row["prompt"]: row["answer"] for row in make_prompts(NUM_TRAIN, 0)}
    prompts = [Prompt(str(i), answers[text(q)], "test", text=text(q)) for i, q in enumerate(questions)]
    assert all(int(response[-1]) == VOCABULARY["<eos>"] for response in responses)
    return [
        arithmetic_reward(prompt, text(response[:-1]), "stop").value
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def test_the_vocabulary() -> None:
    assert len(TOKENS) == len(VOCABULARY) == 274
    numbered = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "=": 3, "#": 4, "0": 5, "9": 14, "+": 15, "-": 16, "*": 17}
    assert numbered.items() <= VOCABULARY.items()
    assert VOCABULARY["w0"] == 18 and VOCABULARY["w255"] == 273


def test_prompts_are_what_the_note_says() -> None:
    rows = {row["id"]: row for row in make_prompts(NUM_TRAIN, 0) + make_prompts(NUM_HELD_OUT, 0, "held_out")}
    assert rows["12*34"] == {"id": "12*34", "prompt": "<bos> 2 1 * 4 3 =", "answer": "408"}
    assert rows["0*7"]["prompt"] == "<bos> 0 0 * 7 0 =" and rows["0*7"]["answer"] == "0"
    assert len(rows) == 10_000


def test_held_out_problems_are_not_in_training_and_neither_are_their_twins() -> None:
    train = {row["id"] for row in make_prompts(NUM_TRAIN, 0)}
    for row in make_prompts(NUM_HELD_OUT, 0, "held_out"):
        a, b = row["id"].split("*")
        assert f"{a}*{b}" not in train and f"{b}*{a}" not in train


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_prompts_depend_on_the_seed_only(split: Split) -> None:
    assert make_prompts(50, 3, split) == make_prompts(50, 3, split)
    assert make_prompts(50, 3, split) == make_prompts(90, 3, split)[:50]
    assert make_prompts(50, 3, split) != make_prompts(50, 4, split)


def test_more_prompts_than_there_are() -> None:
    with refused("sanity task", "1015", "0 to 1014", "'held_out'"):
        make_prompts(NUM_HELD_OUT + 1, 0, "held_out")


def test_written_prompts_load(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    sanity_task.write_prompts(path, 20, seed=1)
    assert lines_of(path) == make_prompts(20, 1)
    prompts = load_prompts(path, "prompt", "answer")
    assert [p.text for p in prompts] == [row["prompt"] for row in make_prompts(20, 1)]


def test_a_teacher_that_never_slips_is_always_right() -> None:
    questions, responses = teacher_batch(400, torch.Generator().manual_seed(0), slip_probability=0.0)
    assert questions.shape == (400, sanity_task.PROMPT_LENGTH)
    assert responses.shape == (400, sanity_task.RESPONSE_LENGTH)
    assert teacher_passes(questions, responses) == [1.0] * 400


def test_the_teacher_of_12_times_34() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = (teacher_batch(4096, generator, slip_probability=0.0) for _ in range(20))
    found = [r for qs, rs in batches for q, r in zip(qs, rs, strict=True) if text(q) == "<bos> 2 1 * 4 3 ="]
    words = text(found[0]).split()
    assert all(words.pop(i).startswith("w") for i in (10, 5, 0))
    assert words == ["8", "4", "0", "+", "6", "3", "0", "+", "#", "8", "0", "4", "0", "<eos>"]


def test_slips_leave_the_expected_share_right() -> None:
    questions, responses = teacher_batch(4000, torch.Generator().manual_seed(0))
    # Ten digits must be right, and a slip draws the right digit one time in ten.
    expected = (1 - 0.9 * SLIP_PROBABILITY) ** 10
    passed = teacher_passes(questions, responses)
    assert abs(sum(passed) / len(passed) - expected) < 0.04


def test_filler_words_have_a_long_tail() -> None:
    _, responses = teacher_batch(8000, torch.Generator().manual_seed(0))
    words = responses[:, [0, 5, 10]] - VOCABULARY["w0"]
    assert words.min() >= 0 and words.max() < sanity_task.NUM_FILLER_WORDS
    counts = torch.bincount(words.flatten(), minlength=sanity_task.NUM_FILLER_WORDS)
    assert counts[0] / counts[255] > 30
    assert (counts > 0).all()


def test_teacher_batches_are_seeded_and_never_held_out() -> None:
    first, again = (teacher_batch(2000, torch.Generator().manual_seed(5)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    held_out = {row["prompt"] for row in make_prompts(NUM_HELD_OUT, 0, "held_out")}
    assert held_out.isdisjoint(map(text, first[0]))
