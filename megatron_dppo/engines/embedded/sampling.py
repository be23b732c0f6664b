"""Draws tokens with noise that depends only on the sample, never on the rest of the batch."""

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.types import RolloutTopK


def sampling_noise(noise_key: tuple[int, int, int], num_positions: int) -> Tensor:
    """Return uniforms in [0, 1) for the response positions of one sample, `[num_positions]` float64.

    Philox is counter-based. (seed, rollout) is its key, and each sample has a counter range of 2^192 blocks.
    Position t is the t-th draw of that range, so a longer response only appends draws.
    """
    seed, rollout, sample = noise_key
    philox = np.random.Philox(counter=[0, 0, 0, sample], key=[seed, rollout])
    uniforms = np.random.Generator(philox).random(num_positions)
    return torch.from_numpy(uniforms)  # pyright: ignore[reportUnknownMemberType]


def sampling_log_probs(logits: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
    """Return log-probs of the distribution that tokens are drawn from, `[N, V]` float32; -inf is never drawn.

    Temperature 0 (greedy) returns log-probs at temperature 1 over the full vocabulary, as SGLang does: the
    log-probs of a one-point distribution would all be 0. If top_p < 1, the log-probs are renormalised over the
    nucleus: the most probable tokens up to and including the one that reaches top_p.
    """
    if temperature not in (0.0, 1.0):
        logits = logits.float() / temperature
    log_probs = log_softmax(logits)
    if top_p == 1.0 or temperature == 0.0:
        return log_probs
    probs, order = log_probs.exp().double().sort(dim=-1, descending=True, stable=True)
    outside = torch.empty_like(order, dtype=torch.bool)
    outside.scatter_(-1, order, probs.cumsum(-1) - probs >= top_p)
    return log_softmax(log_probs.masked_fill(outside, -torch.inf))


def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probs of logits `[..., V]`, float32, computed in float64.

    On a CPU, torch's float32 log_softmax is off by up to 1e-5 over a real vocabulary, always in the same
    direction: it adds the logarithm of a float32 sum to the highest logit before it subtracts.
    """
    return logits.double().log_softmax(dim=-1).float()


def draw(log_probs: Tensor, noise: Tensor) -> Tensor:
    """Draw token ids `[N]` by inverting the cumulative distribution of `log_probs` `[N, V]` at `noise` `[N]`.

    The sum runs in float64, in the order of token ids. With sequential sums, the first id whose cumulative sum
    exceeds the target has a positive probability. A parallel scan may round differently (one case in 2^53).
    Then the most probable token is returned.
    """
    probs = log_probs.exp()
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    target = noise.unsqueeze(-1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=log_probs.shape[-1] - 1)
    possible = probs.gather(-1, tokens) > 0
    if not bool(possible.all()):
        tokens = torch.where(possible, tokens, probs.argmax(-1, keepdim=True))
    return tokens.squeeze(-1)


def most_probable(log_probs: Tensor, k: int) -> RolloutTopK:
    """Return the k most probable tokens of each row, most probable first; impossible tokens get id -1."""
    values, ids = log_probs.topk(k, dim=-1)
    return RolloutTopK(ids=ids.masked_fill_(values == -torch.inf, -1).int(), log_probs=values)
