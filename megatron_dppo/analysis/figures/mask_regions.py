"""Draws the surrogate objectives of PPO and DPPO, and the regions in which their masks drop tokens.

The left of the paper's Figure 1 prints these masks as formulas; no figure of it draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from megatron_dppo.algorithms import Objective, PolicyLossInputs, policy_loss
from megatron_dppo.analysis.figures.canvas import Drawing
from megatron_dppo.analysis.figures.material import Kind, Lacking, Material
from megatron_dppo.analysis.figures.style import objective_label, plain_log_ticks

NUM_POINTS = 241  # along each axis
LARGEST_RATIO = 2.0
_RAREST = 1e-4  # of the logarithmic axes
_SHOWN = (0.05, 0.5, 0.9)  # mu of the surrogates
_MOST_OBJECTIVES = 4
_COLOURS = ("#ffffff", "#f2b48c", "#9ac3e0", "#c3b5d6")  # kept; dropped where A > 0; where A < 0; either way
_TOKEN_MASKS = ("ratio", "divergence", "negative", "distance")  # rules that drop a token by itself, or keep it
_LINES = ("#000000", "#009e73", "#cc79a7")


@dataclass(frozen=True)
class Region:
    """A mask over the probabilities of a token, [len(pi), len(mu)] bool for each sign of A."""

    mu: np.ndarray
    pi: np.ndarray
    drops_positive: np.ndarray  # where A > 0
    drops_negative: np.ndarray


def draw(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw the runs' own trust regions, and no others."""
    objectives, notes = _chosen([line.objective for line in material.lines])
    if not objectives:
        return Lacking("no run has a mask that π and μ of a token decide", "train grpo or dppo_binary_tv")
    labels = [_label(objective, objectives) for objective in objectives]
    rows = (_surrogate, _linear, _logarithmic)
    return [
        Drawing(
            name=kind.name,
            paper=kind.paper,
            title="What masks let learn",
            panels=[
                row(objective, label)
                for row in rows
                for objective, label in zip(objectives, labels, strict=True)
            ],
            caption=[
                "The left of the paper's Figure 1 prints these masks as formulas; the drawing of them is ours.",
                "Computed from the masks that train, of no run's data; nothing is smoothed.",
                "Top: the surrogate whose gradient by the ratio is M A, for A = 1 (solid) and A = -1 (dashed); "
                "it is flat where the mask drops the token.",
                "Below: the same masks over both probabilities of a token, on linear and on logarithmic axes.",
                *notes,
            ],
            columns=len(objectives),
        )
    ]


def _chosen(of_runs: Sequence[Objective]) -> tuple[list[Objective], list[str]]:
    """Choose the runs' objectives whose masks mu and pi of the token decide, and say which others there are."""
    masks = [o for o in dict.fromkeys(of_runs) if o.rule != "none"]
    drawable = [o for o in masks if is_drawable(o)]
    chosen = drawable[:_MOST_OBJECTIVES]
    names = dict.fromkeys(objective_label(o, []) for o in masks if o not in chosen)
    if not names:
        return chosen, []
    why = "Not drawn, for lack of room or because they are no masks that mu and pi of a token decide"
    return chosen, [f"{why}: {', '.join(names)}."]


def is_drawable(objective: Objective) -> bool:
    """Return whether the trust region is a mask that mu and pi of a token decide."""
    is_of_two = not objective.needs_topk and objective.anchor == "rollout"
    return objective.rule in _TOKEN_MASKS and is_of_two


def _label(objective: Objective, among: Sequence[Objective]) -> str:
    return objective_label(objective, [o for o in among if o.name == objective.name])


def kept(objective: Objective, mu: np.ndarray, pi: np.ndarray, advantage: float) -> np.ndarray:
    """Return M of single tokens with these probabilities, bool of their shape."""
    log_mu, log_pi = (torch.from_numpy(np.log(values)).flatten() for values in np.broadcast_arrays(mu, pi))
    inputs = PolicyLossInputs(log_pi, log_mu, torch.full_like(log_pi, advantage))
    return policy_loss(objective, inputs).mask.numpy().reshape(np.broadcast_shapes(mu.shape, pi.shape))


def region(objective: Objective, *, is_logarithmic: bool) -> Region:
    """Return the region in which the objective's mask drops a token."""
    space = np.geomspace if is_logarithmic else np.linspace
    mu = pi = space(_RAREST, 1 - 1e-6, NUM_POINTS)
    positive, negative = (~kept(objective, mu[None, :], pi[:, None], sign) for sign in (1.0, -1.0))
    return Region(mu, pi, positive, negative)


def surrogate(objective: Objective, mu: float, advantage: float) -> tuple[np.ndarray, np.ndarray]:
    """Return ratios, and the integral of M A from ratio 1 on: PPO's clipped objective, less its value there."""
    ratio = np.linspace(0.0, min(LARGEST_RATIO, 1 / mu), 2 * NUM_POINTS + 1)
    middle = (ratio[1:] + ratio[:-1]) / 2
    slope = advantage * kept(objective, np.full_like(middle, mu), mu * middle, advantage)
    value = np.concatenate([[0.0], np.cumsum(slope * np.diff(ratio))])
    return ratio, value - np.interp(1.0, ratio, value)


def _surrogate(objective: Objective, label: str) -> Callable[[Axes], None]:
    def panel(axes: Axes) -> None:
        for mu, colour in zip(_SHOWN, _LINES, strict=True):
            for advantage, dash in ((1.0, "-"), (-1.0, "--")):
                ratio, value = surrogate(objective, mu, advantage)
                name = f"surrogate, μ = {mu:g}" if advantage > 0 else None
                axes.plot(ratio, value, dash, color=colour, linewidth=1.2, label=name)
        axes.set_title(label)
        axes.set_xlabel("π / μ")
        axes.set_ylabel("surrogate")
        axes.set_ylim(-1.1, 1.1)  # of all alike: ratios go from 0 to 2

    return panel


def _linear(objective: Objective, label: str) -> Callable[[Axes], None]:
    return _plane(objective, label, is_logarithmic=False)


def _logarithmic(objective: Objective, label: str) -> Callable[[Axes], None]:
    return _plane(objective, label, is_logarithmic=True)


def _plane(objective: Objective, label: str, *, is_logarithmic: bool) -> Callable[[Axes], None]:
    def panel(axes: Axes) -> None:
        own = region(objective, is_logarithmic=is_logarithmic)
        codes = own.drops_positive + 2 * own.drops_negative
        axes.pcolormesh(own.mu, own.pi, codes, cmap=ListedColormap(_COLOURS), vmin=0, vmax=3, rasterized=True)
        axes.plot(own.mu, own.pi, color="black", linewidth=0.6)
        if is_logarithmic:
            axes.set_xscale("log")
            axes.set_yscale("log")
            plain_log_ticks(axes.xaxis, axes.yaxis)
        axes.set_title(label)
        axes.set_xlabel("μ")
        axes.set_ylabel("π")
        axes.grid(visible=False)
        names = ("dropped where A > 0", "dropped where A < 0", "dropped in both cases")
        for code, name in enumerate(names, start=1):
            if (codes == code).any() or code < 3:
                axes.fill_between([], [], color=_COLOURS[code], label=name)

    return panel
