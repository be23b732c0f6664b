"""Data sets of every spelling that is read, written for these tests: ten problems, two Chinese, one long."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.runtime.files import write_jsonl

LONG = "Add these numbers: " + " ".join(str(n) for n in range(1, 61)) + "."
PROBLEMS: tuple[tuple[str, str], ...] = (
    ("What is $3 + 4$?", "7"),
    ("Find $x$ with $2x = 18$.", "9"),
    ("小明有三个苹果，又买了五个，一共有几个？", "8"),
    ("How many primes are less than $10$?", "4"),
    ("求 $2^{5}$ 的值。", "32"),
    ("A square has side $5$. What is its area?", "25"),
    ("What is half of $13$?", r"\frac{13}{2}"),
    ("Simplify $\\sqrt{50}$.", r"5\sqrt{2}"),
    ("What is the remainder when $100$ is divided by $7$?", "2"),
    (LONG, "1830"),
)
DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def verl_row(problem: str, answer: object, index: int) -> dict[str, Any]:
    """As DAPO-Math-17k's parquet has it."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": DAPO_BEFORE + problem + DAPO_AFTER, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"uuid-{index}"},
    }


def verl_rows(times: int = 3) -> list[dict[str, Any]]:
    """Each problem several times, as DAPO-Math-17k has it a hundred times."""
    numbered = list(enumerate(PROBLEMS)) * times
    return [verl_row(problem, answer, index) for index, (problem, answer) in numbered]


def slime_rows() -> list[dict[str, Any]]:
    """A chat and a label."""
    chats = ([{"role": "user", "content": problem}] for problem, _ in PROBLEMS)
    return [{"prompt": chat, "label": answer} for chat, (_, answer) in zip(chats, PROBLEMS, strict=True)]


def sanity_rows() -> list[dict[str, Any]]:
    """Rows as in the sanity set: a problem and its answer."""
    return [{"problem": problem, "answer": answer} for problem, answer in PROBLEMS]


def math_rows() -> list[dict[str, Any]]:
    """Rows as in MATH: a solution that boxes an interim result first, and the answer at its end."""
    text = "First $\\boxed{{0}}$ looks right, but the answer is $\\boxed{{{}}}$."
    rows = [{"problem": p, "level": "Level 1", "solution": text.format(a)} for p, a in PROBLEMS]
    return [*rows, {"problem": "Prove it.", "level": "Level 5", "solution": "Left to the reader."}]


def aime_rows() -> list[dict[str, Any]]:
    """Thirty problems with integer answers, in columns with capital letters as some copies have them."""
    return [{"ID": f"{n}", "Problem": f"How much is ${n}$ times ${n}$?", "Answer": n * n} for n in range(30)]


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """The rows as a .parquet file."""
    pyarrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write the rows in the format of the file's suffix."""
    if path.suffix == ".parquet":
        return write_parquet(path, rows)
    write_jsonl(path, rows)
    return path
