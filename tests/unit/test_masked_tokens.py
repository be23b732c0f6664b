"""Masked tokens in context: those farthest out, whichever rank held them, with the tokens around them."""

import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megatron_dppo.data.batches.packing import pack, placeholder, token_slice
from megatron_dppo.metrics.masked_tokens import FARTHEST, TOKENS_AFTER, TOKENS_BEFORE, MaskedTokens
from megatron_dppo.types import Microbatch, Sample

LENGTHS = ((9, 120), (3, 40), (30, 71), (5, 6), (17, 90))  # prompt and whole


def _sample(number: int, prompt_length: int, length: int) -> Sample:
    generator = torch.Generator().manual_seed(number)
    num_tokens = length - prompt_length
    return Sample(
        id=f"s{number}",
        group_id="g",
        tokens=torch.randint(0, 50, (length,), generator=generator),
        prompt_length=prompt_length,
        loss_mask=torch.rand(num_tokens, generator=generator) < 0.9,
        rollout_log_probs=torch.rand(num_tokens, generator=generator).log(),
        finish_reason="stop",
        advantage=(-1.0) ** number * (1 + number),
    )


@dataclass(frozen=True)
class _Evaluated:
    """A micro-batch and the loss's results per token, [T] each."""

    microbatch: Microbatch
    mask: Tensor
    divergence: Tensor
    log_probs: Tensor


def _evaluated(numbers: range) -> _Evaluated:
    samples = [_sample(number, *LENGTHS[number]) for number in numbers]
    microbatch = pack([replace(s, token_weights=torch.ones(s.response_length)) for s in samples])
    generator = torch.Generator().manual_seed(numbers.start)
    size = microbatch.tokens.numel()
    divergence = (torch.rand(size, generator=generator) * 8).round() / 8  # many are equal
    divergence[torch.rand(size, generator=generator) < 0.05] = math.inf
    mask = torch.rand(size, generator=generator) < 0.4
    return _Evaluated(microbatch, mask, divergence, torch.rand(size, generator=generator).log())


STEP = [_evaluated(range(3)), _evaluated(range(3, 5))]


def _rows(states: list[MaskedTokens]) -> list[dict]:
    sent = [pickle.loads(pickle.dumps(tokens.state())) for tokens in states]
    return list(MaskedTokens().merge(sent).rows(lambda ids: " ".join(map(str, ids)), rollout=7))


def _whole(step: list[_Evaluated]) -> MaskedTokens:
    tokens = MaskedTokens()
    for j in step:
        tokens.add(j.microbatch, mask=j.mask, divergence=j.divergence, log_probs=j.log_probs)
    tokens.read_around([j.microbatch for j in step])
    return tokens


def _expected() -> Iterator[tuple[str, float, str, int]]:
    """By sign, divergence, sample and position: every masked token, from samples rather than micro-batches."""
    for evaluated in STEP:
        m = evaluated.microbatch
        for place, sample_id in enumerate(m.sample_ids):
            start, stop = map(int, m.cu_seqlens[place : place + 2])
            for t in range(start, stop):
                if m.loss_mask[t] and not evaluated.mask[t]:
                    sign = "+" if m.advantages[t] > 0 else "-"
                    yield sign, -float(evaluated.divergence[t]), sample_id, t - start + 1


def test_the_farthest_of_each_sign_are_listed_in_context() -> None:
    rows = _rows([_whole(STEP)])
    found = [(r["sign"], -float(r["divergence"]), r["sample"], r["position"]) for r in rows]
    ranked = sorted(_expected())
    assert found == [
        *[key for key in ranked if key[0] == "+"][:FARTHEST],
        *[key for key in ranked if key[0] == "-"][:FARTHEST],
    ]
    assert rows[0]["divergence"] == "inf" and rows[0]["rollout"] == 7
    for row in rows:
        number = int(row["sample"][1:])
        sample = _sample(number, *LENGTHS[number])
        tokens, place = sample.tokens.tolist(), row["position"]
        assert row["token_id"] == tokens[place] and row["token"] == str(tokens[place])
        assert row["before"].split() == list(map(str, tokens[max(0, place - TOKENS_BEFORE) : place]))
        assert row["after"].split() == list(map(str, tokens[place + 1 : place + 1 + TOKENS_AFTER]))
        mu = sample.rollout_log_probs[place - sample.prompt_length].exp()
        assert row["mu"] == pytest.approx(float(mu), rel=1e-5)
        assert (row["advantage"], row["sign"]) == (sample.advantage, "+-"[number % 2])


@pytest.mark.parametrize(("context", "tensor"), [(1, 2), (2, 1), (4, 2)])
def test_any_layout_lists_the_same(context: int, tensor: int) -> None:
    """Each micro-batch on another data-parallel group, its tokens cut over context-parallel ranks."""
    ranks: list[MaskedTokens] = []
    for evaluated in STEP:
        for rank in range(context):
            own = token_slice(evaluated.microbatch, rank, context, tensor)
            part, is_padding = own.source.clamp(min=0), own.source < 0
            tokens = MaskedTokens()
            tokens.add(
                own.local(evaluated.microbatch),
                mask=evaluated.mask[part] & ~is_padding,
                divergence=evaluated.divergence[part],
                log_probs=evaluated.log_probs[part],
            )
            tokens.read_around([evaluated.microbatch])
            ranks.append(tokens)
    assert _rows(ranks) == _rows([_whole(STEP)])


def test_tokens_without_a_sample_are_not_listed() -> None:
    nameless = [replace(j, microbatch=replace(j.microbatch, sample_ids=())) for j in STEP]
    assert _rows([_whole(nameless)]) == []
    tokens = MaskedTokens()
    filler, zeros = placeholder(0, None), torch.zeros(2)
    tokens.add(filler, mask=zeros.bool(), divergence=zeros, log_probs=zeros)
    assert _rows([tokens]) == []
