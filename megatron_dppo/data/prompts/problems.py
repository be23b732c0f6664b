"""Reads the problems of a published data set, and deduplicates them."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_dppo.data.prompts.final_answer import final_answer, last_boxed
from megatron_dppo.data.prompts.messages import Asked, PromptCell, prompt_cell
from megatron_dppo.data.prompts.rows import (
    DataSource,
    Row,
    Schema,
    answer_of,
    cell,
    fault,
    text_of,
    with_roots,
)
from megatron_dppo.data.prompts.survey import FaultyRows
from megatron_dppo.data.prompts.templates import with_instruction, without_dapo_instruction
from megatron_dppo.errors import DataError
from megatron_dppo.types import Message

Language = Literal["en", "zh"]
Counts = MutableMapping[str, int]
OPTION_KEYS = ("--question-column", "--answer-column")
"""Command-line options that name the prompt and answer columns."""

_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")


@dataclass(frozen=True)
class Question:
    """One problem and its answer."""

    row: int  # number of the problem's first row in the source
    cell: PromptCell  # the source's prompt, unchanged
    problem: str  # text without an instruction
    answer: str
    had_instruction: bool  # whether DAPO's instruction was around the problem
    label: Any = None  # the answer's JSON value, if its cell is no text
    had_solution: str = ""  # the cell's text, if `answer` was extracted from it

    @property
    def key(self) -> str:
        """The problem with normalised white space, and its tools. Equal problems have equal keys."""
        others = [self.cell.tools, self.cell.template_arguments]
        return " ".join(self.problem.split()) + (json.dumps(others, sort_keys=True) if any(others) else "")


def read_questions(
    source: DataSource, schema: Schema, keeps_answers: bool, counts: Counts, bad_rows: FaultyRows
) -> Iterator[Question]:
    """Yield the questions of the rows with a problem and an answer, and count the other rows.

    Args:
        source: Data set to read.
        schema: Columns of the problem and the answer.
        keeps_answers: Whether answers are kept as they are, without extraction.
        counts: Numbers of rows by outcome, which are set here.
        bad_rows: Collection of rows that cannot be used.
    """
    counts.update({"read": 0, "without a problem": 0, "without an answer": 0})
    for number, row in source.rows:
        counts["read"] += 1
        try:
            if isinstance(row, DataError):
                raise row
            question = _question(f"{source.name}, row {number}", number, row, schema, keeps_answers)
        except DataError as error:
            bad_rows.add(str(error))
            continue
        if isinstance(question, Question):
            yield question
        else:
            counts[question] += 1


def _question(where: str, number: int, row: Row, schema: Schema, keeps_answers: bool) -> Question | str:
    """Return the question of a row, or the count of rows without one that the row belongs to."""
    asked, answer = (cell(where, row, name, OPTION_KEYS) for name in (schema.prompt, schema.answer))
    if answer is not None and not keeps_answers:
        text_of(where, "the answer, with --answers final", answer)
    reference, label = ("", None) if answer is None else answer_of(where, answer)
    if schema.is_solution:
        taken = last_boxed(reference) or final_answer(reference) or ""
    else:
        taken = reference if keeps_answers else final_answer(reference) or reference
    if asked is None or asked in ("", []):
        return "without a problem"
    if not taken.strip():
        return "without an answer"
    read = prompt_cell(where, row, asked, with_roots(schema.prompt, schema.answer), OPTION_KEYS[0])
    text = text_asked(read.asked)
    problem = without_dapo_instruction(text)
    solution = reference if taken != reference and not schema.is_solution else ""
    return Question(number, read, problem.strip(), taken.strip(), problem != text, label, solution)


def each_once(questions: Iterable[Question], counts: Counts) -> list[Question]:
    """Return the first row of each problem, and drop problems with several different answers.

    Problems that differ only in white space count as one problem.
    """
    first: dict[str, Question] = {}
    times, contradictory = Counter[str](), set[str]()
    for question in questions:
        key = question.key
        times[key] += 1
        if first.setdefault(key, question).answer != question.answer:
            contradictory.add(key)
    counts["with contradictory answers"] = sum(times[key] for key in contradictory)
    counts["duplicates"] = sum(times[key] - 1 for key in times if key not in contradictory)
    return [question for key, question in first.items() if key not in contradictory]


def text_asked(asked: Asked) -> str:
    """Return the text of a prompt. Several messages become one line each, with their roles."""
    if isinstance(asked, str):
        return asked
    if len(asked) == 1:
        return asked[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in asked)


def problem_alone(question: Question) -> str:
    """Return the problem as plain text for a template, which would lose all but one message of the user."""
    asked = question.cell.asked
    if not isinstance(asked, str) and [message["role"] for message in asked] != ["user"]:
        roles = ", ".join(message["role"] for message in asked)
        action = "Use --template none, which keeps such prompts unchanged, or chat, which adds an instruction."
        raise fault("the prompt", f"messages of {roles}", "one message of the user", action)
    return question.problem


def problem_in_chat(question: Question, instruction: str | None) -> tuple[Message, ...]:
    """Return the problem as a chat, with the instruction added to the last message."""
    asked = question.cell.asked
    if instruction is not None and (isinstance(asked, str) or question.had_instruction):
        asked = question.problem
    messages = (Message(role="user", content=asked),) if isinstance(asked, str) else asked
    if instruction is None:
        return messages
    last = messages[-1]
    if last["role"] != "user":
        found, action = f"a last message of {last['role']!r}", "Leave out --instruction."
        raise fault("the prompt", found, "one of 'user' for --instruction", action)
    return (*messages[:-1], {**last, "content": with_instruction(last["content"], instruction)})


def language_of(problem: str) -> Language:
    """Return `zh` for a problem with any Chinese character, else `en`."""
    return "zh" if _HAN.search(problem) else "en"
