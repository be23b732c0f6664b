"""Sums, means, maxima and running sums over the learning tokens of complete responses."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_dppo.errors import ConfigError, Problem


@dataclass(frozen=True, eq=False)
class Responses:
    """The responses that T packed tokens make up, end to end. Each method returns a number for every token.

    Only learning tokens count: prompts and the turns of an environment are no part of a response. Sums are made
    in float64, in an order that is the response's own, and returned in the type of what is summed: every rank
    finds the same bits, and neither the packing nor an infinite neighbour shows.
    """

    lengths: Tensor  # [B] int64, tokens of each; their sum is T
    is_learning: Tensor  # [T] bool

    @cached_property
    def index(self) -> Tensor:
        """[T] int64: the response that each token belongs to."""
        which = torch.arange(self.lengths.numel(), device=self.lengths.device)
        return which.repeat_interleave(self.lengths, output_size=self.is_learning.numel())

    @cached_property
    def num_tokens(self) -> Tensor:
        """[T] int64: learning tokens of each token's response, at least 1."""
        return self._total(self.is_learning.long()).clamp(min=1)

    @cached_property
    def num_before(self) -> Tensor:
        """[T] int64: number of the response's learning tokens before each token."""
        return self._before(self.is_learning.long())

    @cached_property
    def _start(self) -> Tensor:
        """[T] int64: index of the first token of each token's response."""
        return (self.lengths.cumsum(0) - self.lengths)[self.index]

    @cached_property
    def _place(self) -> Tensor:
        """[T] int64: number of the response's packed tokens before each token, learning or not."""
        return torch.arange(self.index.numel(), device=self.index.device) - self._start

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over each token's response. [T] -> [T]."""
        return self._total(self._counted(values)).to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over each token's response; 0 if none of its tokens learns. [T] -> [T]."""
        return (self._total(self._counted(values)) / self.num_tokens).to(values.dtype)

    def max(self, values: Tensor) -> Tensor:
        """Return the largest value of each token's response; -inf if none of its tokens learns. [T] -> [T]."""
        lowest = values.new_full(self.lengths.shape, -torch.inf)
        counted = torch.where(self.is_learning, values, -torch.inf)
        return lowest.scatter_reduce(0, self.index, counted, "amax")[self.index]

    def before(self, values: Tensor) -> Tensor:
        """Return the sum over the response's tokens before each token. [T] -> [T]."""
        return self._before(self._counted(values)).to(values.dtype)

    def quantile(self, values: Tensor, q: float) -> Tensor:
        """Return the q-quantile over each token's response, linear between two values. [T] -> [T]."""
        ranked = torch.where(self.is_learning, values, torch.inf)
        order = ranked.argsort(stable=True)
        order = order[self.index[order].argsort(stable=True)]  # response by response, each ascending
        ranked = ranked[order]
        place = q * (self.num_tokens - 1).to(values.dtype)
        lower = place.floor()
        low = ranked[self._start + lower.long()]
        high = ranked[self._start + torch.minimum(lower.long() + 1, self.num_tokens - 1)]
        return torch.where((place > lower) & (high > low), low + (place - lower) * (high - low), low)

    def _counted(self, values: Tensor) -> Tensor:
        return torch.where(self.is_learning, values, 0.0).double()

    def _total(self, values: Tensor) -> Tensor:
        return self._running(values)[self._start + self.lengths[self.index] - 1]

    def _before(self, values: Tensor) -> Tensor:
        return self._from(1, self._running(values))

    def _running(self, values: Tensor) -> Tensor:
        """Return the sums up to and with each token, in log2(T) doublings of how far back they reach."""
        reach = 1
        while reach < values.numel():
            values = values + self._from(reach, values)
            reach *= 2
        return values

    def _from(self, distance: int, values: Tensor) -> Tensor:
        """Return the value `distance` tokens before each token; 0 if that token is not in the same response."""
        earlier = values.new_zeros(distance), values[:-distance]
        return torch.where(self._place >= distance, torch.cat(earlier)[: values.numel()], 0)


def require_lengths(lengths: Tensor, num_tokens: int, rule: str) -> None:
    """Raise unless the lengths are valid for T tokens; the message names the rule that reads them.

    Raises:
        ConfigError: The lengths are not a vector of integers, one is negative, or they do not sum to T.
    """
    is_vector = lengths.dim() == 1 and not lengths.is_floating_point() and lengths.dtype != torch.bool
    if is_vector and not bool((lengths < 0).any()) and int(lengths.sum()) == num_tokens:
        return
    found = f"shape {list(lengths.shape)}, {lengths.dtype}"
    if is_vector:
        shown = ", ".join(str(int(n)) for n in lengths[:8]) + (", ..." if lengths.numel() > 8 else "")
        found = f"{shown} (sum {int(lengths.sum())})"
    expected = f"[B] integers >= 0 that sum to {num_tokens}, the tokens of log_probs"
    action = "Give the number of packed tokens of each response, in their order, prompts included."
    raise ConfigError(Problem(f"PolicyLossInputs.response_lengths of {rule}", found, expected, action))
