"""Prompts of several files in fixed shares: which file each prompt of the stream comes from."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm

from megatron_dppo.config.sections import PromptFile


@dataclass(frozen=True)
class Part:
    """The prompts of one file among all prompts of a run."""

    name: str
    start: int  # of its prompts in the list of all
    count: int
    weight: float


def parts_of(files: Sequence[PromptFile], counts: Sequence[int]) -> list[Part]:
    """Return the part of each file, given its number of prompts, which is its default weight."""
    starts = [sum(counts[:number]) for number in range(len(files))]
    return [
        Part(file.label, start, count, float(count) if file.weight is None else file.weight)
        for file, start, count in zip(files, starts, counts, strict=True)
    ]


def digest_of(parts: Sequence[Part], digests: Sequence[str]) -> str:
    """Return the digest of all parts, given each part's `PromptsDigest`; one part alone keeps its own."""
    if len(parts) == 1:
        return digests[0]
    named = [(part.name, part.weight, digest) for part, digest in zip(parts, digests, strict=True)]
    return hashlib.blake2b(json.dumps(named).encode(), digest_size=16).hexdigest()


_LONGEST_BLOCK = 256
"""Number of places that are shuffled together, if the period of the weights is longer."""


class Shares:
    """Mixes parts at random, in proportion to their weights, with exact arithmetic.

    Item j of a part with weight w has the key (j + 1/2) / w. The items of all parts ordered by key, equal keys
    in the order of the parts, spread each part evenly, but periodically: with equal weights each of 2, 4 or 8
    ranks would sample from one part only. So the parts of each block are shuffled: a period, which has the
    exact share of each part, or each `_LONGEST_BLOCK` places of a longer one. The order depends only on the
    seed, and any place can be found without the blocks before it.
    """

    def __init__(self, weights: Sequence[float], seed: int = 0) -> None:
        exact = [Fraction(weight) for weight in weights]
        common = Fraction(gcd(*(each.numerator for each in exact)), lcm(*(each.denominator for each in exact)))
        self._weights = [int(weight / common) for weight in exact]
        self._total, self._seed = sum(self._weights), seed
        self._parts_from = lru_cache(4)(self._shuffled)

    def counts(self, place: int) -> list[int]:
        """Return how many items of each part come before a place."""
        start = self._block_of(place)
        counts = self._even_counts(start)
        for part in self._parts_from(start)[: place - start]:
            counts[part] += 1
        return counts

    def at(self, place: int) -> tuple[int, int]:
        """Return the part at a place, and the item's number in this part."""
        start = self._block_of(place)
        part = self._parts_from(start)[place - start]
        return part, self.counts(place)[part]

    def _block_of(self, place: int) -> int:
        """Return the first place of a place's block; a period begins with a new block."""
        return place - place % self._total % _LONGEST_BLOCK

    def _shuffled(self, start: int) -> Sequence[int]:
        """Return the parts of the places of the block that begins at `start`."""
        counts, parts = self._even_counts(start), list[int]()
        for _ in range(min(_LONGEST_BLOCK, self._total - start % self._total)):
            parts.append(self._next(counts))
            counts[parts[-1]] += 1
        keys = [hashlib.blake2b(f"{self._seed}/{start + i}".encode()).digest() for i in range(len(parts))]
        return [part for _, part in sorted(zip(keys, parts, strict=True))]

    def _even_counts(self, place: int) -> list[int]:
        """Return how many items of each part come before a place in the order of their keys."""
        total, doubled = self._total, 2 * self._total
        counts = [
            -((total - 2 * place * weight) // doubled) for weight in self._weights
        ]  # keys below place/total
        while sum(counts) < place:
            counts[self._next(counts)] += 1
        while sum(counts) > place:
            last = [(self._key(part, count - 1), part) for part, count in enumerate(counts) if count]
            counts[max(last)[1]] -= 1
        return counts

    def _next(self, counts: Sequence[int]) -> int:
        return min((self._key(part, count), part) for part, count in enumerate(counts))[1]

    def _key(self, part: int, item: int) -> Fraction:
        return Fraction(2 * item + 1, self._weights[part])
