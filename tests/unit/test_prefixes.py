"""Prefixes that sequences share: each distinct token once, attention and loss as of every sequence alone."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.data.batches.prefixes import Path, RepeatedRows, SharedPrefixes, branches, tokens_in_loss
from megatron_dppo.models.attention import PackedAttentionForm
from megatron_dppo.models.packed_attention import PaddedBatches, VarlenSequences
from megatron_dppo.types import Microbatch
from tests.support import varlen_reference
from tests.support.shared_prefixes import CASES, alone, microbatch_of, spans_of_prefixes
from tests.unit.test_packed_attention import attention_with_sinks


@pytest.fixture(scope="module", autouse=True)
def _varlen_on_cpus() -> None:
    varlen_reference.install()


# Few tokens and few routes: siblings, sequences that begin others, and branches of one token are common.
SEQUENCES = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8)), min_size=2, max_size=9), min_size=1
)


def distinct_prefixes(m: Microbatch) -> set[tuple[Any, ...]]:
    """Every prefix of a sequence, with its routes."""
    assert m.routed_experts is not None
    pairs = list(zip(m.tokens.tolist(), m.routed_experts.indices.flatten().tolist(), strict=True))
    starts = m.cu_seqlens.tolist()
    return {tuple(pairs[start:end]) for start, stop in pairwise(starts) for end in range(start + 1, stop + 1)}


@given(SEQUENCES, st.integers(0, 1 << 60))
def test_only_tokens_in_the_loss_have_rows_of_it_sequence_by_sequence(
    sequences: list[list[tuple[int, int]]], bits: int
) -> None:
    m = microbatch_of(sequences)
    mask = torch.tensor([bool(bits >> place & 1) for place in range(m.tokens.numel())])
    values = torch.arange(m.tokens.numel(), dtype=torch.float32)
    places, part = tokens_in_loss(replace(m, loss_mask=mask, rollout_log_probs=-values))
    expected = [range(start, stop) for start, stop in pairwise(m.cu_seqlens.tolist())]
    if not mask.any():
        assert (places.tolist(), part.loss_mask.tolist()) == ([0], [False])
        mask[0] = True
    kept = [[place for place in span if mask[place]] for span in expected]
    assert places.tolist() == [place for each in kept for place in each]
    starts = part.cu_seqlens.tolist()
    assert [(-part.rollout_log_probs[a:b]).tolist() for a, b in pairwise(starts)] == kept
    assert torch.equal(part.position_ids, m.position_ids[places])


@given(SEQUENCES)
def test_each_distinct_token_is_forwarded_once_and_each_sequence_finds_its_own(
    sequences: list[list[tuple[int, int]]],
) -> None:
    m = microbatch_of(sequences)
    assert m.routed_experts is not None
    prefixes = SharedPrefixes.of(m)
    if prefixes is None:
        assert len(distinct_prefixes(m)) == m.tokens.numel()
        return
    tokens, sources = prefixes.tokens, prefixes.sources
    assert tokens.numel() == len(distinct_prefixes(m)) == int(prefixes.num_own.sum())
    for values in (m.tokens, m.position_ids, m.routed_experts.indices):
        assert torch.equal(values[tokens][sources], values)
    distinct = prefixes.distinct(m)
    starts, lengths = m.cu_seqlens[:-1].long(), m.cu_seqlens.diff().long()
    own = [sources[s + n - k : s + n] for s, n, k in zip(starts, lengths, prefixes.num_own, strict=True)]
    assert torch.equal(torch.cat(own), torch.arange(len(tokens))), (
        "queries are in order, and the last of the keys"
    )
    assert torch.equal(distinct.cu_seqlens.diff(), prefixes.num_own[prefixes.num_own > 0])


@given(SEQUENCES)
def test_branches_come_after_their_parents_and_share_as_much_with_the_one_before(
    sequences: list[list[tuple[int, int]]],
) -> None:
    paths = [Path(np.array(s)[:, 0], np.array(s)[:, 1:]) for s in sequences]
    found = list(branches(paths))
    assert sorted(each.sequence for each in found) == list(range(len(paths)))
    for place, branch in enumerate(found):
        before = [each.sequence for each in found[:place]]
        common = [paths[branch.sequence].num_in_common(paths[other], 0) for other in before]
        assert branch.num_shared == max(common, default=0) == (common[-1] if common else 0)
        assert branch.parent in (before if branch.num_shared else [-1, *before])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(6, 8))
def test_gradients_of_repeated_rows_add_up(rows: list[int], num_rows: int) -> None:
    values = torch.randn(num_rows, 2, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor(rows, dtype=torch.int64)
    repeated = RepeatedRows.of(index, num_rows)
    weights = torch.randn(len(rows), 2, 3, dtype=torch.float64)
    taken = repeated.take(values)
    assert torch.equal(taken, values[index])
    (expected,) = torch.autograd.grad(values[index], values, weights)
    (found,) = torch.autograd.grad(taken, values, weights)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(repeated.summed(weights), expected)


@pytest.mark.parametrize("form", [PaddedBatches, VarlenSequences])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (3, True)])
def test_attention_equals_attention_of_each_sequence(
    window: int | None, has_sinks: bool, case: str, form: PackedAttentionForm
) -> None:
    m = alone(CASES[case])
    spans, sources = spans_of_prefixes(m)
    num_tokens = int(sources.max()) + 1
    shapes = [(num_tokens, heads, dim) for heads, dim in ((4, 8), (2, 8), (2, 6))]  # values differ in size
    shapes += [(4,)] * has_sinks
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    query, key, value, *sinks = tensors
    sequences = sources.split(m.cu_seqlens.diff().tolist())
    options = window, sinks[0] if has_sinks else None
    expected = torch.cat(
        [attention_with_sinks(query[rows], key[rows], value[rows], *options) for rows in sequences]
    )
    output = form.of(spans).attend(query, key, value, None, *options)[sources]
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad(each, tensors, weights, retain_graph=True) for each in (output, expected)]
    for found, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-11, atol=1e-12)
