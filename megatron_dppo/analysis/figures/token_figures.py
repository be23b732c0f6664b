"""Draws figures of single tokens: two engines (Figure 2), the lists of Appendix E, and the regions of masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.ticker import MaxNLocator

from megatron_dppo.algorithms import Objective, PolicyLossInputs, policy_loss
from megatron_dppo.analysis.figures.canvas import Drawing
from megatron_dppo.analysis.figures.material import Kind, Lacking, Material, RunCurves, TokenPairs
from megatron_dppo.analysis.figures.style import LOOKS, look, objective_label, plain_log_ticks, without_paths
from megatron_dppo.analysis.token_files import ClippedRow, read_list, rollouts_to_show
from megatron_dppo.metrics.masked_tokens import ACTIVE, TOP

MOST_TOKENS = 20_000  # drawn; more would only hide each other
_SEED = 0
RATIOS, DIFFERENCES = (0.6, 1.4), (0.0, 0.1)  # the paper's y axes
_LARGEST_LOG_RATIO = 700.0  # of what float64 can hold
_LEAST_SHOWN = 0.95  # share of the tokens that the paper's axes must hold; else other ones hold as many
_SIGNS = {"+": "tokens with A > 0", "-": "tokens with A < 0"}
_BAR_HEIGHT = 0.15  # inches
_AXIS_HEIGHT = 0.8  # inches; height of a panel, in addition to its bars
NUM_POINTS = 241  # along each axis
LARGEST_RATIO = 2.0
_RAREST = 1e-4  # smallest probability on logarithmic axes
_SHOWN = (0.05, 0.5, 0.9)  # mu of the surrogates
_MOST_OBJECTIVES = 4
_COLOURS = ("#ffffff", "#f2b48c", "#9ac3e0", "#c3b5d6")  # kept; dropped where A > 0; where A < 0; either way
_TOKEN_MASKS = ("ratio", "divergence", "negative", "distance")  # rules that drop a token by itself, or keep it
_LINES = ("#000000", "#009e73", "#cc79a7")


def draw_engine_differences(kind: Kind, material: Material) -> list[Drawing] | Lacking:
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
            panels=_panels_of_rows(of, is_mu_logarithmic=material.is_mu_logarithmic),
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


def sample_tokens(pairs: TokenPairs) -> tuple[np.ndarray, np.ndarray]:
    """Return a sample of log mu and log pi, [at most MOST_TOKENS] each; the same tokens each time."""
    size = pairs.log_mu.size
    if size <= MOST_TOKENS:
        return pairs.log_mu, pairs.log_pi
    chosen = np.sort(np.random.default_rng(_SEED).choice(size, MOST_TOKENS, replace=False))
    return pairs.log_mu[chosen], pairs.log_pi[chosen]


def _panels_of_rows(of: Sequence[TokenPairs], *, is_mu_logarithmic: bool) -> list[Callable[[Axes], None]]:
    """Return a row of panels for each way of forwarding; rows have the same axes."""
    of_ratio, of_difference = _axes(of)
    panels: list[Callable[[Axes], None]] = []
    for pairs in of:
        log_mu, log_pi = sample_tokens(pairs)
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


def draw_clipped_tokens(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw one list for each line: from its first run with lists, for the rollout that the material names."""
    runs = [run for line in material.lines for run in line.runs]
    rollouts = rollouts_to_show({run.name: run.clipped for run in runs}, material.tokens_at)
    drawings: list[Drawing] = []
    for experiment in material.experiments:
        for line in experiment.lines:
            listed = [run for run in line.runs if run.name in rollouts]
            label = ", ".join(filter(None, [line.label, experiment.label]))
            if listed:
                drawn = _of_run(kind, listed[0], rollouts[listed[0].name], label, line.own_place)
                drawings += [drawn] if drawn is not None else []
    if drawings:
        return drawings
    if not rollouts:
        return Lacking("no run has a list of masked tokens", "set tracking.clipped_tokens_every")
    numbers = ", ".join(map(str, sorted(set(rollouts.values()))))
    return Lacking(f"no run's own mask dropped a token in rollout {numbers}", "name another with --tokens-at")


def _of_run(kind: Kind, run: RunCurves, rollout: int, label: str, own_place: int) -> Drawing | None:
    found = read_list(run.clipped[rollout])
    by_sign = {heading: found.of(ACTIVE, sign) for sign, heading in _SIGNS.items()}
    colour = look(run.objective, own_place=own_place)["color"]
    panels = [_bars(heading, rows, colour) for heading, rows in by_sign.items() if rows]
    if not panels:
        return None
    longest = max(map(len, by_sign.values()))
    listed = ", ".join(map(str, run.clipped))
    return Drawing(
        name=f"{kind.name}_{run.name.replace('/', '_')}",
        paper=kind.paper,
        title=f"Most frequently masked tokens of rollout {rollout}: {label}",
        panels=panels,
        caption=[
            f"{run.name}, seed {run.seed}, rollout {rollout}: the tokens (at most {TOP}) that its own mask "
            "dropped most often over the gradient steps of the rollout, for each sign of the advantage. Listed "
            f"rollouts: {listed}. --tokens-at draws another. Nothing is smoothed."
        ],
        columns=2,
        panel_height=_AXIS_HEIGHT + _BAR_HEIGHT * max(longest, 10),
    )


def _bars(heading: str, rows: Sequence[ClippedRow], colour: str) -> Callable[[Axes], None]:
    def panel(axes: Axes) -> None:
        places = range(len(rows))
        axes.barh(places, [row.count for row in rows], color=colour)
        axes.set_yticks(places, [repr(row.token) for row in rows])
        axes.invert_yaxis()
        axes.margins(y=0.01)
        axes.set_title(heading)
        axes.set_xlabel("times masked")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(visible=False, axis="y")

    return panel


@dataclass(frozen=True)
class Region:
    """A mask over the probabilities of a token, [len(pi), len(mu)] bool for each sign of A."""

    mu: np.ndarray
    pi: np.ndarray
    drops_positive: np.ndarray  # where A > 0
    drops_negative: np.ndarray


def draw_mask_regions(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw the runs' own trust regions, and no others."""
    objectives, notes = _chosen([line.objective for line in material.lines])
    if not objectives:
        return Lacking("no run has a mask that π and μ of a token decide", "train grpo or dppo_binary_tv")
    labels = [_label(objective, objectives) for objective in objectives]
    rows = (_surrogate, partial(_plane, is_logarithmic=False), partial(_plane, is_logarithmic=True))
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
                "it is flat for masked tokens.",
                "Below: the same masks over both probabilities of a token, on linear and on logarithmic axes.",
                *notes,
            ],
            columns=len(objectives),
        )
    ]


def _chosen(of_runs: Sequence[Objective]) -> tuple[list[Objective], list[str]]:
    """Choose the objectives with masks that mu and pi of the token decide, and name the others in a note."""
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


def evaluate_mask(objective: Objective, mu: np.ndarray, pi: np.ndarray, advantage: float) -> np.ndarray:
    """Return M of single tokens with these probabilities, a bool array of the same shape."""
    log_mu, log_pi = (torch.from_numpy(np.log(values)).flatten() for values in np.broadcast_arrays(mu, pi))
    inputs = PolicyLossInputs(log_pi, log_mu, torch.full_like(log_pi, advantage))
    return policy_loss(objective, inputs).mask.numpy().reshape(np.broadcast_shapes(mu.shape, pi.shape))


def region(objective: Objective, *, is_logarithmic: bool) -> Region:
    """Return the region in which the objective's mask drops a token."""
    space = np.geomspace if is_logarithmic else np.linspace
    mu = pi = space(_RAREST, 1 - 1e-6, NUM_POINTS)
    positive, negative = (~evaluate_mask(objective, mu[None, :], pi[:, None], sign) for sign in (1.0, -1.0))
    return Region(mu, pi, positive, negative)


def surrogate(objective: Objective, mu: float, advantage: float) -> tuple[np.ndarray, np.ndarray]:
    """Return ratios, and the integral of M A from ratio 1 on: PPO's clipped objective, less its value there."""
    ratio = np.linspace(0.0, min(LARGEST_RATIO, 1 / mu), 2 * NUM_POINTS + 1)
    middle = (ratio[1:] + ratio[:-1]) / 2
    slope = advantage * evaluate_mask(objective, np.full_like(middle, mu), mu * middle, advantage)
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
