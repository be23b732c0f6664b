"""Notes on settings that go against a finding of the paper (arXiv 2602.04879); none of them refuses a config.

`examples/guides/what_the_paper_found.md` lists the findings, and its test reads these remarks.
"""

import math
from collections.abc import Iterator

from megatron_dppo.algorithms import Objective
from megatron_dppo.algorithms.presets import PAPER
from megatron_dppo.config.schema import Config

_SMALLEST_CAP = 5.0  # Appendix F has it in all runs
_SAFE_NEGATIVE_DELTA = 0.5  # of section 5.3's minimal mask; the run with 0.8 collapsed
_LR_OF_FULL_WEIGHTS = 1e-6  # Table 1; its LoRA run has 1e-5
_WITHOUT_TRUST_REGION = (
    "The paper's runs without a trust region collapsed, at a learning rate of 1e-6 too "
    "(arXiv 2602.04879, section 5, Takeaway 1)."
)


def findings_against(config: Config, objective: Objective) -> Iterator[str]:
    """Yield a sentence on each finding of the paper that a config goes against.

    Args:
        config: The run's.
        objective: The objective that the config trains with. Shadow presets train nothing and get no remark.
    """
    yield from _about_the_trust_region(config, objective)
    yield from _about_the_anchor(objective)
    if objective.ratio_cap < _SMALLEST_CAP:
        yield (
            f"algorithm.ratio_cap is {objective.ratio_cap:g}: importance weights pi/mu above it are truncated. "
            "The paper found that truncation harms training (section 5.4). Its large runs have 5 (Appendix F)."
        )
    yield from _about_costs(config, objective)
    if config.algorithm.normalize_advantage_std and config.algorithm.preset in PAPER:
        yield (
            "algorithm.normalize_advantage_std is true. The paper subtracts the group's mean from rewards, and "
            "does not divide by the standard deviation (section 4.1, Appendix D)."
        )
    if config.lora.rank > 0 and config.optimizer.lr <= _LR_OF_FULL_WEIGHTS:
        yield (
            f"lora.rank is {config.lora.rank} and optimizer.lr {config.optimizer.lr:g}. The paper trains "
            "adapters with 1e-5, and full weights with 1e-6 (Table 1, Appendix F)."
        )


def _about_the_trust_region(config: Config, objective: Objective) -> Iterator[str]:
    name = config.algorithm.preset
    num_steps = config.algorithm.minibatches_per_rollout * config.algorithm.epochs_per_rollout
    bounds_negative, bounds_positive = _bounded_signs(objective)
    if bounds_negative and num_steps == 1 and _compares_with_itself(objective):
        yield (
            f"algorithm.preset {name!r} has no trust region here: with one gradient step per rollout the "
            f"policy is the recomputed anchor, and no token is dropped. {_WITHOUT_TRUST_REGION}"
        )
    elif not bounds_negative and not bounds_positive:
        yield (
            f"algorithm.preset {name!r} has no trust region here: no token is dropped, however far it moves. "
            f"{_WITHOUT_TRUST_REGION}"
        )
    elif not bounds_negative:
        yield (
            f"algorithm.preset {name!r} bounds no token with a negative advantage here. In the paper a few "
            "updates of such tokens, far outside the trust region, cause the collapse (section 5.3, "
            "Takeaway 3)."
        )
    if objective.rule == "negative" and _SAFE_NEGATIVE_DELTA < objective.delta_low < math.inf:
        yield (
            f"algorithm.delta is {objective.delta_low:g}. The paper's run with this mask was stable with 0.5 "
            "and collapsed with 0.8 (section 5.3)."
        )


def _about_the_anchor(objective: Objective) -> Iterator[str]:
    if objective.rule == "none" and objective.anchor == "recomputed":
        yield (
            "algorithm.anchor is 'recomputed', and no mask reads it here. It costs one more forward over each "
            "rollout, about 25 % of the training cost in the paper (section 5.2, Takeaway 2)."
        )
    elif _compares_with_itself(objective):
        yield (
            "algorithm.anchor is 'recomputed'. The paper's runs with this anchor collapsed, and its runs with "
            "the rollout policy as anchor did not. The forward that recomputes log-probs is about 25 % of the "
            "training cost in the paper (section 5.2, Takeaway 2)."
        )


def _about_costs(config: Config, objective: Objective) -> Iterator[str]:
    """Yield remarks on settings that cost more than they gained in the paper."""
    name = config.algorithm.preset
    if name in PAPER and objective.needs_topk:
        binary = name.replace("topk", "binary")
        yield (
            f"algorithm.preset is {name!r}. In the paper Top-K was no better than Binary (Appendix G.2), and "
            f"{binary!r} needs no Top-K log-probs from the engine."
        )
    if name in PAPER and objective.rule in ("none", "ratio") and config.rollout.routing_replay == "replay":
        yield (
            f"rollout.routing_replay is 'replay' with {name!r}. In the paper DPPO without R3 was better than "
            "its baselines with R3 (section 7)."
        )


def _compares_with_itself(objective: Objective) -> bool:
    """Return whether the rule compares the policy only with its own log-probs before the step."""
    return objective.anchor == "recomputed" and objective.rule not in ("band", "response_mismatch", "own")


def _bounded_signs(objective: Objective) -> tuple[bool, bool]:
    """Return whether the trust region bounds updates with negative advantages, and with positive ones."""
    rule, inf = objective.rule, math.inf
    if rule == "none":
        return False, False
    if rule in ("ratio", "response_ratio", "band", "response_mismatch"):
        is_lifted = objective.alpha == inf  # for all tokens: each has mu < inf
        low = objective.eps_low < inf and not (is_lifted and objective.relax in ("low", "both"))
        high = objective.eps_high < inf and not (is_lifted and objective.relax in ("high", "both"))
        is_band = rule in ("band", "response_mismatch") and (objective.rho_low > 0 or objective.rho_high < inf)
        return low or is_band, high or is_band
    if rule in ("divergence", "distance", "linear", "prediction", "prefix"):
        return objective.delta_low < inf, objective.delta_high < inf
    if rule == "negative":
        return objective.delta_low < inf, False
    if rule == "response_divergence":
        is_bound = min(objective.token_kl, objective.response_kl) < inf
        return is_bound, is_bound
    if rule == "sigmoid":
        return objective.tau_low > 0, objective.tau_high > 0
    return True, True  # a rule of the user's own
