"""Reads the problems of a published data set, and deduplicates them."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_dppo.data.prompts.final_answer import final_answer, last_boxed
from megatron_dppo.data.prompts.messages import Asked, PromptCell, prompt_cell
from megatron_dppo.data.prompts.rows import (
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
from megatron_dppo.errors import DataError, Problem
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
    def asked(self) -> Asked:
        """The source's text or messages, unchanged."""
        return self.cell.asked

    @property
    def key(self) -> str:
        """The problem with normalised white space, and its tools. Equal problems have equal keys."""
        others = [self.cell.tools, self.cell.template_arguments]
        return " ".join(self.problem.split()) + (json.dumps(others, sort_keys=True) if any(others) else "")


@dataclass
class BadRows:
    """Rows that cannot be used. They are counted, and then dropped or reported in one error."""

    where: str
    drop: bool
    rows: FaultyRows = field(default_factory=FaultyRows)

    def refuse(self, num_read: int) -> None:
        """Raise an error if there are unusable rows and `drop` is not set.

        Raises:
            DataError: There are such rows. The error has their number and their causes.
        """
        if self.rows.num_rows and not self.drop:
            found = f"{self.rows.num_rows} of {num_read} rows that cannot be used{self.rows.shown}"
            action = "Correct these rows, or leave them out with --bad-rows drop."
            expected = "a prompt and an answer in each row"
            raise DataError(Problem(self.where, found, expected, action, self.rows.lines))


@dataclass(frozen=True)
class QuestionReader:
    """Reads the rows of one source."""

    where: str
    schema: Schema
    keeps_answers: bool  # whether cells are kept as they are, without extraction
    bad_rows: BadRows

    @property
    def named(self) -> frozenset[str]:
        """Columns of the problem and the answer."""
        return with_roots(self.schema.prompt, self.schema.answer)

    def read(self, rows: Iterable[tuple[int, Row | DataError]], counts: Counts) -> Iterator[Question]:
        """Yield the questions of the rows with a problem and an answer, and count the other rows."""
        counts.update({"read": 0, "without a problem": 0, "without an answer": 0})
        for number, row in rows:
            counts["read"] += 1
            try:
                if isinstance(row, DataError):
                    raise row
                question = self._question(number, row, counts)
            except DataError as error:
                self.bad_rows.rows.add(str(error))
            else:
                if question is not None:
                    yield question

    def _question(self, number: int, row: Row, counts: Counts) -> Question | None:
        here, schema = f"{self.where}, row {number}", self.schema
        asked, answer = (cell(here, row, name, OPTION_KEYS) for name in (schema.prompt, schema.answer))
        if answer is not None and not self.keeps_answers:
            text_of(here, "the answer, with --answers final", answer)
        reference, label = ("", None) if answer is None else answer_of(here, answer)
        taken = self._take_answer(reference)
        if asked is None or asked in ("", []):
            counts["without a problem"] += 1
        elif not taken.strip():
            counts["without an answer"] += 1
        else:
            read = prompt_cell(here, row, asked, self.named, OPTION_KEYS[0])
            text = text_asked(read.asked)
            problem = without_dapo_instruction(text)
            solution = reference if taken != reference and not schema.is_solution else ""
            return Question(number, read, problem.strip(), taken.strip(), problem != text, label, solution)
        return None

    def _take_answer(self, reference: str) -> str:
        """Return the final answer that a cell marks, or else the complete cell."""
        if self.schema.is_solution:
            return last_boxed(reference) or final_answer(reference) or ""
        return reference if self.keeps_answers else final_answer(reference) or reference


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


def problem_alone(where: str, question: Question) -> str:
    """Return the problem as plain text for a template.

    Raises:
        DataError: The prompt is not a single user message. The template would lose its other parts.
    """
    if not isinstance(question.asked, str) and [m["role"] for m in question.asked] != ["user"]:
        roles = ", ".join(message["role"] for message in question.asked)
        action = "Use --template none, which keeps such prompts unchanged, or chat, which adds an instruction."
        raise fault(f"{where}, row {question.row}", f"messages of {roles}", "one message of the user", action)
    return question.problem


def problem_in_chat(where: str, question: Question, instruction: str | None) -> tuple[Message, ...]:
    """Return the problem as a chat, with the instruction added to the last message.

    Raises:
        DataError: The last message is not a user message.
    """
    asked = question.asked
    if instruction is not None and (isinstance(asked, str) or question.had_instruction):
        asked = question.problem
    messages = (Message(role="user", content=asked),) if isinstance(asked, str) else asked
    if instruction is None:
        return messages
    last = messages[-1]
    if last["role"] != "user":
        found, action = f"a last message of {last['role']!r}", "Leave out --instruction."
        raise fault(f"{where}, row {question.row}", found, "one of 'user' for --instruction", action)
    return (*messages[:-1], {**last, "content": with_instruction(last["content"], instruction)})


def language_of(problem: str) -> Language:
    """Return `zh` for a problem with any Chinese character, else `en`."""
    return "zh" if _HAN.search(problem) else "en"
