"""The loss the long way against `policy_loss` on float64 log-probs, and the statistics against log-softmax."""

from dataclasses import replace

import pytest
import torch

from megatron_dppo.algorithms import PolicyLossInputs, TopKLogProbs, policy_loss, preset
from megatron_dppo.data.batches.packing import pack
from megatron_dppo.kernels import token_log_probs
from megatron_dppo.kernels.output_layer import OutputLayer
from megatron_dppo.kernels.shards import VocabShard
from tests.support.loss_batches import policy_loss_from_logits
from tests.support.samples import make_sample


def logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(9, 60, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_equal_float64(dtype: torch.dtype, temperature: float) -> None:
    x, targets = logits(dtype), torch.arange(9)
    exact = (x.double() / temperature).log_softmax(-1)
    ids = torch.tensor([[3, 59, -1]]).expand(9, 3)
    got = token_log_probs(x, None, targets, OutputLayer(VocabShard(0, 60), temperature, True), topk_ids=ids)
    assert got.log_probs.dtype == torch.float32 and got.topk_log_probs is not None
    torch.testing.assert_close(got.log_probs.double(), exact[torch.arange(9), targets], rtol=1e-6, atol=3e-6)
    torch.testing.assert_close(got.entropy.double(), -(exact.exp() * exact).sum(-1), rtol=1e-6, atol=3e-6)
    torch.testing.assert_close(got.topk_log_probs[:, 1].double(), exact[:, 59], rtol=1e-6, atol=3e-6)
    assert torch.isneginf(got.topk_log_probs[:, 2]).all()


@pytest.mark.parametrize("name", ["dppo_binary_tv", "dppo_topk_kl", "cispo"])
def test_it_is_policy_loss_on_the_log_probs_of_the_logits(name: str) -> None:
    objective = preset(name, top_k=2) if "topk" in name else preset(name)
    first, second = make_sample([10, 11, 12, 13, 14], 2, reward=1.0), make_sample([20, 21, 22, 23], 1)
    weighted = [
        replace(first, token_weights=torch.tensor([1.0, 2.0, 3.0])),
        replace(second, token_weights=torch.ones(3)),
    ]
    m = pack(weighted)
    assert m.topk is not None
    x = logits()
    all_log_probs = x.double().log_softmax(-1)
    log_probs = all_log_probs.gather(1, m.targets[:, None])[:, 0]
    topk = TopKLogProbs(m.topk.ids, m.topk.log_probs, all_log_probs.gather(1, m.topk.ids.long().clamp(min=0)))
    inputs = PolicyLossInputs(
        log_probs=log_probs,
        rollout_log_probs=m.rollout_log_probs,
        advantages=m.advantages,
        loss_mask=m.loss_mask,
        topk=topk,
        targets=m.targets,
        token_weights=m.token_weights,
    )
    expected = policy_loss(objective, inputs)
    out, _ = policy_loss_from_logits(x, m, objective)
    assert float(out.loss_sum) == pytest.approx(float(expected.loss_sum), rel=1e-5)
    assert torch.equal(out.mask, expected.mask)
