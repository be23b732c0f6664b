"""Finds special tokens that are doubled in a prompt or that end it, from its token ids."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

_LAST = 16  # number of tokens at the end of a prompt that are decoded


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the tokens that `skip_special_tokens` omits when decoding."""
    added = cast(Mapping[int, Any], tokenizer.added_tokens_decoder)
    return frozenset(cast(list[int], tokenizer.all_special_ids)).union(id for id in added if added[id].special)


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
            both = self._shown(2 * before)
            yield f"begin with {both}: the text has {self._shown(before)}, and the tokenizer adds one more"
        else:
            pairs = pairwise(tokens)
            doubled = dict.fromkeys(
                first for first, second in pairs if first == second and first in self._special
            )
            yield from (f"have {self._shown([token] * 2)}, a special token twice in a row" for token in doubled)
        last = next((token for token in reversed(tokens[-_LAST:]) if self._shown([token]).strip()), None)
        if last is not None and last in self._ends:
            who = "the tokenizer adds it to every text" if last in behind else "the response follows an end"
            yield f"end with {self._shown([last])}: {who}"
        own = tokens[len(before) : len(tokens) - len(behind)]
        if not may_be_text and self._tokenizer.chat_template and self._special.isdisjoint(own):
            yield (
                "are text, which the tokenizer's chat template never sees. That is right for a base model; for "
                "a chat model make them with megatron-dppo prepare-data --template chat"
            )

    def closes_thought(self, tokens: Sequence[int]) -> bool:
        """Whether a prompt ends with `</think>`."""
        return self._shown(tokens[-_LAST:]).rstrip().endswith("</think>")

    def _shown(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
