"""Tries an objective on a small batch, before anything is trained with it."""

import torch

from megatron_dppo.algorithms.divergence import TopKLogProbs
from megatron_dppo.algorithms.inputs import PolicyLossInputs
from megatron_dppo.algorithms.loss import PolicyLossOutput, policy_loss
from megatron_dppo.algorithms.objective import Objective

RESPONSES = (7, 1, 12)  # tokens of each
VOCABULARY = 128


def try_objective(objective: Objective) -> PolicyLossOutput:
    """Return the loss of three short responses, made up but always the same.

    They have advantages of both signs and 0, tokens that do not learn, and a policy that moved both ways from
    the rollout's, by little and by much.

    Raises:
        ConfigError: The objective's rule does not weigh them.
    """
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(RESPONSES)
    rollout = (2 * torch.randn(num_tokens, VOCABULARY, generator=generator)).log_softmax(1)
    moved = torch.linspace(0.0, 1.5, num_tokens)[:, None] * torch.randn(rollout.shape, generator=generator)
    policy = (rollout + moved).log_softmax(1)
    targets = torch.multinomial(rollout.exp(), 1, generator=generator)
    topk = rollout.topk(min(objective.top_k, VOCABULARY))
    inputs = PolicyLossInputs(
        log_probs=policy.gather(1, targets)[:, 0],
        rollout_log_probs=rollout.gather(1, targets)[:, 0],
        advantages=torch.tensor([1.0, 0.0, -1.0]).repeat_interleave(torch.tensor(RESPONSES))
        * torch.tensor([1.0, -0.5]).repeat(num_tokens // 2),
        loss_mask=torch.arange(num_tokens) % 5 != 0,
        old_log_probs=(rollout + 0.1 * moved).log_softmax(1).gather(1, targets)[:, 0],
        ref_log_probs=rollout.gather(1, targets)[:, 0],
        topk=TopKLogProbs(topk.indices, topk.values, policy.gather(1, topk.indices)),
        targets=targets[:, 0],
        entropy=-(policy.exp() * policy).sum(1),
        response_lengths=torch.tensor(RESPONSES),
    )
    return policy_loss(objective, inputs)
