"""Show the score on held-out problems before and after training, and three problems with both answers.

    python examples/smollm2/show_answers.py RUN

It prints them, and writes them to answers.md in the run's folder.
"""

import argparse
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_dppo.rollout.evaluation import responses_file
from megatron_dppo.run_folder.reader import MetricsRow, read_run
from megatron_dppo.runtime.files import read_jsonl

SET, NUM_SHOWN = "held_out", 3
log = logging.getLogger("show_answers")


def main() -> None:
    """Write and print the lines."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    run = parser.parse_args().run
    text = "\n".join(lines(run))
    (run / "answers.md").write_text(f"{text}\n", encoding="utf-8")
    log.info("%s", text)


def lines(run: Path) -> Iterator[str]:
    """Yield the lines for the run's first and last evaluation."""
    evaluations = read_run(run).evaluations
    first, last = evaluations[0], evaluations[-1]
    for row, when in ((first, "before training"), (last, f"after {last.rollout} rollouts")):
        score, low, high = score_of(row)
        yield f"- {when}: {score:.1%} of the responses are right, 95 % interval {low:.1%} to {high:.1%}"
    pairs = zip(*(first_answers(run, row.rollout) for row in (first, last)), strict=True)
    for (_, (problem, answer, before)), (_, (_, _, after)) in list(pairs)[:NUM_SHOWN]:
        yield f"\n**{problem}** (answer: {answer})\n"
        yield f"- before: {before!r}"
        yield f"- after: {after!r}"


def score_of(row: MetricsRow) -> tuple[float, float, float]:
    """Return the mean reward of an evaluation, and its interval over problems."""
    (name,) = (key for key in row.values if key.startswith(f"eval/{SET}/avg_at_") and key[-1].isdigit())
    return row.values[name], row.values[f"{name}_low"], row.values[f"{name}_high"]


def first_answers(run: Path, rollout: int) -> Iterator[tuple[int, tuple[str, str, str]]]:
    """Yield the index, problem, answer and first response of each prompt."""
    row: Any
    for _, row in read_jsonl(responses_file(run / "evaluations", SET, rollout)):
        if row["sample"] == 0:
            problem = row["prompt"].rpartition("<|im_start|>user\n")[2].partition("\n")[0]
            yield row["index"], (problem, row["answer"], row["response"])


if __name__ == "__main__":
    main()
