"""Noise by key, and the inverse of the cumulative distribution."""

import pytest
import torch

from megatron_dppo.engines.embedded.sampling import draw, most_probable, sampling_log_probs, sampling_noise


def test_noise_depends_on_the_key_and_the_position_only() -> None:
    noise = sampling_noise((1, 2, 3), 50)
    assert noise.dtype == torch.float64
    assert torch.equal(noise[:7], sampling_noise((1, 2, 3), 7))
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 0), (2, 1, 3), (3, 2, 1)):
        assert not torch.isin(sampling_noise(other, 50), noise).any()


def test_drawn_tokens_follow_the_distribution() -> None:
    log_probs = sampling_log_probs(torch.tensor([[2.0, -1.0, 0.5, 0.0, 1.0, -3.0]]))
    noise = torch.cat([sampling_noise((0, 0, sample), 20) for sample in range(1000)])
    tokens = draw(log_probs.expand(noise.numel(), -1), noise)
    expected = log_probs[0].double().exp() * noise.numel()
    chi_square = ((torch.bincount(tokens, minlength=6) - expected) ** 2 / expected).sum()
    assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001


def test_an_impossible_token_is_never_drawn() -> None:
    log_probs = torch.tensor([-torch.inf, 0.25, -torch.inf, 0.75, -torch.inf]).where(
        torch.tensor([True, False, True, False, True]), torch.tensor([0, 0.25, 0, 0.75, 0]).log()
    )
    almost_one = 1 - 2.0**-53
    noise = torch.tensor([0.0, 0.2499, 0.25, almost_one], dtype=torch.float64)
    assert draw(log_probs.expand(4, -1), noise).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("seed", range(5))
def test_the_largest_noise_stays_in_the_vocabulary(seed: int) -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(seed)) * 5
    logits[:, -300:] = -torch.inf
    tokens = draw(sampling_log_probs(logits), torch.full((64,), 1 - 2.0**-53, dtype=torch.float64))
    assert int(tokens.max()) < 700


def test_temperature_divides_the_logits_and_zero_means_one() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.bfloat16)
    assert torch.equal(sampling_log_probs(logits, 0.5), torch.log_softmax(logits.double() / 0.5, -1).float())
    assert torch.equal(sampling_log_probs(logits, 0.0, 0.5), torch.log_softmax(logits.double(), -1).float())


@pytest.mark.parametrize(("vocabulary", "spread"), [(49_152, 5.0), (151_936, 3.0), (32_000, 8.0)])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_log_probs_of_a_real_vocabulary_are_exact(vocabulary: int, spread: float, top_p: float) -> None:
    logits = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(0)) * spread - 20
    found = sampling_log_probs(logits, 0.9, top_p)
    exact = (logits / 0.9).double().log_softmax(-1).masked_fill(found == -torch.inf, -torch.inf).log_softmax(-1)
    probable = exact > -8  # float32 numbers beyond are farther apart
    assert float((found.double() - exact)[probable].abs().max()) < 7e-7


def test_top_p_keeps_the_nucleus_and_renormalises() -> None:
    probs = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    kept = sampling_log_probs(probs.log(), top_p=0.6).exp()
    torch.testing.assert_close(kept, torch.tensor([[0.0, 2 / 3, 0.0, 1 / 3]]))
    tiny = sampling_log_probs(probs.log(), top_p=1e-6).exp()
    torch.testing.assert_close(tiny, torch.tensor([[0.0, 1.0, 0.0, 0.0]]))


def test_most_probable_is_sorted_and_pads_what_cannot_be_drawn() -> None:
    topk = most_probable(sampling_log_probs(torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log(), top_p=0.6), 3)
    assert topk.ids.dtype == torch.int32
    assert topk.ids.tolist() == [[1, 3, -1]]
    assert topk.log_probs[0, 2] == -torch.inf
