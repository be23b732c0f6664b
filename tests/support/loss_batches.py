"""Micro-batches for the losses, of many scales and with padding, and the loss the long way to compare with."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.algorithms import Objective, PolicyLossInputs, PolicyLossOutput, policy_loss
from megatron_dppo.kernels.output_layer import OutputLayer
from megatron_dppo.kernels.reference import TokenLogProbs
from megatron_dppo.kernels.shards import VocabShard
from megatron_dppo.types import Microbatch, RolloutTopK


@dataclass(frozen=True)
class Batch:
    """Hidden states, an output layer, and the other inputs of a loss."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V + padding, H]
    vocab_size: int
    temperature: float
    microbatch: Microbatch

    @property
    def logits(self) -> Tensor:
        """[T, V] without padding columns."""
        return (self.hidden @ self.weight.T)[:, : self.vocab_size]

    @property
    def layer(self) -> OutputLayer:
        """The output layer on one rank."""
        return OutputLayer(VocabShard(0, self.vocab_size), self.temperature)

    @property
    def arguments(self) -> dict[str, Any]:
        """For `fused_policy_loss`, but the objective."""
        m = self.microbatch
        assert m.topk is not None
        return dict(
            targets=m.targets,
            rollout_log_probs=m.rollout_log_probs,
            advantages=m.advantages,
            loss_mask=m.loss_mask,
            token_weights=m.token_weights,
            topk_ids=m.topk.ids,
            topk_rollout_log_probs=m.topk.log_probs,
            old_log_probs=m.old_log_probs,
            ref_log_probs=m.ref_log_probs,
            response_lengths=m.cu_seqlens.diff(),
            temperature=self.temperature,
            vocab_size=self.vocab_size,
        )


def make_batch(
    dtype: torch.dtype,
    *,
    top_k: int = 6,
    num_tokens: int = 40,
    vocab_size: int = 97,
    padding: int = 3,
    seed: int = 3,
) -> Batch:
    """A batch of that type of numbers, the same for each.

    Row 0 is nearly certain, row 1 flat, row 2 has a ragged top-K, row 3 no advantage, row 4 no weight; a tenth
    of the rows does not learn and holds NaN. The second of
    four responses has one token, the third none.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden = random(num_tokens, 16) * torch.logspace(-1, 0.7, num_tokens, dtype=torch.float64)[:, None]
    weight = random(vocab_size + padding, 16)
    hidden[0], hidden[1] = weight[4] * 3, 0.0
    mu = ((hidden @ weight.T)[:, :vocab_size] / 0.7 + 0.3 * random(num_tokens, vocab_size)).log_softmax(-1)
    targets = torch.multinomial(mu.exp(), 1, generator=generator)[:, 0]
    best = mu.topk(min(top_k, vocab_size))
    ids = best.indices.int()
    ids[2, 3:] = -1  # the last columns: a shorter list of the most probable
    loss_mask = torch.rand(num_tokens, generator=generator) < 0.9
    loss_mask[:5] = True
    loss_mask[-1] = False
    advantages, rollout_log_probs = random(num_tokens), mu.gather(1, targets[:, None])[:, 0]
    old_log_probs = (rollout_log_probs + 0.1 * random(num_tokens)).clamp(max=0)
    token_weights = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    advantages[3], token_weights[4] = 0.0, 0.0
    ref_log_probs = old_log_probs.roll(1).nan_to_num()
    for values in (advantages, rollout_log_probs, old_log_probs, ref_log_probs, token_weights):
        values[~loss_mask] = torch.nan
    third = num_tokens // 3
    microbatch = Microbatch(
        tokens=targets,
        position_ids=torch.arange(num_tokens),
        targets=targets,
        cu_seqlens=torch.tensor([0, third, third + 1, third + 1, num_tokens], dtype=torch.int32),
        loss_mask=loss_mask,
        rollout_log_probs=rollout_log_probs.to(dtype),
        advantages=advantages.to(dtype),
        token_weights=token_weights.to(dtype),
        topk=RolloutTopK(ids, best.values.to(dtype)),
        old_log_probs=old_log_probs.to(dtype),
        ref_log_probs=ref_log_probs.to(dtype),
    )
    return Batch(hidden.to(dtype), weight.to(dtype), vocab_size, 0.7, microbatch)


def policy_loss_from_logits(
    logits: Tensor, microbatch: Microbatch, objective: Objective, temperature: float = 1.0
) -> tuple[PolicyLossOutput, TokenLogProbs]:
    """The policy loss of a packed micro-batch over the whole vocabulary, by log-softmax and autograd.

    Args:
        logits: [T, V] of the policy being trained.
        microbatch: Targets, rollout policy, advantages and weights of the same T positions.
        objective: What to optimise.
        temperature: The rollout's sampling temperature; gradients carry 1 / temperature.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    all_log_probs = (wide / temperature).log_softmax(dim=-1)
    log_probs = all_log_probs.gather(1, microbatch.targets[:, None])[:, 0]
    entropy = -(all_log_probs.exp() * all_log_probs).sum(dim=-1)
    topk = microbatch.topk
    at_topk = None
    if topk is not None:
        at_topk = all_log_probs.gather(1, topk.ids.long().clamp(min=0)).masked_fill(topk.ids < 0, -math.inf)
    lengths = microbatch.cu_seqlens.diff()
    inputs = PolicyLossInputs.of(
        microbatch, log_probs, topk_log_probs=at_topk, entropy=entropy, response_lengths=lengths
    )
    return policy_loss(objective, inputs), TokenLogProbs(log_probs, entropy, at_topk)
