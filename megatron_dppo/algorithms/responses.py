"""The responses that packed tokens make up."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from megatron_dppo.errors import ConfigError, Problem


@dataclass(frozen=True, eq=False)
class Responses:
    """The responses that T packed tokens make up, end to end. Each method returns a number for every token.

    Only learning tokens count: prompts and the turns of an environment are no part of a response. Sums are made
    in float64, in an order that is the response's own, and returned in the type of what is summed: every rank
    finds the same bits, and neither the packing nor an infinite neighbour shows.
    """

    lengths: Int64[Tensor, " B"]  # tokens of each; their sum is T
    is_learning: Bool[Tensor, " T"]

    @cached_property
    def index(self) -> Int64[Tensor, " T"]:
        """The response that each token belongs to."""
        which = torch.arange(self.lengths.numel(), device=self.lengths.device)
        return which.repeat_interleave(self.lengths, output_size=self.is_learning.numel())

    @cached_property
    def num_tokens(self) -> Int64[Tensor, " T"]:
        """Learning tokens of each token's response, at least 1."""
        return self._total(self.is_learning.long()).clamp(min=1)

    @cached_property
    def num_before(self) -> Int64[Tensor, " T"]:
        """Number of the response's learning tokens before each token."""
        return self._before(self.is_learning.long())

    @cached_property
    def _start(self) -> Int64[Tensor, " T"]:
        """Index of the first token of each token's response."""
        return (self.lengths.cumsum(0) - self.lengths)[self.index]

    @cached_property
    def _place(self) -> Int64[Tensor, " T"]:
        """Number of the response's packed tokens before each token, learning or not."""
        return torch.arange(self.index.numel(), device=self.index.device) - self._start

    def sum(self, values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return the sum over each token's response."""
        return self._total(self._counted(values)).to(values.dtype)

    def mean(self, values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return the mean over each token's response; 0 if no token in it learns."""
        return (self._total(self._counted(values)) / self.num_tokens).to(values.dtype)

    def max(self, values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return the largest value of each token's response; -inf if no token in it learns."""
        lowest = values.new_full(self.lengths.shape, -torch.inf)
        counted = torch.where(self.is_learning, values, -torch.inf)
        return lowest.scatter_reduce(0, self.index, counted, "amax")[self.index]

    def before(self, values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return the sum over the response's tokens before each token."""
        return self._before(self._counted(values)).to(values.dtype)

    def lowest_before(self, values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return the smallest value of the response's tokens before each token; inf for the first token."""
        lowest, reach = torch.where(self.is_learning, values, torch.inf), 1
        while reach < values.numel():
            lowest = torch.minimum(lowest, self._from(reach, lowest, torch.inf))
            reach *= 2
        return self._from(1, lowest, torch.inf)

    def at_rank(self, values: Float[Tensor, " T"], share: float) -> Float[Tensor, " T"]:
        """Return the smallest value that at least this share of each token's response does not exceed."""
        rank = (share * self.num_tokens.double() - 1e-9).ceil().long()  # .9 of 10 is 9, whatever the rounding
        return self._ascending(values)[self._start + (rank - 1).clamp(min=0)]

    def quantile(self, values: Float[Tensor, " T"], q: float) -> Float[Tensor, " T"]:
        """Return the q-quantile over each token's response, linear between two values."""
        ranked = self._ascending(values)
        place = q * (self.num_tokens - 1).to(values.dtype)
        lower = place.floor()
        low = ranked[self._start + lower.long()]
        high = ranked[self._start + torch.minimum(lower.long() + 1, self.num_tokens - 1)]
        return torch.where((place > lower) & (high > low), low + (place - lower) * (high - low), low)

    def _ascending(self, values: Tensor) -> Tensor:
        """Return the values in ascending order, response by response; inf for tokens that do not learn."""
        ranked = torch.where(self.is_learning, values, torch.inf)
        order = ranked.argsort(stable=True)
        return ranked[order[self.index[order].argsort(stable=True)]]

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

    def _from(self, distance: int, values: Tensor, outside: float = 0) -> Tensor:
        """Return the value `distance` tokens before each token; `outside` if its response has no such token."""
        earlier = values.new_zeros(distance), values[:-distance]
        return torch.where(self._place >= distance, torch.cat(earlier)[: values.numel()], outside)


def require_lengths(lengths: Tensor, num_tokens: int, rule: str) -> None:
    """Raise unless the lengths are valid for T tokens; the message names the rule that reads them."""
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
