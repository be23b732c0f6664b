"""Computes a gradient step's metrics from its tokens: mismatch, masks, the performance bound, and staleness.

The functions take detached tensors and add to a `Metrics`. All arithmetic is in float64. Ratios and both KL
estimators clamp the log-ratio log pi - log mu to +-LOG_RATIO_LIMIT, so that one extreme token gives a
huge but finite number, also in float32 trackers. A NaN on a learning token is reported, never dropped.

`theory/*` estimates the paper's performance bound from a mini-batch (`tests/support/exact_bounds.py` computes
it exactly on problems with enumerable responses). The mean over the mini-batch estimates the expectation over
mu. Advantages replace rewards: a baseline changes no term of Theorem 3.1, subtracting the group mean scales the
surrogate by 1 - 1/G, and `normalize_advantage_std` rescales all terms. xi is the largest |A| of the mini-batch,
and T its longest response. The linear term needs the mean of the total variation. |r - 1| / 2 of the sampled
token is an unbiased estimate (Eq. 10), if mu can sample every token. Binary-TV has less noise, but its mean is
too small. The quadratic term needs the maximum of the total variation, and uses the largest Binary-TV, |A| and
length of the mini-batch. Each is at most the true maximum, so the term is too small, and the smaller of both
terms may be too. Nothing here is a guarantee.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megatron_dppo.algorithms import Objective
from megatron_dppo.algorithms.divergence import TopKLogProbs, topk_partition, topk_tv
from megatron_dppo.algorithms.loss_terms import terms_in_use
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.types import Microbatch, RolloutTokens, Sample, TrainBatch

LOG_RATIO_LIMIT = 80.0  # exp(80) = 5.5e34 fits float32
OLDEST_AGE = 8  # weight versions; older tokens are counted here too
_PER_RESPONSE = ("theory/surrogate", "theory/sum_tv", "theory/sum_tv_ratio")


def add_mismatch(
    metrics: Metrics,
    log_probs: Tensor,  # [T] log pi(y_t) of the trainer
    rollout_log_probs: Tensor,  # [T] log mu(y_t) of the sampling distribution
    loss_mask: Tensor,  # [T] bool
    *,
    prefix: str = "mismatch",
) -> None:
    """Add the distance of pi from mu over the learning tokens, which are samples of mu.

    `kl_k1` and `kl_k3` both estimate KL(mu || pi), with r = pi / mu. k1 = -log r is unbiased but noisy, and may
    be negative. k3 = r - 1 - log r has little noise, and is never negative.
    The prefixes "mismatch_live" and "mismatch_replayed" name the two paired forwards. "drift" names the policy
    at the start of a gradient step.
    """
    mask = loss_mask.bool()
    log_pi, log_mu = (x.detach()[mask].double() for x in (log_probs, rollout_log_probs))
    num_tokens = log_pi.numel()
    metrics.add_sum(f"{prefix}/num_tokens", num_tokens)
    if num_tokens == 0:
        return
    log_ratio = (log_pi - log_mu).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    tv = (log_pi.exp() - log_mu.exp()).abs()
    k3 = torch.expm1(log_ratio) - log_ratio
    sum_tv, sum_k1, sum_k3 = torch.stack([tv.sum(), -log_ratio.sum(), k3.sum()]).tolist()
    metrics.add_mean(f"{prefix}/abs_prob_diff_mean", sum_tv, num_tokens)
    metrics.add_mean(f"{prefix}/kl_k1", sum_k1, num_tokens)
    metrics.add_mean(f"{prefix}/kl_k3", sum_k3, num_tokens)
    metrics.add_histogram(f"{prefix}/tv", tv)
    metrics.add_log_ratios(f"{prefix}/ratio", log_ratio)


@torch.no_grad()
def add_prob_diff_extremes(
    metrics: Metrics,
    log_probs: Tensor,  # [T] log pi(y_t) of the trainer
    rollout_log_probs: Tensor,  # [T] log mu(y_t) of the sampling distribution
    loss_mask: Tensor,  # [T] bool
) -> None:
    """Add `drift/prob_diff_max` and `_min`, the largest and smallest pi - mu of the learning tokens."""
    rows = loss_mask.nonzero()[:, 0]
    if rows.numel() == 0:
        return
    difference = log_probs[rows].double().exp() - rollout_log_probs[rows].double().exp()
    smallest, largest = torch.stack(torch.aminmax(difference)).tolist()
    metrics.add_min("drift/prob_diff_min", smallest)
    metrics.add_max("drift/prob_diff_max", largest)


def prob_diff_so_far(of_rollout: Mapping[str, float], of_step: Mapping[str, float]) -> dict[str, float]:
    """Return `mismatch/prob_diff_max` and `_min` over a rollout's gradient steps up to this one.

    Args:
        of_rollout: Rollout metrics so far. A checkpoint stores them between two gradient steps.
        of_step: Metrics of the next gradient step. They have `drift/prob_diff_*` unless no token learnt.
    """
    extremes = Metrics()
    for values, area in ((of_rollout, "mismatch"), (of_step, "drift")):
        if f"{area}/prob_diff_max" in values:
            extremes.add_max("mismatch/prob_diff_max", values[f"{area}/prob_diff_max"])
            extremes.add_min("mismatch/prob_diff_min", values[f"{area}/prob_diff_min"])
    return extremes.values()


def add_topk_tv(
    metrics: Metrics,
    topk: TopKLogProbs,  # [T, K]
    targets: Tensor,  # [T] y_t
    log_probs: Tensor,  # [T] log pi(y_t) of the trainer
    rollout_log_probs: Tensor,  # [T] log mu(y_t) of the sampling distribution
    loss_mask: Tensor,  # [T] bool
    *,
    prefix: str,
) -> None:
    """Add `<prefix>/topk_tv_*`: total variation over mu's K most probable tokens, the sampled one, the rest."""
    rows = loss_mask.nonzero()[:, 0]
    if rows.numel() == 0:
        return
    of_rows = TopKLogProbs(*(x[rows] for x in (topk.ids, topk.rollout_log_probs, topk.log_probs)))
    sampled = [x.detach()[rows].clamp(max=0) for x in (log_probs, rollout_log_probs)]
    num_columns = topk.ids.shape[1]
    tv = topk_tv(*topk_partition(of_rows, targets[rows], *sampled, top_k=num_columns)).double()
    metrics.add_mean(f"{prefix}/topk_tv_mean", tv.sum(), tv.numel())
    metrics.add_histogram(f"{prefix}/topk_tv", tv)


def add_mismatch_by_age(
    metrics: Metrics,
    log_probs: Tensor,  # [T] log pi(y_t) of the trainer
    rollout_log_probs: Tensor,  # [T] log mu(y_t) of the sampling distribution
    loss_mask: Tensor,  # [T] bool
    weight_versions: Tensor,  # [T] int, version that sampled y_t; negative if unknown
    weight_version: int,
) -> None:
    """Add `mismatch_age_<n>/*`: the mismatch of tokens sampled n versions before `weight_version`.

    At age 0, pi and mu differ only by the engines. OLDEST_AGE counts older tokens as well.
    """
    ages = (weight_version - weight_versions).clamp(max=OLDEST_AGE)
    is_known = loss_mask.bool() & (weight_versions >= 0)
    for age in ages[is_known].unique().tolist():
        of_age = is_known & (ages == age)
        add_mismatch(metrics, log_probs, rollout_log_probs, of_age, prefix=f"mismatch_age_{age}")


def without_lone_age(values: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without `mismatch_age_0/*` if 0 is the only age. They would repeat `mismatch/*`."""
    ages = {name.partition("/")[0] for name in values if name.startswith("mismatch_age_")}
    repeats = "mismatch_age_0/" if ages == {"mismatch_age_0"} else None
    return {name: value for name, value in values.items() if repeats is None or not name.startswith(repeats)}


def add_agreement(metrics: Metrics, by_layer: Mapping[int, tuple[float, int]]) -> None:
    """Add `routing/agreement_*` from (sum of overlaps, positions) of each MoE layer, 0-based."""
    for layer, (total, count) in by_layer.items():
        metrics.add_mean(f"routing/agreement_layer_{layer}", total, count)
        metrics.add_mean("routing/agreement_mean", total, count)


def add_trust_region(metrics: Metrics, counts: Mapping[str, Tensor | float]) -> None:
    """Add `trust_region/*`: shares of masked tokens, from the counts that `policy_loss` returns.

    `masked_fraction_positive` and `_negative` are over tokens with A > 0 and A < 0. `bad_update_fraction`
    (A < 0 and mu - pi >= .5), `ratio_capped_fraction` and `divergence_mean` are over all learning tokens,
    masked or not, A = 0 included. The paper does not define the denominator for "bad updates". So there
    are two more shares: `bad_update_fraction_of_negative` divides by the tokens with A < 0, and `_of_kept` is
    the share of bad updates among the tokens that M keeps. Infinite divergences are left out of the mean.
    They are counted in their own fraction, and so are log-probs clamped to 0. For a soft trust region,
    `weight_positive` and `_negative` are the means of M.
    """
    num_tokens, num_positive, num_negative = (
        float(counts[name]) for name in ("num_loss_tokens", "num_positive", "num_negative")
    )
    add = metrics.add_mean
    add("trust_region/masked_fraction_positive", counts["num_masked_positive"], num_positive)
    add("trust_region/masked_fraction_negative", counts["num_masked_negative"], num_negative)
    add("trust_region/bad_update_fraction", counts["num_bad_updates"], num_tokens)
    add("trust_region/bad_update_fraction_of_negative", counts["num_bad_updates"], num_negative)
    num_masked = float(counts["num_masked_positive"]) + float(counts["num_masked_negative"])
    num_kept = num_tokens - num_masked
    add("trust_region/bad_update_fraction_of_kept", counts["num_bad_updates_kept"], num_kept)
    add("trust_region/ratio_capped_fraction", counts["num_ratio_capped"], num_tokens)
    num_infinite = float(counts.get("num_infinite_divergence", 0))
    add("trust_region/divergence_mean", counts["sum_divergence"], num_tokens - num_infinite)
    add("trust_region/infinite_divergence_fraction", num_infinite, num_tokens)
    if "sum_weight_positive" in counts:
        add("trust_region/weight_positive", counts["sum_weight_positive"], num_positive)
        add("trust_region/weight_negative", counts["sum_weight_negative"], num_negative)
    add("policy/clamped_log_probs_fraction", counts.get("num_clamped_log_probs", 0), num_tokens)


@torch.no_grad()
def add_clipped(
    metrics: Metrics,
    mask: Tensor,  # [T] bool: M
    *,
    log_probs: Tensor,  # [T] log pi(y_t)
    rollout_log_probs: Tensor,  # [T] log mu(y_t)
    entropy: Tensor,  # [T] nats, of pi
    advantages: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool
) -> None:
    """Add `clipped/*`: count, mean mu, mean pi and mean entropy of the masked learning tokens, by sign of A.

    Every masked token counts once. The lists of clipped tokens contain only the most frequent token ids, so
    means over those lists cover other tokens.
    """
    rows = (loss_mask.bool() & ~mask.bool() & (advantages != 0)).nonzero()[:, 0]
    pi, mu = log_probs[rows].double().exp(), rollout_log_probs[rows].double().exp()
    seen = torch.stack([torch.ones_like(pi), mu, pi, entropy[rows].double()])  # [4, masked tokens]
    is_positive = advantages[rows] > 0
    of_signs = [torch.where(of_sign, seen, 0.0).sum(1) for of_sign in (is_positive, ~is_positive)]
    for sign, sums in zip(("positive", "negative"), torch.stack(of_signs).tolist(), strict=True):
        num_tokens, *totals = sums
        metrics.add_sum(f"clipped/num_tokens_{sign}", num_tokens)
        for name, total in zip(("mu", "pi", "entropy"), totals, strict=True):
            metrics.add_mean(f"clipped/{name}_mean_{sign}", total, num_tokens)


def add_noise(
    metrics: Metrics,
    mask: Tensor,  # [T] bool: M
    advantages: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool
    weight_versions: Tensor | None = None,  # [T] int, version that sampled y_t; negative if unknown
    weight_version: int | None = None,
) -> None:
    """Add `trust_region/noise_masked_fraction`: the share of tokens with A != 0 masked before any update.

    Call it for a rollout's first mini-batch. It counts tokens sampled by the current weights, or by unknown
    ones. Only the engines' noise separates pi and mu there. A trust region that masks it is too tight.
    """
    counted = loss_mask.bool() & (advantages != 0)
    if weight_versions is not None and weight_version is not None:
        counted &= (weight_versions < 0) | (weight_versions == weight_version)
    num_masked, num_counted = torch.stack([(counted & ~mask.bool()).sum(), counted.sum()]).tolist()
    if num_counted:
        metrics.add_mean("trust_region/noise_masked_fraction", num_masked, num_counted)


@torch.no_grad()
def add_loss_terms(metrics: Metrics, objective: Objective, log_probs: Tensor, tokens: RolloutTokens) -> None:
    """Add the mean over learning tokens of each loss term that has a metric, if the objective uses the term.

    Args:
        metrics: Gets them.
        objective: Training objective.
        log_probs: [T] log pi(y_t).
        tokens: T tokens with a `loss_mask`.
    """
    for term in terms_in_use(objective).values():
        if term.metric is not None and term.value is not None and tokens.loss_mask is not None:
            values = term.value(log_probs.double(), tokens)[tokens.loss_mask.bool()]
            metrics.add_mean(term.metric, values.sum(), values.numel())


@torch.no_grad()
def add_shadow_masks(
    metrics: Metrics,
    objectives: Mapping[str, Objective],
    masks: Mapping[str, Tensor],  # [T] bool each: M of each of the `objectives` that could be evaluated
    active_mask: Tensor,  # [T] bool: M of the training objective
    *,
    log_probs: Tensor,  # [T] log pi(y_t)
    rollout_log_probs: Tensor,  # [T] log mu(y_t)
    advantages: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool
) -> None:
    """Add `shadow/<name>/*` over the learning tokens with A != 0: the tokens that a rule can drop.

    - `masked_fraction`, and `masked_fraction_positive` and `_negative` over the tokens with that sign of A.
    - `agreement`: share of the tokens that the objective and the active one both keep or both drop.
    - `dropped_mass_fraction`: the mask's share of the sum of min(pi/mu, C) |A| over these tokens, with the
      objective's C. The log-ratio is clamped to +-LOG_RATIO_LIMIT.

    It synchronises the device once, in addition to the selection of the tokens.
    """
    if not masks:
        return
    rows = (loss_mask.bool() & (advantages != 0)).nonzero()[:, 0]
    if rows.numel() == 0:
        return
    advantages = advantages[rows].double()
    log_ratio = (log_probs[rows].double() - rollout_log_probs[rows].double()).clamp(
        -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )
    caps = torch.tensor([[objectives[name].ratio_cap] for name in masks], device=rows.device)
    mass = torch.minimum(log_ratio.exp(), caps.double()) * advantages.abs()
    is_kept = torch.stack([mask[rows] for mask in masks.values()])  # [objectives, tokens]
    is_positive = advantages > 0
    sums = torch.stack(
        [
            (~is_kept & is_positive).sum(1),
            (~is_kept & ~is_positive).sum(1),
            (is_kept == active_mask[rows]).sum(1),
            torch.where(is_kept, 0.0, mass).sum(1),
            mass.sum(1),
        ],
        dim=1,
    )
    num_tokens, num_positive = rows.numel(), float(is_positive.sum())
    for name, of_name in zip(masks, sums.tolist(), strict=True):
        positive, negative, agreeing, dropped_mass, whole_mass = of_name
        metrics.add_mean(f"shadow/{name}/masked_fraction", positive + negative, num_tokens)
        metrics.add_mean(f"shadow/{name}/masked_fraction_positive", positive, num_positive)
        metrics.add_mean(f"shadow/{name}/masked_fraction_negative", negative, num_tokens - num_positive)
        metrics.add_mean(f"shadow/{name}/agreement", agreeing, num_tokens)
        metrics.add_mean(f"shadow/{name}/dropped_mass_fraction", dropped_mass, whole_mass)


@torch.no_grad()
def add_bound_of_tokens(
    metrics: Metrics,
    log_probs: Tensor,  # [T] log pi(y_t)
    rollout_log_probs: Tensor,  # [T] log mu(y_t)
    advantages: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool
) -> None:
    """Add the sums over learning tokens. `add_bound_of_responses` adds the number of responses."""
    rows = loss_mask.bool().nonzero()[:, 0]
    if rows.numel() == 0:
        return
    log_pi, log_mu, advantages = (x[rows].double() for x in (log_probs, rollout_log_probs, advantages))
    ratio_less_1 = torch.expm1((log_pi - log_mu).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    tv = (log_pi.exp() - log_mu.exp()).abs()
    per_response = [(advantages * ratio_less_1).sum(), tv.sum(), ratio_less_1.abs().sum() / 2]
    *totals, max_tv, max_advantage = torch.stack([*per_response, tv.max(), advantages.abs().max()]).tolist()
    for name, total in zip(_PER_RESPONSE, totals, strict=True):
        metrics.add_mean(name, total, 0)
    metrics.add_max("theory/max_tv", max_tv)
    metrics.add_max("theory/max_advantage", max_advantage)


def add_bound_of_responses(metrics: Metrics, microbatches: Sequence[Microbatch]) -> None:
    """Count the responses with a learning token in a data-parallel group's complete micro-batches."""
    for microbatch in microbatches:
        lengths = [
            int(microbatch.loss_mask[start:stop].sum())
            for start, stop in pairwise(microbatch.cu_seqlens.tolist())
        ]
        for name in _PER_RESPONSE:
            metrics.add_mean(name, 0, sum(length > 0 for length in lengths))
        metrics.add_max("theory/longest_response", max(lengths))


def bound_terms(merged: Mapping[str, float]) -> dict[str, float]:
    """Return `theory/linear_term`, `quadratic_term` and `composite_term` from a step's metrics over all ranks.

    They are 4 xi times the mean over responses of the sum of TV (App. B.3), 2 xi T (T - 1) max TV^2
    (Theorem 3.2), and the smaller of both (App. B.3). Empty if no token learnt.
    """
    if "theory/sum_tv_ratio" not in merged or "theory/max_tv" not in merged:
        return {}
    horizon, max_reward = merged["theory/longest_response"], merged["theory/max_advantage"]
    linear = 4 * max_reward * merged["theory/sum_tv_ratio"]
    quadratic = 2 * max_reward * horizon * (horizon - 1) * merged["theory/max_tv"] ** 2
    return {
        "theory/linear_term": linear,
        "theory/quadratic_term": quadratic,
        "theory/composite_term": min(linear, quadratic),
    }


def add_staleness(metrics: Metrics, steps: Sequence[TrainBatch], weight_version: int) -> None:
    """Add `rollout/staleness_mean` and `_max`: versions between a token's weights and the current ones.

    The mean is over tokens with a known weight version. Without such a token, nothing is added. Epochs, and
    ranks that hold the same tokens, repeat every token equally often, so the mean does not change.

    Args:
        metrics: Metrics to add to.
        steps: This rank's gradient steps on the rollout.
        weight_version: Version of the trainer's weights before these steps.
    """
    for step in steps:
        for microbatch in step.microbatches:
            if microbatch.weight_versions is None:
                continue
            versions = microbatch.weight_versions[microbatch.weight_versions >= 0]
            if versions.numel():
                ages = weight_version - versions.long()
                metrics.add_mean("rollout/staleness_mean", float(ages.sum()), ages.numel())
                metrics.add_max("rollout/staleness_max", int(ages.max()))


def add_ages(metrics: Metrics, samples: Iterable[Sample], weight_version: int, max_staleness: int) -> None:
    """Add `staleness/<n>`: the share of samples whose oldest token was sampled n versions ago.

    Args:
        metrics: Metrics to add to.
        samples: This rank's samples, before training on them.
        weight_version: Version of the trainer's weights.
        max_staleness: Largest n.
    """
    for sample in samples:
        oldest = min((span.version for span in sample.weight_versions), default=weight_version)
        for age in range(max_staleness + 1):
            metrics.add_mean(f"staleness/{age}", weight_version - oldest == age, 1)
