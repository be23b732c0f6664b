"""Warns where a trust region is tighter than the noise between the engines."""

from collections.abc import Mapping

NOISE_LIMIT = 0.01
"""Share of the tokens with A != 0 that may be masked before any update, while pi and mu have the same weights.

That is twice the share of updates that section 5.3 of the paper (arXiv 2602.04879) finds to be bad. Noise falls
in the bad direction about every other time, so with 1 % masked the threshold is near the noise's 98th
percentile.
"""


def noise_warning(of_rollout: Mapping[str, float]) -> str | None:
    """Return the warning about a rollout's metrics; none where the noise is within NOISE_LIMIT."""
    masked = of_rollout.get("trust_region/noise_masked_fraction", 0.0)
    if not masked > NOISE_LIMIT:
        return None
    names = {"mean": "abs_prob_diff_mean", "99.9th percentile": "tv_p999"}
    known = [
        f"{title} {of_rollout[f'mismatch/{name}']:.2g}"
        for title, name in names.items()
        if f"mismatch/{name}" in of_rollout
    ]
    return (
        f"the trust region sits inside the engines' noise: found {masked:.1%} of tokens masked before any "
        f"update (|pi - mu|: {', '.join(known)}); expected at most {NOISE_LIMIT:.0%}. Loosen its threshold "
        "(algorithm.delta, eps_low and eps_high), or bring the engines closer: rollout.routing_replay, "
        "algorithm.logits_dtype, weights of higher precision."
    )
