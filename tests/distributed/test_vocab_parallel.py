"""Log-probs, entropy, divergence, mask and gradient of a split vocabulary equal those of the whole one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from megatron_dppo.algorithms import preset
from megatron_dppo.kernels.reference import policy_loss_from_logits, token_log_probs
from megatron_dppo.kernels.vocab_parallel import VocabShard
from megatron_dppo.runtime import Runtime
from megatron_dppo.types import Microbatch, RolloutTopK

ROWS, VOCAB, K = 40, 97, 6
PRESETS = ("dppo_topk_tv", "dppo_topk_kl", "dppo_binary_kl", "minirl")


def microbatch() -> tuple[torch.Tensor, Microbatch]:
    """Float64 logits of many scales, one of them certain and one flat, and what the loss needs beside them."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64)
    logits = logits * torch.logspace(-1, 1.2, ROWS)[:, None] + 50 * torch.randn(ROWS, 1, generator=generator)
    logits[0, 5] += 200.0
    logits[1] = 0.0
    mu = (logits + torch.randn(ROWS, VOCAB, generator=generator)).log_softmax(-1)
    targets = torch.multinomial(mu.exp(), 1, generator=generator)[:, 0]
    best = mu.topk(K)
    ids = best.indices.int()
    ids[2, 3:] = -1
    return logits, Microbatch(
        tokens=targets,
        position_ids=torch.arange(ROWS),
        targets=targets,
        cu_seqlens=torch.tensor([0, ROWS], dtype=torch.int32),
        loss_mask=torch.rand(ROWS, generator=generator) < 0.9,
        rollout_log_probs=mu.gather(1, targets[:, None])[:, 0],
        advantages=torch.randn(ROWS, generator=generator, dtype=torch.float64),
        token_weights=torch.rand(ROWS, generator=generator, dtype=torch.float64),
        topk=RolloutTopK(ids, best.values),
        old_log_probs=mu.gather(1, targets[:, None])[:, 0],
    )


def compare(runtime: Runtime) -> dict[str, Any]:
    """On one rank: the largest difference to the whole vocabulary, per quantity."""
    import torch.distributed as dist

    logits, batch = microbatch()
    width = -(-VOCAB // runtime.world_size)
    start = width * runtime.rank
    group = dist.group.WORLD
    assert group is not None
    padded = torch.nn.functional.pad(logits, (0, width * runtime.world_size - VOCAB), value=1e6)
    errors: dict[str, Any] = {}
    assert batch.topk is not None
    for name in PRESETS:
        objective = preset(name, entropy_coef=0.1, **({"top_k": K} if "topk" in name else {}))
        whole = logits.clone().requires_grad_()
        own = padded[:, start : start + width].clone().requires_grad_()
        expected, expected_tokens = policy_loss_from_logits(whole, batch, objective, 0.7)
        shard = VocabShard(start, VOCAB, group)
        found, tokens = policy_loss_from_logits(own, batch, objective, 0.7, shard)
        expected.loss_sum.backward()
        found.loss_sum.backward()
        columns = shard.num_columns(width)
        assert own.grad is not None and whole.grad is not None
        errors[name] = {
            "loss": relative(found.loss_sum, expected.loss_sum),
            "log_probs": relative(tokens.log_probs, expected_tokens.log_probs),
            "entropy": relative(tokens.entropy, expected_tokens.entropy),
            "divergence": relative(found.divergence, expected.divergence),
            "mask": float((found.mask != expected.mask).sum()),
            "gradient": relative(own.grad[:, :columns], whole.grad[:, start : start + columns]),
            "gradient of padding": float(own.grad[:, columns:].abs().sum()),
        }
    whole32 = token_log_probs(logits.float(), batch.targets, topk_ids=batch.topk.ids)
    own32 = token_log_probs(
        padded[:, start : start + width].float(), batch.targets, topk_ids=batch.topk.ids, shard=shard
    )
    errors["float32"] = {
        "log_probs": relative(own32.log_probs, whole32.log_probs),
        "entropy": relative(own32.entropy, whole32.entropy),
    }
    return errors


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_split_vocabulary_equals_the_whole(tmp_path: Path, num_ranks: int) -> None:
    for errors in run_ranks(compare, num_ranks, tmp_path):
        for name, of in errors.items():
            limit = 1e-6 if name == "float32" else 1e-12
            assert max(of.values()) <= limit, (name, of)
