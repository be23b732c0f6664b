"""One-step word problems, and the reward for a response that ends with their answer.

    python examples/smollm2/word_problems.py --out runs/smollm2

It writes problems.jsonl and held_out.jsonl, without a common problem, for `megatron-dppo prepare-data custom`.
`data.reward = "examples.smollm2.word_problems:ends_with_answer"` scores.
"""

import argparse
import random
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_dppo.rewards import RewardResult
from megatron_dppo.runtime.files import write_jsonl
from megatron_dppo.types import FinishReason, Prompt

NUM_PROBLEMS, NUM_HELD_OUT = 500, 100
_NAMES = ("Tom", "Ana", "Ben", "Mia", "Leo", "Eva")
_THINGS = ("apples", "books", "coins", "pens", "cards")


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    out = parser.parse_args().out
    rows = [{"question": question, "answer": str(answer)} for question, answer in problems()]
    write_jsonl(out / "problems.jsonl", rows[:NUM_PROBLEMS])
    write_jsonl(out / "held_out.jsonl", rows[NUM_PROBLEMS:])


def problems() -> Iterator[tuple[str, int]]:
    """Yield different problems with their answers, in four wordings."""
    rng, seen = random.Random(0), set[str]()
    while len(seen) < NUM_PROBLEMS + NUM_HELD_OUT:
        question, answer = _problem(rng)
        if question not in seen:
            seen.add(question)
            yield question, answer


def _problem(rng: random.Random) -> tuple[str, int]:
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    a, b, c = rng.randint(2, 20), rng.randint(2, 20), rng.randint(2, 6)
    wordings = (
        (f"{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", a + b),
        (f"{name} has {a + b} {things} and gives away {b}. How many {things} are left?", a),
        (f"{name} has {c} bags with {a} {things} each. How many {things} are there in all?", c * a),
        (f"{name} has {a + b} {things}, loses {b} and finds {c}. How many {things} are there now?", a + c),
    )
    return rng.choice(wordings)


def ends_with_answer(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Return 1 for a complete response whose last number is the answer, and 0 for any other."""
    numbers = re.findall(r"\d+", response)
    is_right = finish_reason == "stop" and numbers[-1:] == [prompt.answer]
    return RewardResult(float(is_right), {"is_complete": float(finish_reason == "stop")})


if __name__ == "__main__":
    main()
