"""Reads the problems of a published data set, and keeps each of them once."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Literal

from megatron_dppo.data.prompts.rows import fault, missing_column, prompt_of, text_of
from megatron_dppo.data.prompts.schemas import Schema, cell
from megatron_dppo.data.prompts.sources import Row
from megatron_dppo.data.prompts.templates import Asked, without_dapo_instruction

Language = Literal["en", "zh"]
Counts = MutableMapping[str, int]

_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is none


@dataclass(frozen=True)
class Question:
    """One problem and its answer."""

    row: int  # where it stands first in the source
    asked: Asked  # as the source has it
    problem: str  # without an instruction
    answer: str
    had_instruction: bool  # DAPO's, around the problem


def read_questions(
    where: str, rows: Iterable[tuple[int, Row]], schema: Schema, counts: Counts
) -> Iterator[Question]:
    """Yield the rows that have a problem and an answer; counts those that are read, and those that lack one.

    Raises:
        DataError: A row lacks a column, or a cell holds another type.
    """
    counts.update({"read": 0, "without a problem": 0, "without an answer": 0})
    for number, row in rows:
        counts["read"] += 1
        here = f"{where}, row {number}"
        try:
            question, answer = cell(row, schema.prompt), cell(row, schema.answer)
        except KeyError as error:
            raise missing_column(here, str(error.args[0]), list(row)) from None
        reference = "" if answer is None else text_of(here, "the answer", answer)
        reference = last_boxed(reference) if schema.is_solution else reference
        if question is None or question in ("", []):
            counts["without a problem"] += 1
        elif not reference.strip():
            counts["without an answer"] += 1
        else:
            asked = prompt_of(here, question)
            text = text_asked(asked)
            problem = without_dapo_instruction(text)
            yield Question(number, asked, problem.strip(), reference.strip(), problem != text)


def each_once(questions: Iterable[Question], counts: Counts) -> list[Question]:
    """Return the first row of each problem; problems with several different answers are dropped.

    Two problems are one where they differ in white space only.
    """
    first: dict[str, Question] = {}
    times, contradictory = Counter[str](), set[str]()
    for question in questions:
        key = " ".join(question.problem.split())
        times[key] += 1
        if first.setdefault(key, question).answer != question.answer:
            contradictory.add(key)
    counts["with contradictory answers"] = sum(times[key] for key in contradictory)
    counts["duplicates"] = sum(times[key] - 1 for key in times if key not in contradictory)
    return [question for key, question in first.items() if key not in contradictory]


def text_asked(asked: Asked) -> str:
    """Return the text of a prompt; of messages, that of each, with its role where there are several."""
    if isinstance(asked, str):
        return asked
    if len(asked) == 1:
        return asked[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in asked)


def problem_alone(where: str, question: Question) -> str:
    """Return the problem as plain text, to be put into a template.

    Raises:
        DataError: The prompt is a chat of several messages, or not the user's: its other parts would be lost.
    """
    if not isinstance(question.asked, str) and [m["role"] for m in question.asked] != ["user"]:
        roles = ", ".join(message["role"] for message in question.asked)
        action = "Use --template none, which keeps such prompts as they are."
        raise fault(f"{where}, row {question.row}", f"messages of {roles}", "one message of the user", action)
    return question.problem


def language_of(problem: str) -> Language:
    """Return `zh` for a problem with any Chinese character, `en` for all others."""
    return "zh" if _HAN.search(problem) else "en"


def last_boxed(solution: str) -> str:
    r"""Return the content of the last \boxed{} or \fbox{} of a solution; empty where none is whole."""
    boxes = list(_BOX.finditer(solution))
    if not boxes:
        return ""
    begin, depth = boxes[-1].end(), 1
    for piece in _BRACE.finditer(solution, begin):
        depth += (piece.group() == "{") - (piece.group() == "}")
        if depth == 0:
            return solution[begin : piece.start()]
    return ""
