"""Prompts of several files in fixed shares: which file each prompt of the stream comes from."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

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


class Shares:
    """Spreads parts evenly over a sequence, in proportion to their weights, with exact arithmetic.

    Item j of a part with weight w has the key (j + 1/2) / w; the sequence is the items of all parts
    ordered by key, and equal keys are in the order of the parts. So after k items each part has its share
    of k, and any place can be found without its predecessors.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        common = lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * common) for weight in exact]
        self._total = sum(self._weights)

    def counts(self, place: int) -> list[int]:
        """Return how many items of each part come before a place."""
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

    def at(self, place: int) -> tuple[int, int]:
        """Return the part at a place, and the item's number in this part."""
        counts = self.counts(place)
        part = self._next(counts)
        return part, counts[part]

    def _next(self, counts: Sequence[int]) -> int:
        return min((self._key(part, count), part) for part, count in enumerate(counts))[1]

    def _key(self, part: int, item: int) -> Fraction:
        return Fraction(2 * item + 1, self._weights[part])
