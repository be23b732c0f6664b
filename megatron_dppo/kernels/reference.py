"""The trust-region loss from logits, in plain PyTorch: what every kernel is compared with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.algorithms import Objective, PolicyLossInputs, PolicyLossOutput, TopKLogProbs, policy_loss
from megatron_dppo.kernels.vocab_parallel import VocabShard, sharded_log_probs
from megatron_dppo.types import Microbatch


@dataclass(frozen=True, eq=False)
class TokenLogProbs:
    """What the loss needs to know of each position's distribution."""

    log_probs: Tensor  # [T] log pi(target)
    entropy: Tensor  # [T] nats, over the whole vocabulary
    topk_log_probs: Tensor | None  # [T, K] log pi of the rollout's top-K tokens; -inf where the id is -1


def token_log_probs(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    topk_ids: Tensor | None = None,
    shard: VocabShard | None = None,
) -> TokenLogProbs:
    """Log-probs of the sampled and of the top-K tokens, and the entropy, in float32 (float64 for float64).

    Args:
        logits: [T, V], or this rank's columns of them.
        targets: [T] int64.
        temperature: Divides the logits, as the sampler did; gradients carry 1 / temperature.
        topk_ids: [T, K] integer ids; -1 pads.
        shard: Where this rank's columns stand; none where the rank has the whole vocabulary. Every rank of the
            shard's group must call this together, and gets the same values.
    """
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    ids = targets[:, None] if topk_ids is None else torch.cat([targets[:, None], topk_ids.long()], dim=1)
    if shard is None:
        all_log_probs = scaled.log_softmax(dim=-1)
        entropy = -(all_log_probs.exp() * all_log_probs).sum(dim=-1)
        chosen = all_log_probs.gather(1, ids.clamp(min=0))
    else:
        chosen, entropy = sharded_log_probs(scaled, ids.clamp(min=0), shard)
    topk = None
    if topk_ids is not None:
        topk = chosen[:, 1:].masked_fill(topk_ids < 0, float("-inf"))
    return TokenLogProbs(chosen[:, 0], entropy, topk)


def policy_loss_from_logits(
    logits: Tensor,
    microbatch: Microbatch,
    objective: Objective,
    temperature: float = 1.0,
    shard: VocabShard | None = None,
) -> tuple[PolicyLossOutput, TokenLogProbs]:
    """The policy loss of a packed micro-batch, and the log-probs it came from.

    Args:
        logits: [T, V] of the policy being trained, or this rank's columns of them.
        microbatch: Targets, rollout policy, advantages and weights of the same T positions.
        objective: What to optimise.
        temperature: The rollout's sampling temperature.
        shard: As for `token_log_probs`; the loss is then the same on every rank of the shard's group.
    """
    topk = microbatch.topk if objective.needs_topk else None
    statistics = token_log_probs(
        logits, microbatch.targets, temperature, topk_ids=None if topk is None else topk.ids, shard=shard
    )
    topk_inputs = None
    if topk is not None and statistics.topk_log_probs is not None:
        topk_inputs = TopKLogProbs(topk.ids, topk.log_probs, statistics.topk_log_probs)
    inputs = PolicyLossInputs(
        log_probs=statistics.log_probs,
        rollout_log_probs=microbatch.rollout_log_probs,
        advantages=microbatch.advantages,
        loss_mask=microbatch.loss_mask,
        old_log_probs=microbatch.old_log_probs,
        topk=topk_inputs,
        targets=microbatch.targets,
        token_weights=microbatch.token_weights,
        entropy=statistics.entropy,
    )
    return policy_loss(objective, inputs), statistics
