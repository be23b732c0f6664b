"""`dppo_combine` against `policy_loss` in float32, on log-probs that no softmax need have produced."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_dppo.algorithms import (
    Objective,
    PolicyLossInputs,
    PolicyLossOutput,
    TopKLogProbs,
    policy_loss,
    preset,
    topk_partition,
)
from megatron_dppo.kernels.encoding import number_of
from megatron_dppo.kernels.reference import ROWS
from megatron_dppo.types import RolloutTokens
from tests.support.kernel_host import (
    Tokens,
    combined,
    compiled_presets,
    random_tokens,
    run,
    shards_of,
    statistics_of,
)

NUM_TOKENS = 400
NUM_COLUMNS = 5
NO_ADVANTAGE = 12  # and its multiples
OBJECTIVES = [
    *compiled_presets(NUM_COLUMNS),
    preset("dppo_binary_tv_decoupled", delta=0, ratio_cap=1.5, entropy_coef=0.1),
    preset("dppo_topk_tv", include_other=False, delta=0.02),
    preset("dppo_topk_tv", sampled_token="replace", delta=0.02),
    preset("dppo_topk_kl", sampled_token="replace", delta=0),
    preset("dppo_topk_kl", delta=math.inf),
    *(preset("dppo_binary_kl", delta_low=low, delta_high=high) for low, high in ((0.5, 0.01), (0.01, 0.5))),
    *(preset("grpo", eps_low=low, eps_high=high) for low, high in ((0.05, 0.9), (0.9, 0.05))),
]


def hard_tokens(seed: int) -> tuple[Tokens, torch.Tensor]:
    """Tokens, and one shard's statistics that give them log-probs near 0, above it, far below and -inf."""
    generator = torch.Generator().manual_seed(seed)

    def log_masses() -> torch.Tensor:
        """[N, 1 + K] of distributions from flat to certain; the tail from 0 to everything."""
        scale = torch.logspace(-1, 1.6, NUM_TOKENS)[:, None]
        logits = scale * torch.randn(NUM_TOKENS, 2 + NUM_COLUMNS, generator=generator)
        return logits.log_softmax(-1)[:, : 1 + NUM_COLUMNS]

    rollout = log_masses()
    policy = torch.where(torch.arange(NUM_TOKENS)[:, None] % 2 == 0, rollout, log_masses())
    policy = policy + torch.randn(policy.shape, generator=generator) * 0.01
    odd = torch.arange(NUM_TOKENS) % 16
    policy[odd == 1, 0] = -math.inf
    policy[odd == 3, 2] = -math.inf
    policy[odd == 5] = -math.inf
    policy[odd == 5, 0] = 1e-5  # rounding above 0
    rollout[odd == 7, 3] = -math.inf
    policy[odd == 9, 0], rollout[odd == 9, 0] = 0.0, -1e-4
    policy[NO_ADVANTAGE, 0], rollout[NO_ADVANTAGE, 0] = -1.0, -200.0  # a ratio of inf
    # The sampled token is one of the Top-K in a third of the rows, and has that column's log-probs.
    ids = torch.arange(1, 1 + NUM_COLUMNS).expand(NUM_TOKENS, -1).contiguous()
    where = torch.randint(0, 3 * NUM_COLUMNS, (NUM_TOKENS,), generator=generator)
    is_among = where < NUM_COLUMNS
    column = where.clamp(max=NUM_COLUMNS - 1)[:, None]
    for masses in (policy, rollout):
        masses[:, 1:].scatter_(
            1, column, torch.where(is_among[:, None], masses[:, :1], masses[:, 1:].gather(1, column))
        )
    num_used = torch.randint(0, 1 + NUM_COLUMNS, (NUM_TOKENS, 1), generator=generator)
    num_used[NUM_TOKENS // 2 :] = NUM_COLUMNS
    ids = torch.where(torch.arange(NUM_COLUMNS) < num_used, ids, -1)
    advantages = torch.randn(NUM_TOKENS, generator=generator)
    advantages[::NO_ADVANTAGE] = 0
    is_learning = torch.rand(NUM_TOKENS, generator=generator) > 0.05
    is_learning[NO_ADVANTAGE] = True
    weights = torch.rand(NUM_TOKENS, generator=generator)
    weights[::13] = 0
    tokens = Tokens(
        logits=torch.empty(0),
        targets=torch.where(is_among, where + 1, 99),
        topk_ids=ids.int(),
        topk_rollout_log_probs=rollout[:, 1:].masked_fill(ids < 0, math.nan).contiguous(),
        rollout_log_probs=rollout[:, 0].contiguous(),
        old_log_probs=(rollout[:, 0] + 0.3 * torch.randn(NUM_TOKENS, generator=generator)),
        advantages=advantages,
        is_learning=is_learning,
        token_weights=weights,
    )
    maximum, total, weighted = torch.zeros(NUM_TOKENS, 1), torch.ones(NUM_TOKENS, 1), -torch.ones(NUM_TOKENS, 1)
    return tokens, torch.cat([maximum, total, weighted, policy / math.log(2)], dim=1)[None]


def float32_loss(
    tokens: Tokens, objective: Objective, planes: torch.Tensor, topk: torch.Tensor
) -> PolicyLossOutput:
    """`policy_loss` of the kernel's own log-probs and entropy."""
    own, entropy = planes[ROWS.index("log_probs")], planes[ROWS.index("entropy")]
    inputs = PolicyLossInputs.of(
        tokens.record(), own, topk_log_probs=topk, entropy=entropy, response_lengths=None
    )
    return policy_loss(objective, inputs)


def roundoff_of_divergences(
    tokens: Tokens, objective: Objective, planes: torch.Tensor, topk: torch.Tensor
) -> torch.Tensor:
    """[N] Three times what one rounding of each number in a sum of float32 terms makes.

    A Top-K KL is the one that has large numbers in it. An outcome's term q (log q - log p) has the rounding of
    both log-masses, and 1 - sum(p) has the error of 1, however small it is.
    """
    eps = torch.finfo(torch.float32).eps
    if objective.divergence != "topk_kl":
        return torch.full_like(tokens.rollout_log_probs, 4 * eps)
    policy, rollout = topk_partition(
        TopKLogProbs(tokens.topk_ids, tokens.topk_rollout_log_probs, topk),
        tokens.targets,
        planes[ROWS.index("log_probs")],
        tokens.rollout_log_probs,
        top_k=objective.top_k,
        sampled_token=objective.sampled_token,
    )
    masses, sizes = rollout.exp(), 1 + policy.abs() + rollout.abs()
    terms = torch.where(masses > 0, masses * sizes, 0).sum(1)
    tail = masses[:, -1] * torch.log1p(eps / policy[:, -1].exp())
    return 3 * (eps * (1 + terms) + torch.where(masses[:, -1] > 0, tail, 0))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.name)
def test_combine_equals_policy_loss_in_float32(kernels: Any, objective: Objective) -> None:
    num_masked = 0
    for seed in range(3):
        tokens, statistics = hard_tokens(seed)
        planes, topk = combined(kernels, tokens, statistics, objective)
        rows = dict(zip(ROWS, planes, strict=True))
        out = float32_loss(tokens, objective, planes, topk)
        noise = roundoff_of_divergences(tokens, objective, planes, topk)
        is_close = (rows["divergence"] - out.divergence).abs() <= noise + 1e-5 * out.divergence
        assert (is_close | (rows["divergence"] == out.divergence)).all()
        assert (rows["divergence"] >= 0).all()
        torch.testing.assert_close(rows["ratio"], out.ratio, rtol=1e-6, atol=0)
        deltas = [number_of(objective, side) for side in ("delta_low", "delta_high")]
        is_near = torch.stack([(out.divergence - delta).abs() < noise + 1e-6 for delta in deltas]).any(0)
        is_near &= out.divergence != rows["divergence"]
        same = rows["weight"].bool() == out.mask
        assert (same | is_near).all()
        num_masked += int((tokens.is_learning & ~out.mask).sum())
        torch.testing.assert_close(rows["coefficient"][same], out.coefficient[same], rtol=1e-6, atol=0)
        is_live = (out.coefficient != 0) & (tokens.token_weights != 0)
        weight = torch.where(tokens.is_learning, tokens.token_weights, 0)
        of_log_prob = torch.where(is_live, -out.coefficient * weight, 0)
        of_entropy = -objective.entropy_coef * weight
        loss = torch.where(is_live, of_log_prob * rows["log_probs"], 0) + of_entropy * rows["entropy"]
        for name, exact in {
            "log_prob_gradient": of_log_prob,
            "entropy_gradient": of_entropy,
            "loss": loss,
        }.items():
            torch.testing.assert_close(rows[name][same], exact[same], rtol=1e-5, atol=1e-7)  # pyright: ignore
        if bool(same.all()):
            torch.testing.assert_close(rows["loss"].sum(), out.loss_sum, rtol=1e-4, atol=1e-4)
    assert num_masked > 0 or objective.rule == "none" or objective.delta == math.inf


def test_the_last_used_column_is_replaced_wherever_it_is(kernels: Any) -> None:
    num_used = torch.tensor([0, 1, 31, 32, 33, 40, 63, 64])
    rows, columns = len(num_used), torch.arange(64)
    ids = torch.where(columns < num_used[:, None], columns, -1).int()
    tokens = Tokens.of(
        torch.full((rows,), math.log(0.1)),
        targets=torch.full((rows,), 99),
        topk_ids=ids,
        topk_rollout_log_probs=torch.full((rows, 64), math.log(0.01)),
    )
    policy = torch.cat([torch.tensor([0.2]), (1 + columns) / 4000]).expand(rows, -1)  # each column its own
    begin = torch.tensor([0.0, 1.0, 0.0]).expand(rows, -1)
    statistics = torch.cat([begin, policy.log2()], dim=1)[None]
    for include_other in (True, False):
        objective = preset("dppo_topk_tv", top_k=64, sampled_token="replace", include_other=include_other)
        planes, topk = combined(kernels, tokens, statistics, objective)
        expected = float32_loss(tokens, objective, planes, topk).divergence
        torch.testing.assert_close(planes[ROWS.index("divergence")], expected, rtol=1e-5, atol=1e-6)


def test_rows_that_do_not_learn_are_neutral(kernels: Any) -> None:
    tokens, statistics = hard_tokens(0)
    statistics[:, ~tokens.is_learning] = math.nan
    planes, topk = combined(kernels, tokens, statistics, preset("dppo_topk_kl", entropy_coef=0.1))
    ignored = planes[:, ~tokens.is_learning]
    assert (ignored[ROWS.index("ratio")] == 1).all()
    assert (ignored[[i for i, name in enumerate(ROWS) if name != "ratio"]] == 0).all()
    assert torch.isneginf(topk[~tokens.is_learning]).all()
    assert torch.isneginf(topk[tokens.topk_ids < 0]).all()


def test_without_options_all_learn_with_weight_1(kernels: Any) -> None:
    tokens, statistics = hard_tokens(0)
    everything = Tokens.of(tokens.rollout_log_probs, targets=tokens.targets, advantages=tokens.advantages)
    objective = preset("dppo_binary_kl")
    expected, _ = combined(kernels, everything, statistics[:, :, :4].contiguous(), objective)
    got, topk = kernels.combine(
        statistics[:, :, :4].contiguous(),
        objective,
        RolloutTokens(
            targets=tokens.targets,
            rollout_log_probs=tokens.rollout_log_probs,
            advantages=tokens.advantages,
        ),
    )
    assert topk.shape == (len(tokens.targets), 0)
    assert torch.equal(got, expected)


def test_an_infinite_kl_masks(kernels: Any) -> None:
    tokens, statistics = hard_tokens(0)
    objective = preset("dppo_binary_kl", delta=1e30)
    planes, _ = combined(kernels, tokens, statistics, objective)
    rows = dict(zip(ROWS, planes, strict=True))
    is_infinite = rows["divergence"].isposinf()
    moves_away = torch.where(
        tokens.advantages > 0,
        rows["log_probs"] > tokens.rollout_log_probs,
        (tokens.advantages < 0) & (rows["log_probs"] < tokens.rollout_log_probs),
    )
    assert (is_infinite & moves_away).any()
    assert torch.equal(rows["weight"] == 0, ~tokens.is_learning | (is_infinite & moves_away))


@pytest.mark.parametrize("num_shards", [2, 8])
def test_a_nan_logit_shows_wherever_it_is(kernels: Any, num_shards: int) -> None:
    tokens = replace(random_tokens(12, 300, 3), is_learning=torch.ones(12, dtype=torch.bool))
    logits = tokens.logits.clone()
    columns = torch.linspace(0, 299, 12).long()
    logits[torch.arange(12), columns] = math.nan
    # A shard that knows nothing but -inf and the NaN.
    logits[11, 290:299] = -math.inf
    result = run(kernels, replace(tokens, logits=logits), preset("dppo_binary_tv"), num_shards=num_shards)
    for name in ("log_probs", "entropy", "divergence", "ratio"):
        assert result.rows[name].isnan().all(), name
    live = (tokens.advantages != 0) & (tokens.token_weights != 0)
    assert result.rows["loss"][live].isnan().all()
    assert (result.gradient.isnan().sum(1) > 0)[live].all()
    assert (result.padding == 0).all()


def test_merging_depends_on_the_order_of_ranks_alone(kernels: Any) -> None:
    tokens = random_tokens(24, 300, 20)
    objective = preset("dppo_topk_kl", entropy_coef=0.01)
    for num_shards in (1, 2, 4, 8):
        shards = shards_of(tokens, num_shards, math.nan)
        results = []
        for _rank in range(2):  # each merges its own copy of what was gathered
            statistics = statistics_of(kernels, tokens, shards, with_entropy=True)
            results.append(combined(kernels, tokens, statistics.clone(), objective))
        assert torch.equal(results[0][0], results[1][0])
        assert results[0][1] is not None and results[1][1] is not None
        assert torch.equal(results[0][1], results[1][1])
