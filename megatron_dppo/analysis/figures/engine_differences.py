"""Draws Figure 2: the distance of two engines with the same weights, by the probability of the token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes

from megatron_dppo.analysis.figures.canvas import Drawing
from megatron_dppo.analysis.figures.material import Kind, Lacking, Material
from megatron_dppo.analysis.figures.style import LOOKS, plain_log_ticks
from megatron_dppo.analysis.figures.titles import without_paths
from megatron_dppo.analysis.figures.tokens import TokenPairs

MOST_TOKENS = 20_000  # drawn; more would only hide each other
_SEED = 0
RATIOS, DIFFERENCES = (0.6, 1.4), (0.0, 0.1)  # the paper's y axes
_LARGEST_LOG_RATIO = 700.0  # of what float64 can hold
_LEAST_SHOWN = 0.95  # share of the tokens that the paper's axes must hold; else other ones hold as many


def draw(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw the ratio on the left, total variation on the right; a row for each way of forwarding."""
    known = [pairs for pairs in material.tokens if pairs.log_mu.size]
    if not known:
        return Lacking(
            "no folder holds the probabilities of single tokens by both engines",
            "name a folder that megatron-dppo measure-mismatch wrote, too; or a run with "
            'tracking.batches_every whose algorithm.anchor is "recomputed"',
        )
    names = without_paths([str(pairs.folder.resolve()) for pairs in known])
    by_folder: dict[str, list[TokenPairs]] = {}
    for pairs in known:
        by_folder.setdefault(str(pairs.folder.resolve()), []).append(pairs)
    return [
        Drawing(
            name=kind.name if len(by_folder) == 1 else f"{kind.name}_{number}",
            paper=kind.paper,
            title="Two engines, the same weights" + ("" if len(by_folder) == 1 else f": {names[folder]}"),
            panels=_panels(of, is_mu_logarithmic=material.is_mu_logarithmic),
            caption=_caption(str(of[0].folder), of),
            columns=2,
        )
        for number, (folder, of) in enumerate(by_folder.items(), 1)
    ]


def _caption(folder: str, of: list[TokenPairs]) -> list[str]:
    said = [
        f"Tokens of {folder}: mu is their probability in the rollout, pi in the trainer; same weights.",
        "Left: the ratio that PPO clips. Right: the binary total variation that DPPO limits.",
        "Nothing is smoothed.",
    ]
    for pairs in of:
        size = pairs.log_mu.size
        drawn = f", of which {MOST_TOKENS:,} drawn at random are shown" if size > MOST_TOKENS else ""
        said.append(f"{pairs.source}: {size:,} tokens{drawn}.")
        for name, values, (low, high) in zip(("π / μ", "|π − μ|"), _values(pairs), _axes(of), strict=True):
            outside = values[(values < low) | (values > high)]
            if outside.size:
                said.append(
                    f"{pairs.source}: {outside.size:,} of {size:,} tokens outside the axis of {name}, which is "
                    f"from {low:.3g} to {high:.3g}; all are from {values.min():.3g} to {values.max():.3g}."
                )
    return said


def _values(pairs: TokenPairs) -> tuple[np.ndarray, np.ndarray]:
    """Return pi / mu and |pi - mu| of all tokens, [T] each."""
    mu, pi = np.exp(pairs.log_mu), np.exp(pairs.log_pi)
    return np.exp(np.minimum(pairs.log_pi - pairs.log_mu, _LARGEST_LOG_RATIO)), np.abs(pi - mu)


def _axes(of: Sequence[TokenPairs]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the limits of pi / mu and of |pi - mu|, the same for all ways of forwarding."""
    ratios, differences = (np.concatenate(values) for values in zip(*map(_values, of), strict=True))
    return limits(ratios, RATIOS), limits(differences, DIFFERENCES)


def limits(values: np.ndarray, of_paper: tuple[float, float]) -> tuple[float, float]:
    """Return the paper's limits, each of them moved to a quantile if they hold too few of the values.

    A few far values must not flatten the others: at most a twentieth is beyond the limits.
    """
    low, high = of_paper
    if np.mean((values >= low) & (values <= high)) >= _LEAST_SHOWN:
        return of_paper
    tail = (1 - _LEAST_SHOWN) / 2
    quantiles = np.quantile(values, [tail, 1 - tail], method="inverted_cdf")
    return min(low, float(quantiles[0])), max(high, float(quantiles[1]))


def drawn_tokens(pairs: TokenPairs) -> tuple[np.ndarray, np.ndarray]:
    """Return a sample of log mu and log pi, [at most MOST_TOKENS] each; the same tokens each time."""
    size = pairs.log_mu.size
    if size <= MOST_TOKENS:
        return pairs.log_mu, pairs.log_pi
    chosen = np.sort(np.random.default_rng(_SEED).choice(size, MOST_TOKENS, replace=False))
    return pairs.log_mu[chosen], pairs.log_pi[chosen]


def _panels(of: Sequence[TokenPairs], *, is_mu_logarithmic: bool) -> list[Callable[[Axes], None]]:
    """Return a row of panels for each way of forwarding; rows have the same axes."""
    of_ratio, of_difference = _axes(of)
    panels: list[Callable[[Axes], None]] = []
    for pairs in of:
        log_mu, log_pi = drawn_tokens(pairs)
        ratio, difference = _values(replace(pairs, log_mu=log_mu, log_pi=log_pi))
        for title, y_label, values, ends, preset in (
            ("ratio", "π / μ", ratio, of_ratio, "grpo_clip_higher"),
            ("total variation", "|π − μ|", difference, of_difference, "dppo_binary_tv"),
        ):
            panels.append(
                _scatter(
                    (f"{title}, {pairs.source}", y_label),
                    (np.exp(log_mu), values),
                    ends,
                    LOOKS[preset][0],
                    is_mu_logarithmic=is_mu_logarithmic,
                )
            )
    return panels


def _scatter(
    words: tuple[str, str],
    values: tuple[np.ndarray, np.ndarray],
    ends: tuple[float, float],
    colour: str,
    *,
    is_mu_logarithmic: bool,
) -> Callable[[Axes], None]:
    title, y_label = words

    def panel(axes: Axes) -> None:
        axes.scatter(*values, s=3, alpha=0.35, color=colour, linewidths=0, rasterized=True)
        if is_mu_logarithmic:
            axes.set_xscale("log")
            plain_log_ticks(axes.xaxis)
        else:
            axes.set_xlim(0.0, 1.0)
        axes.set_ylim(*ends)
        axes.set_title(title)
        axes.set_xlabel("μ, probability in the rollout")
        axes.set_ylabel(y_label)

    return panel
