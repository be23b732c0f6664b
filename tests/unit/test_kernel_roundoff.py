"""The kernels where float32 does not know how certain a policy is, against float64 and the PyTorch code."""

import math
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.algorithms import TopKLogProbs, binary_kl, preset, topk_kl, topk_partition, topk_tv
from megatron_dppo.kernels.library import KernelLibrary
from megatron_dppo.kernels.reference import ROWS
from tests.support.kernel_host import Tokens, combined, shards_of, statistics_of
from tests.support.peaked_policies import (
    SAMPLED_TOKENS,
    PeakedPolicies,
    assert_ordered_kls,
    assert_ordered_tvs,
    noise_of_kls,
)

TOP_K = 4
VOCAB_SIZES = (2, 3, 7, 20, 40)
NOISES = (0.05, 0.2, 1.5, 5.0)
NUM_TOKENS = 60  # of each of these


def peaked_policies() -> PeakedPolicies:
    """All sizes and noises in one batch, vocabularies padded with tokens of no probability."""
    parts = [
        PeakedPolicies.draw(seed, size, num_tokens=NUM_TOKENS, noise=noise)
        for seed, (size, noise) in enumerate((size, noise) for size in VOCAB_SIZES for noise in NOISES)
    ]

    def joined(name: str, value: float) -> Tensor:
        wide = max(VOCAB_SIZES)
        columns = (getattr(part, name) for part in parts)
        return torch.cat([torch.nn.functional.pad(x, (0, wide - x.shape[1]), value=value) for x in columns])

    # A logit of -1e4 is a probability of 0 in both dtypes, and no NaN in the KL of the whole vocabulary.
    targets = torch.cat([part.targets for part in parts])
    return PeakedPolicies(joined("logits", -1e4), joined("rollout_logits", -1e4), targets)


def tokens_of(p: PeakedPolicies) -> Tokens:
    topk = p.topk(TOP_K, torch.float32)
    return Tokens.of(
        p.sampled(p.log_probs(torch.float32)[1]),
        logits=p.logits.float(),
        targets=p.targets,
        topk_ids=topk.ids.int(),
        topk_rollout_log_probs=topk.rollout_log_probs,
    )


def test_the_ends_of_log_probs_are_those_of_the_pytorch_code(host_library: KernelLibrary) -> None:
    eps = torch.finfo(torch.float32).eps
    ends = [0.0, -1e-40, -eps / 4, -eps, -31 * eps, -33 * eps, -0.0099, -0.0102, -0.7, -20, -120, -math.inf]
    pi, mu = (x.flatten() for x in torch.meshgrid(torch.tensor(ends), torch.tensor(ends), indexing="ij"))
    ids = torch.ones(len(pi), 1, dtype=torch.int32)
    tokens = Tokens.of(mu, topk_ids=ids, topk_rollout_log_probs=mu.flip(0)[:, None].contiguous())
    one, zero = torch.ones_like(pi), torch.zeros_like(pi)
    statistics = torch.stack([zero, one, zero, pi / math.log(2), pi.roll(5) / math.log(2)], dim=1)[None]
    for name in ("dppo_binary_kl", "dppo_binary_kl_decoupled", "dppo_topk_kl"):
        planes, of_topk = combined(host_library, tokens, statistics, preset(name))
        own, found = planes[ROWS.index("log_probs")], planes[ROWS.index("divergence")]
        topk = TopKLogProbs(tokens.topk_ids, tokens.topk_rollout_log_probs, of_topk)
        cells = topk_partition(topk, tokens.targets, own, mu, top_k=1)
        expected = topk_kl(*cells) if "topk" in name else binary_kl(own, mu)
        assert (found >= 0).all() and found.isinf().any()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-7)


def test_coarser_partitions_are_closer_in_the_kernels(kernels: Any) -> None:
    p = peaked_policies()
    tokens = tokens_of(p)
    statistics = statistics_of(kernels, tokens, shards_of(tokens, 2, math.nan), with_entropy=False)

    def divergence(name: str, **fields: object) -> Tensor:
        return combined(kernels, tokens, statistics, preset(name, **fields))[0][ROWS.index("divergence")]

    tvs, kls = (
        [divergence(f"dppo_topk_{kind}", top_k=TOP_K, sampled_token=each) for each in SAMPLED_TOKENS]
        for kind in ("tv", "kl")
    )
    assert_ordered_tvs(p, divergence("dppo_binary_tv"), *tvs)
    binary = divergence("dppo_binary_kl")
    assert torch.equal(binary, divergence("dppo_binary_kl_decoupled"))
    assert_ordered_kls(p, TOP_K, binary, *kls)
    assert binary.isinf().any() and (binary == 0).any()

    # The PyTorch code, on the kernels' own log-probs.
    planes, of_topk = combined(kernels, tokens, statistics, preset("dppo_topk_kl", top_k=TOP_K))
    pi, mu = planes[ROWS.index("log_probs")].clamp(max=0), tokens.rollout_log_probs
    assert (pi == 0).sum() > 50
    topk = TopKLogProbs(tokens.topk_ids, tokens.topk_rollout_log_probs, of_topk.clamp(max=0))
    torch.testing.assert_close(binary, binary_kl(pi, mu), rtol=1e-5, atol=5e-7)
    for tv, kl, each in zip(tvs, kls, SAMPLED_TOKENS, strict=True):
        cells = topk_partition(topk, tokens.targets, pi, mu, top_k=TOP_K, sampled_token=each)
        torch.testing.assert_close(tv, topk_tv(*cells), rtol=1e-5, atol=2e-6)
        expected = topk_kl(*cells)  # of tails that are summed in another order
        is_near = (kl - expected).abs() <= noise_of_kls(p, TOP_K) + 2e-6 + 1e-5 * expected
        assert (is_near | (kl == expected)).all()
