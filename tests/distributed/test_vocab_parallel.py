"""A vocabulary split over ranks gives what the whole one gives: results, masks and every gradient."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.algorithms import Objective, preset
from megatron_dppo.runtime.process import Runtime
from tests.support.ranks import run_ranks

ROWS, VOCAB = 48, 97
OBJECTIVES = {
    name: preset(name, entropy_coef=0.1, **({"top_k": 6} if "topk" in name else {}))
    for name in ("dppo_topk_tv", "dppo_topk_kl", "dppo_binary_kl", "minirl")
}
FIELDS = ("log_probs", "entropy", "topk_log_probs", "ratio", "coefficient")
LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5}


def compare(runtime: Runtime) -> dict[str, Any]:
    """On one rank: the largest difference to the whole vocabulary, and its own results' bits, per case."""
    return {
        f"{name} {dtype}": differences(runtime, objective, dtype)
        for name, objective in OBJECTIVES.items()
        for dtype in (torch.float64, torch.float32)
    }


def differences(runtime: Runtime, objective: Objective, dtype: torch.dtype) -> dict[str, Any]:
    from megatron_dppo.kernels import (
        fused_linear_policy_loss,
        fused_policy_loss,
        score_norms,
    )
    from megatron_dppo.kernels.shards import VocabShard
    from tests.support.loss_batches import make_batch

    rank, size = runtime.rank, runtime.world_size
    batch = make_batch(dtype, num_tokens=ROWS, vocab_size=VOCAB, padding=-VOCAB % size)
    width = batch.weight.shape[0] // size
    own, tokens = slice(rank * width, (rank + 1) * width), slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    split: dict[str, Any] = dict(vocab_start=own.start, tp_group=dist.group.WORLD)
    exact = make_batch(dtype, num_tokens=ROWS, vocab_size=VOCAB, padding=-VOCAB % size)
    hidden, weight = exact.hidden.clone().requires_grad_(), exact.weight.clone().requires_grad_()
    expected = fused_linear_policy_loss(hidden, weight, **exact.arguments, objective=objective)
    expected.loss_sum.backward()
    assert hidden.grad is not None and weight.grad is not None
    whole = (exact.hidden @ exact.weight.T).requires_grad_()
    fused_policy_loss(whole, **exact.arguments, objective=objective).loss_sum.backward()
    assert whole.grad is not None

    targets, mask = batch.microbatch.targets, batch.microbatch.loss_mask
    shard_of_rank = VocabShard(own.start, VOCAB, dist.group.WORLD)
    layer = replace(batch.layer, shard=shard_of_rank, chunk_bytes=4000)
    expected_norms = score_norms(exact.hidden, exact.weight, targets, exact.layer, loss_mask=mask)

    logits = (batch.hidden @ batch.weight.T)[:, own].clone()
    logits[:, max(VOCAB - own.start, 0) :] = torch.nan  # padding
    logits.requires_grad_()
    found = fused_policy_loss(logits, **batch.arguments, **split, objective=objective)
    found.loss_sum.backward()
    errors = {field: relative(getattr(found, field), getattr(expected, field)) for field in FIELDS}
    errors["divergence"] = float((found.divergence - expected.divergence).abs().max())
    errors["loss"] = relative(found.loss_sum, expected.loss_sum)
    errors["mask"] = float((found.mask != expected.mask).sum())
    errors["by logits"] = relative(logits.grad, whole.grad[:, own])
    for name, is_split, rows in (("linear", False, slice(None)), ("sequence parallel", True, tokens)):
        part = batch.hidden[rows].clone().requires_grad_()
        shard = batch.weight[own].clone().requires_grad_()
        out = fused_linear_policy_loss(
            part,
            shard,
            **batch.arguments,
            **split,
            objective=objective,
            sequence_parallel=is_split,
            chunk_bytes=4000,
        )
        out.loss_sum.backward()
        errors[f"{name}: loss"] = relative(out.loss_sum, expected.loss_sum)
        errors[f"{name}: by hidden"] = relative(part.grad, hidden.grad[rows])
        errors[f"{name}: by weight"] = relative(shard.grad, weight.grad[own])
        layer = replace(layer, is_sequence_parallel=is_split)
        norms = score_norms(part, shard, targets, layer, loss_mask=mask)
        errors[f"{name}: score norms"] = relative(norms, expected_norms)
    layer = replace(exact.layer, shard=shard_of_rank, is_applied=True)
    norms = score_norms(logits.detach(), batch.weight[own], targets, layer, loss_mask=mask)
    errors["score norms"] = relative(norms, expected_norms)
    results = [found.loss_sum[None], *(getattr(found, field).reshape(-1) for field in FIELDS)]
    return {"errors": errors, "bits": torch.cat(results).detach().numpy().tobytes()}


def hole(runtime: Runtime) -> str:
    """The error on a rank whose group leaves a column out."""
    from megatron_dppo.errors import ConfigError
    from megatron_dppo.kernels import fused_policy_loss
    from tests.support.loss_batches import make_batch

    batch = make_batch(torch.float32, vocab_size=VOCAB, padding=1)
    start = runtime.rank * (VOCAB + 1) // 2
    split: dict[str, Any] = dict(vocab_start=start + runtime.rank, tp_group=dist.group.WORLD)
    logits = batch.hidden @ batch.weight[start : start + (VOCAB + 1) // 2].T
    try:
        fused_policy_loss(logits, **batch.arguments, **split, objective=OBJECTIVES["minirl"], debug=True)
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_debug_finds_a_hole_between_shards(tmp_path: Path) -> None:
    for said in run_ranks(hole, 2, tmp_path):
        assert "columns 50 to 99 on rank 1" in said and "after column 49" in said


def relative(found: Tensor | None, expected: Tensor | None) -> float:
    """Norm of the difference over the norm."""
    assert found is not None and expected is not None
    found, expected = (x.detach().double().nan_to_num(neginf=-1e3) for x in (found, expected))
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_split_vocabulary_equals_the_whole(tmp_path: Path, num_ranks: int) -> None:
    ranks = run_ranks(compare, num_ranks, tmp_path)
    for case, dtype in ((case, getattr(torch, case.rpartition(".")[2])) for case in ranks[0]):
        for of in ranks:
            assert max(of[case]["errors"].values()) <= LIMIT[dtype], (case, of[case]["errors"])
        assert len({of[case]["bits"] for of in ranks}) == 1, f"{case}: ranks differ"
