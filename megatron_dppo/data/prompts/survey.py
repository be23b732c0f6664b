"""Surveys a complete prompt file: faulty rows, prompt lengths, unusual tokens and unusual answers.

Unusual are special tokens that are doubled in a prompt or that end it, found from its token ids.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from megatron_dppo.data.prompts.final_answer import AnswerKind, answer_kind
from megatron_dppo.data.prompts.prompts import PromptRow, PromptsDigest, read_prompts
from megatron_dppo.data.prompts.templates import asked_form, whole_tokens
from megatron_dppo.errors import DataError
from megatron_dppo.types import AnswerForm, Prompt

NUM_SHOWN = 10  # maximum number of causes that are described
NUM_TRIED = 32  # maximum number of rows of each kind that the reward is tried on
NUM_BARE = 20_000  # maximum number of bare answers kept; of a longer file every second, fourth, ... is kept

_VARYING = re.compile(r"""\bfound .{60}\.\.\.|(?<!\w)'[^']*'|(?<!\w)"[^"]*"|\d+""", re.DOTALL)
_LAST = 16  # number of tokens at the end of a prompt that are decoded

Progress = Callable[[Iterable[PromptRow | DataError]], Iterable[PromptRow | DataError]]
"""Yields the given rows unchanged, and shows the progress."""


class SpecialTokens:
    """The special tokens of one tokenizer, and the tokens that it adds to a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer) - {tokenizer.unk_token_id}

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer adds before and after a text."""
        plain = cast(list[int], self._tokenizer.encode("1", add_special_tokens=False))
        whole = cast(list[int], self._tokenizer.encode("1", add_special_tokens=True))
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        return [], []

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset(self._added[1]) | {self._tokenizer.eos_token_id}

    def oddities(self, tokens: Sequence[int], *, may_be_text: bool) -> Iterator[str]:
        """Describe what is unusual about a prompt's tokens, as the rest of a sentence about prompts.

        Args:
            tokens: Token ids of the prompt.
            may_be_text: Whether plain text is right for a tokenizer with a chat template.
        """
        before, behind = self._added
        if before and list(tokens[: 2 * len(before)]) == 2 * before:
            both = self._decode(2 * before)
            yield f"begin with {both}: the text has {self._decode(before)}, and the tokenizer adds one more"
        else:
            pairs = pairwise(tokens)
            doubled = dict.fromkeys(
                first for first, second in pairs if first == second and first in self._special
            )
            yield from (f"have {self._decode([t] * 2)}, a special token twice in a row" for t in doubled)
        last = next((token for token in reversed(tokens[-_LAST:]) if self._decode([token]).strip()), None)
        if last is not None and last in self._ends:
            who = "the tokenizer adds it to every text" if last in behind else "the response follows an end"
            yield f"end with {self._decode([last])}: {who}"
        own = tokens[len(before) : len(tokens) - len(behind)]
        if not may_be_text and self._tokenizer.chat_template and self._special.isdisjoint(own):
            yield (
                "are text, which the tokenizer's chat template never sees. That is right for a base model; for "
                "a chat model make them with megatron-dppo prepare-data --template chat"
            )

    def closes_thought(self, tokens: Sequence[int]) -> bool:
        """Whether a prompt ends with `</think>`."""
        return self._decode(tokens[-_LAST:]).rstrip().endswith("</think>")

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


@dataclass
class FaultyRows:
    """Rows that cannot be used, by cause: the faults of one cause differ only in numbers and quoted text."""

    num_rows: int = 0
    first: dict[str, str] = field(default_factory=dict[str, str])
    """The first fault of each of the first NUM_SHOWN causes."""
    num_more: Counter[str] = field(default_factory=Counter[str])
    """Further rows with these causes."""

    def add(self, fault: str) -> None:
        """Count a row, whose fault begins with its place."""
        self.num_rows += 1
        cause = _VARYING.sub("", fault)
        if cause in self.first:
            self.num_more[cause] += 1
        elif len(self.first) < NUM_SHOWN:
            self.first[cause] = fault

    @property
    def shown(self) -> str:
        """What follows their number in a message: empty if each cause is among the lines."""
        is_whole = len(self.first) + self.num_more.total() == self.num_rows
        return "" if is_whole else f", the first {len(self.first)} causes below"

    @property
    def lines(self) -> str:
        """An indented line for each cause."""
        more = {cause: f" ({number} more of these rows)" for cause, number in self.num_more.items()}
        return "\n".join(f"  {fault}{more.get(cause, '')}" for cause, fault in self.first.items())


@dataclass
class Survey:
    """Statistics of the rows of a prompt file so far."""

    special: SpecialTokens | None  # of the tokenizer; None if prompts are not tokenised
    max_prompt_tokens: int
    expects_text: bool = False  # whether text is right for a tokenizer with a chat template
    num_rows: int = 0
    faulty: FaultyRows = field(default_factory=FaultyRows)  # rows that cannot be read or tokenised
    num_too_long: int = 0  # prompts of more than `max_prompt_tokens` tokens
    longest: int = 0  # tokens of the longest prompt
    largest_id: int = -1  # largest token id; -1 if no prompt was tokenised
    num_asking: Counter[AnswerForm] = field(default_factory=Counter[AnswerForm])
    """Prompts that ask for each form; other prompts name no form."""
    first: Prompt | None = None  # first prompt that can be read
    prompts_digest: PromptsDigest = field(default_factory=PromptsDigest)
    num_chats: int = 0  # prompts of messages
    num_closed_thoughts: int = 0  # prompts that end with </think>; 0 without a tokenizer
    oddities: Counter[str] = field(default_factory=Counter[str])
    """Number of prompts with each unusual property, see SpecialTokens."""
    unread_columns: dict[str, None] = field(default_factory=dict[str, None])
    """Columns that some row has and that are not read, in order."""
    num_answers: Counter[AnswerKind] = field(default_factory=Counter[AnswerKind])
    odd_answers: dict[AnswerKind, list[PromptRow]] = field(default_factory=dict[AnswerKind, list[PromptRow]])
    """The first NUM_TRIED of each kind except bare."""
    bare_answers: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Row number and answer; see NUM_BARE."""
    distance: int = 1  # every n-th is kept

    @property
    def num_faulty(self) -> int:
        """Number of rows that cannot be used."""
        return self.faulty.num_rows

    @property
    def num_prompts(self) -> int:
        """Number of rows that can be read."""
        return self.num_rows - self.num_faulty

    @property
    def digest(self) -> str:
        """Digest of the prompts that can be read."""
        return self.prompts_digest.hexdigest()

    def add(self, row: PromptRow, tokens: Sequence[int]) -> None:
        """Count a row and its prompt's tokens."""
        self.first = self.first or row.prompt
        self.prompts_digest.add(row.prompt)
        self.num_too_long += len(tokens) > self.max_prompt_tokens
        self.longest = max(self.longest, len(tokens))
        self.largest_id = max(self.largest_id, *tokens, -1)
        self.unread_columns.update(dict.fromkeys(row.unread))
        form = asked_form(row.prompt, row.template)
        if form is not None:
            self.num_asking[form] += 1
        is_chat = row.prompt.messages is not None
        self.num_chats += is_chat
        if self.special is not None:
            self.oddities.update(self.special.oddities(tokens, may_be_text=is_chat or self.expects_text))
            self.num_closed_thoughts += self.special.closes_thought(tokens)
        self._add_answer(row, answer_kind(row.prompt.answer))

    def _add_answer(self, row: PromptRow, kind: AnswerKind) -> None:
        if kind == "bare" and self.num_answers[kind] % self.distance == 0:
            self.bare_answers.append((row.number, row.prompt.answer))
        if len(self.bare_answers) > NUM_BARE:
            self.bare_answers, self.distance = self.bare_answers[::2], 2 * self.distance
        self.num_answers[kind] += 1
        if kind != "bare" and len(kept := self.odd_answers.setdefault(kind, [])) < NUM_TRIED:
            kept.append(row)


def survey(
    path: Path,
    prompt_column: str,
    answer_column: str | None,
    tokenizer: Any,
    max_prompt_tokens: int,
    progress: Progress = iter,
) -> Survey:
    """Read every row, and tokenise its prompt in the same way as a rollout.

    Without a tokenizer, prompts are not tokenised.
    """
    found = Survey(None if tokenizer is None else SpecialTokens(tokenizer), max_prompt_tokens)
    for row in progress(read_prompts(path, prompt_column, answer_column)):
        found.num_rows += 1
        if isinstance(row, DataError):
            found.faulty.add(str(row))
            continue
        try:
            found.add(row, () if tokenizer is None else whole_tokens(tokenizer, row.prompt))
        except DataError as error:
            found.faulty.add(f"{path}, row {row.number}: {error}")
    return found


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the tokens that `skip_special_tokens` omits when decoding."""
    added = cast(Mapping[int, Any], tokenizer.added_tokens_decoder)
    return frozenset(cast(list[int], tokenizer.all_special_ids)).union(id for id in added if added[id].special)
