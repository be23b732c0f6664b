"""Surveys a file of prompts to its end: faults of its rows, prompt lengths, and the answer forms asked for."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.data.prompts.prompts import PromptRow, PromptsDigest, read_prompts
from megatron_dppo.data.prompts.templates import asked_form, prompt_tokens
from megatron_dppo.errors import DataError
from megatron_dppo.types import AnswerForm, Prompt

NUM_SHOWN = 10  # faults that are kept in words

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
    digest, faults, lengths = PromptsDigest(), list[str](), list[int]()
    num_rows, num_faulty, largest_id, first, asking = 0, 0, -1, None, Counter[AnswerForm]()
    for row in progress(read_prompts(path, prompt_column, answer_column)):
        num_rows += 1
        try:
            read, tokens = _with_tokens(row, tokenizer)
        except DataError as error:
            num_faulty += 1
            if len(faults) < NUM_SHOWN:
                faults.append(
                    str(error) if isinstance(row, DataError) else f"{path}, row {row.number}: {error}"
                )
            continue
        first = first or read.prompt
        digest.add(read.prompt)
        lengths.append(len(tokens))
        largest_id = max(largest_id, *tokens, -1)
        asking.update(_form(read))
    return Survey(
        num_rows=num_rows,
        num_faulty=num_faulty,
        faults=tuple(faults),
        num_too_long=sum(length > max_prompt_tokens for length in lengths),
        longest=max(lengths, default=0),
        largest_id=largest_id,
        num_asking=asking,
        first=first,
        digest=digest.hexdigest(),
    )


def _with_tokens(row: PromptRow | DataError, tokenizer: Any) -> tuple[PromptRow, tuple[int, ...]]:
    """Return the row, and the tokens of its prompt; none without a tokenizer."""
    if isinstance(row, DataError):
        raise row
    if tokenizer is None:
        return row, ()
    return row, prompt_tokens(tokenizer, row.prompt.text, row.prompt.messages)


def _form(row: PromptRow) -> Iterator[AnswerForm]:
    form = asked_form(row.prompt, row.template)
    if form is not None:
        yield form
