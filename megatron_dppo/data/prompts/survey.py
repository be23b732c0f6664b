"""Surveys a file of prompts to its end: faults of its rows, prompt lengths, and what is odd about its rows."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dppo.data.prompts.final_answer import AnswerKind, answer_kind
from megatron_dppo.data.prompts.prompts import PromptRow, PromptsDigest, read_prompts
from megatron_dppo.data.prompts.rendering import whole_tokens
from megatron_dppo.data.prompts.special_tokens import SpecialTokens
from megatron_dppo.data.prompts.templates import asked_form
from megatron_dppo.errors import DataError
from megatron_dppo.types import AnswerForm, Prompt

NUM_SHOWN = 10  # faults that are kept in words
NUM_TRIED = 32  # answers of each kind that are kept to be tried
NUM_BARE = 20_000  # bare answers that are kept at most; of more, every second, fourth, ...

Progress = Callable[[Iterable[PromptRow | DataError]], Iterable[PromptRow | DataError]]
"""Given the rows, yields the same, and shows how far it is."""


@dataclass(frozen=True)
class Survey:
    """Statistics of a file of prompts."""

    num_rows: int
    num_faulty: int  # rows that cannot be read, or whose prompt has no tokens
    faults: tuple[str, ...]  # the first NUM_SHOWN of them, in words
    num_too_long: int  # prompts of more than `max_prompt_tokens`
    longest: int  # tokens
    largest_id: int  # of a token; -1 where no prompt was made into tokens
    num_asking: Mapping[AnswerForm, int]  # prompts that ask for an answer in this form; the others do not say
    first: Prompt | None  # of the prompts that can be read
    digest: str  # see PromptsDigest; of the prompts that can be read
    num_chats: int  # prompts of messages
    num_closed_thoughts: int  # prompts that end with </think>; 0 without a tokenizer
    oddities: Mapping[str, int]  # prompts by what is odd about their tokens, see SpecialTokens
    unread_columns: tuple[str, ...]  # that some row has, and nothing reads
    num_answers: Mapping[AnswerKind, int]
    odd_answers: Mapping[AnswerKind, Sequence[PromptRow]]  # the first NUM_TRIED of each kind but bare
    bare_answers: Sequence[tuple[int, str]]  # row number and answer; see NUM_BARE

    @property
    def num_prompts(self) -> int:
        """Number of rows that can be read."""
        return self.num_rows - self.num_faulty


def survey(
    path: Path,
    prompt_column: str,
    answer_column: str | None,
    tokenizer: Any,
    max_prompt_tokens: int,
    progress: Progress = iter,
) -> Survey:
    """Read every row, and tokenise its prompt as a rollout does.

    Args:
        path: A .jsonl or .parquet file.
        prompt_column: See `load_prompts`.
        answer_column: See `load_prompts`.
        tokenizer: The transformers tokenizer that training uses; none: no prompt is made into tokens.
        max_prompt_tokens: Longer prompts are counted.
        progress: Shows how far it is.

    Raises:
        DataError: The file is missing, of another kind, empty, or lacks a column.
    """
    counted = _Counted(None if tokenizer is None else SpecialTokens(tokenizer), max_prompt_tokens)
    for row in progress(read_prompts(path, prompt_column, answer_column)):
        counted.num_rows += 1
        try:
            read, tokens = _with_tokens(row, tokenizer)
        except DataError as error:
            known = isinstance(row, DataError)
            counted.add_fault(str(error) if known else f"{path}, row {row.number}: {error}")
        else:
            counted.add(read, tokens)
    return counted.survey()


@dataclass
class _Counted:
    """Counts over the rows so far."""

    special: SpecialTokens | None
    max_prompt_tokens: int
    num_rows: int = 0
    num_faulty: int = 0
    faults: list[str] = field(default_factory=list[str])
    num_too_long: int = 0
    longest: int = 0
    largest_id: int = -1
    first: Prompt | None = None
    digest: PromptsDigest = field(default_factory=PromptsDigest)
    asking: Counter[AnswerForm] = field(default_factory=Counter[AnswerForm])
    prompts: Counter[str] = field(default_factory=Counter[str])
    oddities: Counter[str] = field(default_factory=Counter[str])
    unread: dict[str, None] = field(default_factory=dict[str, None])
    answers: Counter[AnswerKind] = field(default_factory=Counter[AnswerKind])
    odd_answers: dict[AnswerKind, list[PromptRow]] = field(default_factory=dict[AnswerKind, list[PromptRow]])
    bare_answers: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    distance: int = 1  # of the bare answers that are kept

    def add_fault(self, fault: str) -> None:
        """Count a row that cannot be used."""
        self.num_faulty += 1
        if len(self.faults) < NUM_SHOWN:
            self.faults.append(fault)

    def add(self, row: PromptRow, tokens: Sequence[int]) -> None:
        """Count a row and the tokens of its prompt."""
        self.first = self.first or row.prompt
        self.digest.add(row.prompt)
        self.num_too_long += len(tokens) > self.max_prompt_tokens
        self.longest = max(self.longest, len(tokens))
        self.largest_id = max(self.largest_id, *tokens, -1)
        self.unread.update(dict.fromkeys(row.unread))
        form = asked_form(row.prompt, row.template)
        if form is not None:
            self.asking[form] += 1
        is_chat = row.prompt.messages is not None
        self.prompts["chats"] += is_chat
        if self.special is not None:
            self.oddities.update(self.special.oddities(tokens, may_be_text=is_chat))
            self.prompts["closed thoughts"] += self.special.closes_thought(tokens)
        kind = answer_kind(row.prompt.answer)
        if kind == "bare" and self.answers[kind] % self.distance == 0:
            self.bare_answers.append((row.number, row.prompt.answer))
        if len(self.bare_answers) > NUM_BARE:
            self.bare_answers, self.distance = self.bare_answers[::2], 2 * self.distance
        self.answers[kind] += 1
        if kind != "bare" and len(kept := self.odd_answers.setdefault(kind, [])) < NUM_TRIED:
            kept.append(row)

    def survey(self) -> Survey:
        """Return the counts."""
        return Survey(
            num_rows=self.num_rows,
            num_faulty=self.num_faulty,
            faults=tuple(self.faults),
            num_too_long=self.num_too_long,
            longest=self.longest,
            largest_id=self.largest_id,
            num_asking=self.asking,
            first=self.first,
            digest=self.digest.hexdigest(),
            num_chats=self.prompts["chats"],
            num_closed_thoughts=self.prompts["closed thoughts"],
            oddities=self.oddities,
            unread_columns=tuple(self.unread),
            num_answers=self.answers,
            odd_answers=self.odd_answers,
            bare_answers=self.bare_answers,
        )


def _with_tokens(row: PromptRow | DataError, tokenizer: Any) -> tuple[PromptRow, tuple[int, ...]]:
    """Return the row, and the tokens of its prompt; none without a tokenizer."""
    if isinstance(row, DataError):
        raise row
    return row, () if tokenizer is None else whole_tokens(tokenizer, row.prompt)
