"""Sums, means, maxima, quantiles and running sums over packed responses equal plain loops over each of them."""

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.algorithms import Responses

# Dyadic, so that float64 and Fraction agree to the bit on every sum.
NUMBERS = st.integers(-(2**12), 2**12).map(lambda n: n / 64)
PACKED = st.lists(st.lists(st.tuples(NUMBERS, st.booleans()), max_size=9), max_size=6).filter(any)
Row = list[tuple[float, bool]]


def learning(response: Row) -> list[Fraction]:
    """The values of the tokens that learn."""
    return [Fraction(value) for value, learns in response if learns]


def mean(values: list[Fraction]) -> float:
    """0 of none."""
    return float(sum(values) / len(values)) if values else 0.0


def quantile(values: list[Fraction], q: Fraction) -> float:
    """Linear between the two nearest ranks."""
    ranked, place = sorted(values), q * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return float(ranked[low] + (place - low) * (ranked[high] - ranked[low]))


def at_rank(values: list[Fraction], share: Fraction) -> float:
    """The smallest value that at least this share does not exceed."""
    return float(min(x for x in values if sum(y <= x for y in values) >= share * len(values)))


def packed(responses: list[Row], dtype: torch.dtype = torch.float64) -> tuple[Responses, torch.Tensor]:
    """The responses end to end, empty ones included; tokens that do not learn hold NaN."""
    tokens = [token for response in responses for token in response]
    learns = torch.tensor([learns for _, learns in tokens])
    values = torch.tensor([value if learns else math.nan for value, learns in tokens], dtype=dtype)
    return Responses(torch.tensor([len(response) for response in responses]), learns), values


def each(responses: list[Row], function: Callable[[list[Fraction]], float]) -> list[float]:
    """What a function makes of each response, for every token of it."""
    return [function(learning(response)) for response in responses for _ in response]


def before(responses: list[Row], function: Callable[[list[Fraction]], float]) -> list[float]:
    """The same over the tokens before each token of the response."""
    return [function(learning(response[:t])) for response in responses for t in range(len(response))]


@settings(deadline=None, max_examples=60)
@given(PACKED)
def test_sums_means_maxima_and_counts(responses: list[Row]) -> None:
    found, values = packed(responses)
    assert found.sum(values).tolist() == each(responses, lambda y: float(sum(y)))
    assert found.mean(values).tolist() == each(responses, mean)
    assert found.max(values).tolist() == each(responses, lambda y: float(max(y, default=-math.inf)))
    assert found.num_tokens.tolist() == each(responses, lambda y: max(len(y), 1))
    assert found.index.tolist() == [n for n, response in enumerate(responses) for _ in response]


@settings(deadline=None, max_examples=60)
@given(PACKED)
def test_running_sums_begin_with_each_response(responses: list[Row]) -> None:
    found, values = packed(responses)
    assert found.before(values).tolist() == before(responses, lambda y: float(sum(y)))
    assert found.num_before.tolist() == before(responses, len)
    assert found.lowest_before(values).tolist() == before(responses, lambda y: float(min(y, default=math.inf)))


@settings(deadline=None, max_examples=60)
@given(PACKED, st.integers(0, 16).map(lambda n: n / 16))
def test_quantiles(responses: list[Row], q: float) -> None:
    found, values = packed(responses)
    expected = each(responses, lambda y: quantile(y, Fraction(q)) if y else math.nan)
    learns = found.is_learning
    ranked = each(responses, lambda y: at_rank(y, Fraction(q)) if y else math.nan)
    assert found.at_rank(values, q)[learns].tolist() == torch.tensor(ranked).double()[learns].tolist()
    assert found.quantile(values, q)[learns].tolist() == torch.tensor(expected).double()[learns].tolist()
    for response in responses:
        if own := [float(value) for value in learning(response)]:
            assert float(torch.tensor(own).double().quantile(q)) == pytest.approx(
                quantile(learning(response), Fraction(q))
            )


@settings(deadline=None, max_examples=30)
@given(PACKED, st.sampled_from([torch.float32, torch.float64]))
def test_packing_does_not_show(responses: list[Row], dtype: torch.dtype) -> None:
    """A response's results are bitwise equal alone, next to an infinite one, and with empty ones around it."""
    infinite: Row = [(math.inf, True), (1.0, True)]
    found, values = packed([[], infinite, *responses, [], infinite, []], dtype)
    scaled = values / 3  # not dyadic
    place = 2
    for response in responses:
        if not response:
            continue
        alone, own = packed([response], dtype)
        here = slice(place, place + len(response))
        for name in ("sum", "mean", "max", "before", "lowest_before"):
            together = getattr(found, name)(scaled)
            assert together.dtype == dtype
            assert torch.equal(together[here], getattr(alone, name)(own / 3)), name
        if bool(alone.is_learning.any()):
            assert torch.equal(found.quantile(scaled, 0.9)[here], alone.quantile(own / 3, 0.9))
            assert torch.equal(found.at_rank(scaled, 0.9)[here], alone.at_rank(own / 3, 0.9))
        place += len(response)


def test_infinite_values_stay_in_their_response() -> None:
    responses: list[Row] = [[(1.0, True), (math.inf, True), (2.0, True)], [], [(3.0, True), (5.0, False)]]
    found, values = packed(responses)
    assert found.sum(values).tolist() == [math.inf] * 3 + [3.0] * 2
    assert found.before(values).tolist() == [0.0, 1.0, math.inf, 0.0, 3.0]
    assert found.max(values).tolist() == [math.inf] * 3 + [3.0] * 2
    assert found.quantile(values, 0.5).tolist() == [2.0] * 3 + [3.0] * 2
    assert found.quantile(values, 0.75).tolist() == [math.inf] * 3 + [3.0] * 2


def test_no_tokens_at_all() -> None:
    found = Responses(torch.tensor([0, 0]), torch.ones(0, dtype=torch.bool))
    values = torch.ones(0)
    for made in (found.sum(values), found.mean(values), found.max(values), found.before(values)):
        assert made.shape == (0,)
    assert found.quantile(values, 0.9).shape == found.at_rank(values, 0.9).shape == (0,)
    assert found.lowest_before(values).shape == (0,)


def test_long_responses_are_summed_in_float64() -> None:
    """Of float32 values that float32 could not add up."""
    values = torch.full((3000,), 0.1)
    values[0] = 2.0**24
    found = Responses(torch.tensor([2000, 1000]), torch.ones(3000, dtype=torch.bool))
    exact = [math.fsum(values[:2000].tolist()), math.fsum(values[2000:].tolist())]
    assert found.sum(values)[[0, 2000]].tolist() == torch.tensor(exact).tolist()
    running = found.before(values)
    assert running[1999].item() == torch.tensor(math.fsum(values[:1999].tolist())).item()
    assert running[2000].item() == 0


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7, 0.9, 0.99])
def test_a_share_of_whole_tokens_is_not_rounded_up(share: float) -> None:
    """.9 of 10 tokens is 9, of 11 it is 10, although .9 has no exact float."""
    for count in (1, 7, 10, 11, 30, 70, 100, 1000):
        values = torch.arange(1.0, count + 1)
        found = Responses(torch.tensor([count]), torch.ones(count, dtype=torch.bool))
        assert found.at_rank(values, share)[0] == math.ceil(Fraction(str(share)) * count), count
