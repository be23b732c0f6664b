"""The sanity task: two-digit multiplication that a 250k-parameter model learns on a laptop in a minute.

A prompt is `<bos> 2 1 * 4 3 =`: 12 * 34, digits little-endian. The teacher writes one partial product for
each digit of the second factor, then `#` and the product in four digits:

    w3 8 4 0 + w0 6 3 0 + w17 # 8 0 4 0 <eos>

Each segment starts with a filler word drawn from a Zipf law over 256 words. Fillers carry no meaning. They
give the policy the long tail of improbable tokens that trust regions are designed for. The teacher makes
mistakes: each digit is replaced by a random one with probability 0.10, and later segments build on the
mistake. A model warm-started on these demonstrations knows the task (greedy decoding is right) but has a wide
distribution (sampling is often wrong), so reinforcement learning can improve it within minutes.

Only 10,000 pairs of factors exist. About a tenth of them, chosen by a hash of the unordered pair, are held out.
Neither a held-out pair nor its commuted product appears in a teacher batch or a training prompt.
"""

from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.runtime.files import write_jsonl

Split = Literal["train", "held_out"]

NUM_FILLER_WORDS = 256
TOKENS: tuple[str, ...] = (
    *("<pad>", "<bos>", "<eos>", "=", "#"),
    *(str(digit) for digit in range(10)),
    *("+", "-", "*"),
    *(f"w{word}" for word in range(NUM_FILLER_WORDS)),
)
"""Vocabulary in order of token ids. Text is a sequence of these tokens, separated by spaces."""
VOCABULARY: dict[str, int] = {token: index for index, token in enumerate(TOKENS)}
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"

PROMPT_LENGTH = 7
RESPONSE_LENGTH = 17
SLIP_PROBABILITY = 0.10
_HELD_OUT_ONE_IN = 10


def make_prompts(n: int, seed: int, split: Split = "train") -> list[dict[str, str]]:
    """Return `n` rows (id, prompt, answer) of a split in an order that depends only on (seed, split)."""
    pairs = _pairs(split)
    if not 0 <= n <= len(pairs):
        found = Problem("sanity task", f"n = {n}", f"0 to {len(pairs)} for split {split!r}", "Ask for fewer.")
        raise ConfigError(found)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))[:n]
    return [_row(int(a), int(b)) for a, b in pairs[order]]


def write_prompts(path: Path, n: int, seed: int, split: Split = "train") -> None:
    """Write the problems of `make_prompts` as JSON lines. The file is written atomically."""
    write_jsonl(path, make_prompts(n, seed, split))


def teacher_batch(
    batch: int, generator: torch.Generator, slip_probability: float = SLIP_PROBABILITY
) -> tuple[Tensor, Tensor]:
    """Return token ids of `batch` training prompts [batch, 7] and of the teacher's responses [batch, 17]."""

    def column(token: str) -> Tensor:
        return torch.full((batch, 1), VOCABULARY[token])

    pairs = _pairs("train")
    a, b = pairs[torch.randint(len(pairs), (batch,), generator=generator)].unbind(1)
    words = _filler_words(batch, generator)
    total = torch.zeros_like(a)
    segments: list[Tensor] = []
    for j, digit in enumerate(_digits(b, 2).unbind(1)):
        partial = _slip(_digits(a * digit, 3), slip_probability, generator)
        total = total + _value(partial) * 10**j
        segments += [words[:, j : j + 1], partial + VOCABULARY["0"], column("+")]
    product = _slip(_digits(total, 4), slip_probability, generator)
    segments += [words[:, 2:], column("#"), product + VOCABULARY["0"], column(EOS)]
    digits_a, digits_b = _digits(a, 2) + VOCABULARY["0"], _digits(b, 2) + VOCABULARY["0"]
    prompts = torch.cat([column(BOS), digits_a, column("*"), digits_b, column("=")], dim=1)
    return prompts, torch.cat(segments, dim=1)


@cache
def _pairs(split: Split) -> Tensor:
    """Return all pairs of factors in a split, [N, 2] int64. Callers share the tensor and must not change it."""
    grid = torch.cartesian_prod(torch.arange(100), torch.arange(100))
    unordered = grid.amin(1) * 100 + grid.amax(1)
    # Knuth's multiplicative hash: the high bits of the product are well mixed.
    is_held_out = ((unordered * 2654435761) % 2**32 >> 16) % _HELD_OUT_ONE_IN == 0
    return grid[is_held_out == (split == "held_out")]


def _row(a: int, b: int) -> dict[str, str]:
    prompt = f"{BOS} {a % 10} {a // 10} * {b % 10} {b // 10} ="
    return {"id": f"{a}*{b}", "prompt": prompt, "answer": str(a * b)}


def _digits(values: Tensor, count: int) -> Tensor:
    """Return the `count` lowest decimal digits, lowest first: [N] -> [N, count]."""
    return values[:, None] // 10 ** torch.arange(count) % 10


def _value(digits: Tensor) -> Tensor:
    return (digits * 10 ** torch.arange(digits.shape[1])).sum(1)


def _slip(digits: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    is_slip = torch.rand(digits.shape, generator=generator) < probability
    return torch.where(is_slip, torch.randint(10, digits.shape, generator=generator), digits)


def _filler_words(batch: int, generator: torch.Generator) -> Tensor:
    """Draw three filler words per response, word k with probability proportional to 1 / (k + 3): [batch, 3]."""
    weights = 1 / (torch.arange(NUM_FILLER_WORDS) + 3.0)
    words = torch.multinomial(weights, 3 * batch, replacement=True, generator=generator)
    return words.view(batch, 3) + VOCABULARY["w0"]
