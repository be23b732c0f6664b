"""Draws Figure 2: the distance of two engines with the same weights, by the probability of the token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes

from megatron_dppo.analysis.figures.canvas import Drawing
from megatron_dppo.analysis.figures.material import Kind, Lacking, Material
from megatron_dppo.analysis.figures.style import LOOKS, plain_log_ticks
from megatron_dppo.analysis.figures.tokens import TokenPairs
from megatron_dppo.analysis.report.text import distinct_folders

MOST_TOKENS = 20_000  # drawn; more would only hide each other
_SEED = 0
_MARGIN = 0.05  # of the values' range


def draw(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw the ratio on the left, total variation on the right; a row for each way of forwarding."""
    known = [pairs for pairs in material.tokens if pairs.log_mu.size]
    if not known:
        return Lacking(
            "no folder holds the probabilities of single tokens by both engines",
            "name a folder that megatron-dppo measure-mismatch wrote, too; or a run with "
            'tracking.batches_every whose algorithm.anchor is "recomputed"',
        )
    names = dict(
        zip(folders := list(dict.fromkeys(p.folder for p in known)), distinct_folders(folders), strict=True)
    )
    by_folder: dict[str, list[TokenPairs]] = {}
    for pairs in known:
        by_folder.setdefault(str(pairs.folder), []).append(pairs)
    return [
        Drawing(
            name=kind.name if len(by_folder) == 1 else f"{kind.name}_{number}",
            paper=kind.paper,
            title="Two engines, the same weights" + ("" if len(by_folder) == 1 else f": {names[of[0].folder]}"),
            panels=_panels(of),
            caption=[*_caption(folder, of)],
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
    return said


def drawn_tokens(pairs: TokenPairs) -> tuple[np.ndarray, np.ndarray]:
    """Return a sample of log mu and log pi, [at most MOST_TOKENS] each; the same tokens each time."""
    size = pairs.log_mu.size
    if size <= MOST_TOKENS:
        return pairs.log_mu, pairs.log_pi
    chosen = np.sort(np.random.default_rng(_SEED).choice(size, MOST_TOKENS, replace=False))
    return pairs.log_mu[chosen], pairs.log_pi[chosen]


def _panels(of: Sequence[TokenPairs]) -> list[Callable[[Axes], None]]:
    """Return a row of panels for each way of forwarding; rows have the same axes."""
    tokens = [drawn_tokens(pairs) for pairs in of]
    ratios = [np.exp(log_pi - log_mu) for log_mu, log_pi in tokens]
    differences = [np.abs(np.exp(log_pi) - np.exp(log_mu)) for log_mu, log_pi in tokens]
    panels: list[Callable[[Axes], None]] = []
    for pairs, (log_mu, _), ratio, difference in zip(of, tokens, ratios, differences, strict=True):
        ends = (min(map(np.min, ratios)), max(map(np.max, ratios)))
        panels.append(
            _scatter(f"ratio, {pairs.source}", "π / μ", log_mu, ratio, ends, LOOKS["grpo_clip_higher"][0])
        )
        ends = (0.0, max(map(np.max, differences)))
        title = f"total variation, {pairs.source}"
        panels.append(_scatter(title, "|π − μ|", log_mu, difference, ends, LOOKS["dppo_binary_tv"][0]))
    return panels


def _scatter(
    title: str, y_label: str, log_mu: np.ndarray, values: np.ndarray, ends: tuple[float, float], colour: str
) -> Callable[[Axes], None]:
    margin = _MARGIN * (ends[1] - ends[0]) or _MARGIN

    def panel(axes: Axes) -> None:
        axes.scatter(np.exp(log_mu), values, s=3, alpha=0.35, color=colour, linewidths=0, rasterized=True)
        axes.set_xscale("log")
        plain_log_ticks(axes.xaxis)
        axes.set_ylim(ends[0] - margin, ends[1] + margin)
        axes.set_title(title)
        axes.set_xlabel("μ, probability in the rollout")
        axes.set_ylabel(y_label)

    return panel
