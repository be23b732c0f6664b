"""Hugging Face's models as the reference: packed logits, a loss one sequence at a time, and relative errors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def relative(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference||."""
    return float((value - reference).norm() / reference.norm().clamp(min=1e-12))


def packed_logit_error(logits: Tensor, microbatch: Any, model: Any) -> float:
    """Worst relative error of a packed sequence's logits."""
    bounds = zip(microbatch.cu_seqlens[:-1].tolist(), microbatch.cu_seqlens[1:].tolist(), strict=True)
    with torch.no_grad():
        return max(
            relative(logits[start:end], model(input_ids=microbatch.tokens[None, start:end]).logits[0])
            for start, end in bounds
        )


def backward(model: Any, objective: Any, samples: Sequence[Any]) -> float:
    """Sum the loss one sequence at a time, and accumulate its gradients."""
    from megatron_dppo.algorithms import PolicyLossInputs, policy_loss

    total = torch.zeros(())
    for sample in samples:
        logits = model(input_ids=sample.tokens[None, :-1]).logits[0, sample.prompt_length - 1 :]
        log_probs = logits.log_softmax(-1).gather(1, sample.tokens[sample.prompt_length :, None])[:, 0]
        inputs = PolicyLossInputs(
            log_probs=log_probs,
            rollout_log_probs=sample.rollout_log_probs,
            advantages=torch.full_like(log_probs, sample.advantage),
            loss_mask=sample.loss_mask,
        )
        total = total + policy_loss(objective, inputs).loss_sum
    total.backward()
    return float(total.detach())
