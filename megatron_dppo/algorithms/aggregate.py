"""Aggregation modes: the weight of each token's loss in the mini-batch."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_dppo.errors import ConfigError, Problem, did_you_mean


def _token_mean(lengths: Tensor, num_sequences: Tensor, response_length: int) -> Tensor:
    return torch.ones_like(lengths) / lengths.sum()


def _seq_mean_token_sum(lengths: Tensor, num_sequences: Tensor, response_length: int) -> Tensor:
    return torch.ones_like(lengths) / num_sequences


def _seq_mean_token_mean(lengths: Tensor, num_sequences: Tensor, response_length: int) -> Tensor:
    return 1 / (lengths * num_sequences)


def _seq_mean_token_sum_norm(lengths: Tensor, num_sequences: Tensor, response_length: int) -> Tensor:
    return torch.ones_like(lengths) / (num_sequences * response_length)


AGGREGATIONS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = MappingProxyType(
    {
        "token_mean": _token_mean,
        "seq_mean_token_sum": _seq_mean_token_sum,
        "seq_mean_token_mean": _seq_mean_token_mean,
        "seq_mean_token_sum_norm": _seq_mean_token_sum_norm,
    }
)


def token_weights(mode: str, lengths: Tensor | Sequence[int], response_length: int | None = None) -> Tensor:
    """Return token weights w, [sum(lengths)] float64: (w * per_token_loss).sum() is the mini-batch's loss.

    The paper does not state its aggregation; Eq. 11 sums tokens, as `seq_mean_token_sum`. Its authors' script
    runs and recommends `seq_mean_token_sum_norm`, and so do our examples of the paper's experiments.
    `token_mean` is our default, because it needs no response length. Means over sequences count only sequences
    with a learning token. Call this on the complete mini-batch, before it is split over ranks or micro-batches.
    If the loss is divided by the global token count later, multiply the weights by that count first
    (`token_mean` is then 1 for each token).

    Args:
        mode: A name in AGGREGATIONS.
        lengths: [B] learning tokens of each sequence; 0 is allowed.
        response_length: The constant that seq_mean_token_sum_norm divides by; the other modes ignore it.

    Raises:
        ConfigError: The mode is unknown, a length is negative, or response_length is missing.
    """
    counts = _counts(lengths)
    return sequence_weights(mode, counts, response_length).repeat_interleave(counts)


def sequence_weights(mode: str, lengths: Tensor | Sequence[int], response_length: int | None = None) -> Tensor:
    """Return the weight that all tokens of each sequence share, [B] float64; see `token_weights`.

    The weight of a sequence without a learning token is not finite and must not be used.
    """
    if mode not in AGGREGATIONS:
        action = did_you_mean(mode, AGGREGATIONS, "Choose one of these.")
        options = "one of " + ", ".join(AGGREGATIONS)
        raise ConfigError(Problem("algorithm.aggregation", repr(mode), options, action))
    counts = _counts(lengths)
    if counts.dim() != 1 or counts.is_floating_point() or bool((counts < 0).any()):
        action = "Count each sequence's learning tokens."
        raise ConfigError(Problem("lengths", str(lengths), "[B] integers >= 0", action))
    if mode == "seq_mean_token_sum_norm" and (response_length is None or response_length <= 0):
        action = "Pass rollout.max_response_tokens."
        raise ConfigError(Problem("response_length", repr(response_length), f"> 0 for {mode}", action))
    return AGGREGATIONS[mode](counts.double(), (counts > 0).sum(), response_length or 0)


def _counts(lengths: Tensor | Sequence[int]) -> Tensor:
    return lengths if isinstance(lengths, Tensor) else torch.tensor(lengths or (), dtype=torch.long)
