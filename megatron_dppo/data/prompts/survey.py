"""Surveys a complete prompt file: faulty rows, prompt lengths, unusual tokens and unusual answers."""

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

NUM_SHOWN = 10  # maximum number of faults that are described
NUM_TRIED = 32  # maximum number of answers of each kind that the reward is tried on
NUM_BARE = 20_000  # maximum number of bare answers kept; of a longer file every second, fourth, ... is kept

Progress = Callable[[Iterable[PromptRow | DataError]], Iterable[PromptRow | DataError]]
"""Yields the given rows unchanged, and shows the progress."""


@dataclass(frozen=True)
class Survey:
    """Statistics of a prompt file."""

    num_rows: int
    num_faulty: int  # rows that cannot be read or tokenised
    faults: tuple[str, ...]  # descriptions of the first NUM_SHOWN faulty rows
    num_too_long: int  # prompts of more than `max_prompt_tokens` tokens
    longest: int  # tokens of the longest prompt
    largest_id: int  # largest token id; -1 if no prompt was tokenised
    num_asking: Mapping[AnswerForm, int]  # prompts that ask for each answer form; other prompts name no form
    first: Prompt | None  # first prompt that can be read
    digest: str  # PromptsDigest of the prompts that can be read
    num_chats: int  # prompts of messages
    num_closed_thoughts: int  # prompts that end with </think>; 0 without a tokenizer
    oddities: Mapping[str, int]  # prompts by the unusual property of their tokens, see SpecialTokens
    unread_columns: tuple[str, ...]  # columns that some row has and that are not read
    num_answers: Mapping[AnswerKind, int]
    odd_answers: Mapping[AnswerKind, Sequence[PromptRow]]  # the first NUM_TRIED of each kind except bare
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
    """Read every row, and tokenise its prompt in the same way as a rollout.

    Args:
        path: A .jsonl or .parquet file.
        prompt_column: See `load_prompts`.
        answer_column: See `load_prompts`.
        tokenizer: The transformers tokenizer that training uses. With `None`, prompts are not tokenised.
        max_prompt_tokens: Length above which a prompt counts as too long.
        progress: Shows the progress over the rows.

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
    distance: int = 1  # every n-th bare answer is kept

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
        """Return the statistics of the rows so far."""
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
    """Return the row and the tokens of its prompt; without a tokenizer the tokens are empty."""
    if isinstance(row, DataError):
        raise row
    return row, () if tokenizer is None else whole_tokens(tokenizer, row.prompt)
