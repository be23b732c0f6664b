"""Single tokens in both engines: statistics by hand, responses out of micro-batches, rows, the plot."""

import json
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dppo.analysis.contrasts import PooledChange
from megatron_dppo.analysis.mismatch.measure import other_weights
from megatron_dppo.analysis.mismatch.results import NUM_BINS, in_words, kl_change, token_counts, write_plot
from megatron_dppo.config.schema import Config
from megatron_dppo.metrics.engine_comparison import (
    MeasuredResponse,
    Routes,
    are_of_other_weights,
    split_responses,
    token_rows,
    token_statistics,
)
from megatron_dppo.types import Microbatch, RolloutTopK

ROUTES: tuple[Routes, ...] = ("live", "replayed")
HALF, QUARTER = math.log(0.5), math.log(0.25)


def _response(pi: list[float], mu: list[float], **changes: Any) -> MeasuredResponse:
    """A response with the same probabilities for both ways of forwarding."""
    log_pi, log_mu = (torch.tensor(values).log() for values in (pi, mu))
    fields: dict[str, Any] = dict(
        prompt=torch.tensor([1, 2]),
        tokens=torch.arange(len(pi)),
        rollout_log_probs=log_mu,
        log_probs={"live": log_pi, "replayed": log_mu},
        topk_tv={},
    )
    return MeasuredResponse(**fields | changes)


def test_statistics_are_those_computed_by_hand() -> None:
    responses = [_response([0.5, 0.1], [0.25, 0.1]), _response([0.2], [0.4])]  # ratios 2, 1 and 1/2
    found = token_statistics(responses, "live")
    log2 = math.log(2)
    expected = {
        "num_tokens": 3,
        "abs_prob_diff_mean": (0.25 + 0 + 0.2) / 3,
        "tv_p50": 0.2,
        "tv_p99": 0.2 + 0.98 * 0.05,
        "tv_p999": 0.2 + 0.998 * 0.05,
        "tv_max": 0.25,
        "kl_k1": (-log2 + 0 + log2) / 3,
        "kl_k3": ((2 - 1 - log2) + 0 + (0.5 - 1 + log2)) / 3,
        "ratio_min": 0.5,
        "ratio_p001": 0.5 + 0.002 * 0.5,  # 0.1 % of the way over two gaps
        "ratio_p01": 0.5 + 0.02 * 0.5,
        "ratio_p50": 1,
        "ratio_p99": 1 + 0.98 * 1,
        "ratio_p999": 1 + 0.998 * 1,
        "ratio_max": 2,
        "log_prob_diff_mean": 2 * log2 / 3,
        "log_prob_diff_max": log2,
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-7), name


def test_equal_policies_are_no_distance_apart() -> None:
    found = token_statistics([_response([0.5, 0.1], [0.25, 0.1])], "replayed")
    assert found.pop("num_tokens") == 2
    ratios = {name for name in found if name.startswith("ratio")}
    assert {found[name] for name in ratios} == {1.0}
    assert {value for name, value in found.items() if name not in ratios} == {0.0}


@pytest.mark.parametrize(
    ("scale", "noise", "shift", "is_float32", "expected"),
    [
        (2.0, 1e-6, 0.0, True, False),
        (2.0, 0.05, 0.0, False, False),  # of bfloat16
        (2.0, 0.3, 0.0, False, False),  # of four bits
        (0.001, 0.002, 0.0, False, False),  # both sure of each token: rounding is all there is
        (2.0, 0.0, 2.0, False, True),  # without the temperature, or nearly
        (0.05, 0.08, 0.0, True, True),  # of a tiny model, whose distributions are nearly flat
        (2.0, 3.0, 0.0, False, True),
        (1e-5, 0.0, 7e-5, True, False),  # the largest mean difference of rounding is 1e-4 in float32
        (1e-5, 0.0, -1.4e-4, True, True),
        (1e-4, 0.0, -0.014, False, False),  # and .02 in bfloat16
        (1e-4, 0.0, 0.028, False, True),
        (2.0, 0.0, 0.35, False, False),  # its square is .37 times the variance, and .5 is the limit
        (2.0, 0.0, -0.48, False, True),  # .69 times
    ],
)
def test_rounding_is_distinguished_from_other_weights(
    scale: float, noise: float, shift: float, is_float32: bool, expected: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    log_mu = -3 - scale * torch.rand(500, generator=generator)
    log_pi = log_mu + shift + noise * torch.randn(500, generator=generator)
    assert are_of_other_weights(log_pi, log_mu, is_float32=is_float32) == expected


def test_a_flat_engine_and_one_that_is_not_finite_serve_other_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    log_pi, flat = -12 * torch.rand(500, generator=generator), torch.full((500,), -10.8)
    assert are_of_other_weights(log_pi, flat, is_float32=False)
    assert are_of_other_weights(
        log_pi, log_pi.clone().index_fill_(0, torch.tensor([3]), torch.nan), is_float32=True
    )
    assert not are_of_other_weights(flat[:1], log_pi[:1], is_float32=True)


@pytest.mark.parametrize("replayed", ["mu", "pi"])
def test_the_command_concludes_that_an_engine_serves_other_weights(replayed: str) -> None:
    """If the rollout's routes mend it, the weights are the same and the routes are not."""
    log_pi, log_mu = -9 * torch.rand(2, 200, generator=torch.Generator().manual_seed(0))
    response = MeasuredResponse(
        prompt=torch.tensor([1]),
        tokens=torch.arange(200),
        rollout_log_probs=log_mu,
        log_probs={"live": log_pi, "replayed": log_mu if replayed == "mu" else log_pi},
        topk_tv={},
    )
    statistics: dict[Routes, Any] = {routes: token_statistics([response], routes) for routes in ROUTES}
    said = other_weights(Config.model_validate({"model": {"load": "tied"}}), [response], statistics)
    if replayed == "mu":
        assert said is None
    else:
        assert said is not None and said.startswith(
            "the transformers engine does not serve the weights of tied"
        )


@pytest.mark.parametrize(("weights", "is_found"), [("model", True), ("float32", True), ("bfloat16", False)])
def test_an_engine_with_the_trainer_s_float32_gets_the_limit_of_float32(weights: str, is_found: bool) -> None:
    """The log-probs differ by .016 in the mean: too much for float32, and rounding for bfloat16."""
    generator = torch.Generator().manual_seed(0)
    log_mu = -3 - 0.01 * torch.rand(500, generator=generator)
    log_pi = log_mu + 0.02 * torch.randn(500, generator=generator)
    response = _response(
        [0.5], [0.5], tokens=torch.arange(500), rollout_log_probs=log_mu, log_probs={"live": log_pi}
    )
    tables = {"model": {"dtype": "float32"}, "rollout": {"transformers": {"weights": weights}}}
    statistics: dict[Routes, Any] = {"live": token_statistics([response], "live")}
    assert (other_weights(Config.model_validate(tables), [response], statistics) is not None) == is_found


def test_topk_tv_is_averaged_where_all_have_it() -> None:
    topk_tv: dict[Routes, Tensor] = {"live": torch.tensor([0.25, 0.75]), "replayed": torch.zeros(2)}
    known, unknown = _response([0.5, 0.1], [0.5, 0.1], topk_tv=topk_tv), _response([0.5], [0.5])
    assert token_statistics([known], "live")["topk_tv_mean"] == 0.5
    assert token_statistics([known], "live")["topk_tv_max"] == 0.75
    assert "topk_tv_mean" not in token_statistics([known, unknown], "live")


def test_a_nan_is_seen_and_hopeless_tokens_stay_finite() -> None:
    broken = token_statistics([_response([math.nan, 0.5], [0.5, 0.5])], "live")
    for name in ("abs_prob_diff_mean", "kl_k3", "ratio_p50", "log_prob_diff_max"):
        assert math.isnan(broken[name]), name
    hopeless = token_statistics([_response([0.0], [0.5])], "live")
    assert hopeless["ratio_p50"] == pytest.approx(math.exp(-80))
    assert hopeless["log_prob_diff_max"] == math.inf


def test_nothing_was_sampled() -> None:
    assert token_statistics([], "live") == {"num_tokens": 0}


def _microbatch(topk: RolloutTopK | None = None) -> Microbatch:
    """Two packed sequences, 4 and 3 tokens; the second has nothing that learns."""
    scored = torch.tensor([False, True, True, False, False, False, False])
    zeros = torch.zeros(7)
    return Microbatch(
        tokens=torch.tensor([5, 6, 7, 8, 9, 10, 11]),
        position_ids=torch.tensor([0, 1, 2, 3, 0, 1, 2]),
        targets=torch.tensor([6, 7, 8, 0, 10, 11, 0]),
        cu_seqlens=torch.tensor([0, 4, 7], dtype=torch.int32),
        loss_mask=scored,
        rollout_log_probs=torch.where(scored, torch.tensor([0, HALF, QUARTER, 0, 0, 0, 0]), 0.0),
        advantages=zeros,
        token_weights=zeros,
        topk=topk,
    )


def test_responses_come_out_of_a_microbatch() -> None:
    live = torch.arange(7.0)[:, None]
    (response,) = split_responses(_microbatch(), {"live": live, "replayed": live + 10})
    assert response.prompt.tolist() == [5, 6]
    assert response.prompt.untyped_storage().nbytes() == 2 * 8  # a pickle has not the whole micro-batch
    assert response.tokens.tolist() == [7, 8]
    assert torch.equal(response.rollout_log_probs, torch.tensor([HALF, QUARTER]))
    assert {routes: values.tolist() for routes, values in response.log_probs.items()} == {
        "live": [1, 2],
        "replayed": [11, 12],
    }
    assert response.topk_tv == {}


def test_topk_tv_is_over_the_top_k_the_sampled_token_and_the_rest() -> None:
    """mu: .5 on the sampled 7, .25 on 3; then .25 on the sampled 8, .5 on 3. pi: .25 and .5, then as mu."""
    ids = torch.full((7, 2), -1, dtype=torch.int32)
    log_mu = torch.full((7, 2), -math.inf)
    ids[1], log_mu[1] = torch.tensor([7, 3]), torch.tensor([HALF, QUARTER])
    ids[2], log_mu[2] = torch.tensor([3, 4]), torch.tensor([HALF, math.log(0.125)])
    columns = torch.full((7, 3), -math.inf)
    columns[1] = torch.tensor([QUARTER, QUARTER, HALF])
    columns[2] = torch.tensor([QUARTER, HALF, math.log(0.125)])
    (response,) = split_responses(_microbatch(RolloutTopK(ids, log_mu)), {"live": columns})
    assert response.topk_tv["live"].tolist() == pytest.approx([0.25, 0.0])


def test_rows_are_json_with_every_digit() -> None:
    topk_tv: dict[Routes, Tensor] = {"live": torch.tensor([0.5]), "replayed": torch.tensor([0.25])}
    (row,) = token_rows([_response([math.nan], [0.1], topk_tv=topk_tv)])
    read = json.loads(json.dumps(row, allow_nan=False))
    log_mu = float(torch.tensor(0.1).log())
    assert read == {
        "prompt": [1, 2],
        "tokens": [0],
        "rollout_log_probs": [log_mu],
        "live_log_probs": ["NaN"],
        "replayed_log_probs": [log_mu],
        "live_topk_tv": [0.5],
        "replayed_topk_tv": [0.25],
    }


def test_plot_counts_each_token_in_its_bin(tmp_path: Any) -> None:
    pi, mu = [0.999, 0.995, 0.0, 1.0], [0.005, 0.002, 1.0, 1.0]
    counts = token_counts(*(torch.tensor(values).double().log() for values in (pi, mu)))
    last = NUM_BINS - 1
    assert counts.sum() == 4
    assert (counts[last, 0], counts[0, last], counts[last, last]) == (2, 1, 1), "rows are pi, columns mu"
    assert np.count_nonzero(token_counts(torch.tensor([math.nan]), torch.tensor([0.0]))) == 0
    write_plot(tmp_path / "plot.html", [_response([0.5], [0.25])], ["live", "replayed"], "a <title>")
    page = (tmp_path / "plot.html").read_text()
    assert "<title>a &lt;title&gt;</title>" in page and page.count("<image") >= 2
    assert not re.search(r'(src|href)="http', page), "it opens without a network"


@pytest.mark.parametrize(
    ("kl_k3", "words"),
    [
        ({"live": 0.04, "replayed": 0.01}, "lowers the KL (k3) by 75%"),
        ({"live": 0.01, "replayed": 0.02}, "raises the KL (k3) by 100%"),
        ({"live": 0.0, "replayed": 1e-9}, "replay cannot lower it. With replay it is 1.000e-09"),
        ({"live": math.nan, "replayed": 0.1}, "not finite: nan with live routes"),
        ({"live": 0.1}, "The model has no experts"),
    ],
)
def test_effect_of_replay_in_words(kl_k3: dict[str, float], words: str) -> None:
    assert words in in_words({routes: {"kl_k3": value} for routes, value in kl_k3.items()}, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            PooledChange(-0.75, -0.8, -0.5, 3),
            "by 75% on these tokens (95% interval over responses: -80% to -50%).",
        ),
        (PooledChange(-0.75, -0.8, 0.1, 3), "-80% to +10%; they do not decide the sign)."),
        (PooledChange(-0.75, math.nan, math.nan, 1), "by 75% on these tokens."),
    ],
)
def test_the_sentence_has_an_interval_over_responses(change: PooledChange, words: str) -> None:
    assert words in in_words({"live": {"kl_k3": 0.04}, "replayed": {"kl_k3": 0.01}}, change)


def test_the_change_by_replay_is_of_all_tokens() -> None:
    """Responses of one and of three tokens: a response weighs as many tokens as it has."""
    mu = torch.tensor([0.5, 0.5, 0.5]).log()
    live, replayed = torch.tensor([0.25, 0.5, 0.5]).log(), torch.tensor([0.4, 0.5, 0.5]).log()
    long = _response([0.5] * 3, [0.5] * 3, log_probs={"live": live, "replayed": replayed})
    short = _response([0.5], [0.5], log_probs={"live": mu[:1] - 1, "replayed": mu[:1] + 1})
    before = (-0.5 + math.log(2) + math.exp(-1)) / 4  # r - 1 - log r with r = 1/2 and 1/e
    after = (-0.2 - math.log(0.8) + math.e - 2) / 4  # with r = .8 and e
    found = kl_change([long, short])
    assert found is not None and found.num_pairs == 2
    assert found.change == pytest.approx(after / before - 1, rel=1e-6)
    assert found.low <= found.change <= found.high
    assert kl_change([_response([0.5], [0.5], log_probs={"live": mu[:1]})]) is None
    assert kl_change([]) is None
