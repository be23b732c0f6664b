"""Plots probabilities of single tokens as an HTML page: the trainer's pi against the rollout's mu.

Colours are counts of tokens on a logarithmic scale; on the diagonal both engines agree. The page holds
plotly.js and opens without a network.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.io
from torch import Tensor

from megatron_dppo.metrics.engine_comparison import MeasuredResponse, Routes, pairs

NUM_BINS = 100  # along each axis
_GAP = 0.12  # of the width, between two panels
_TITLES: Mapping[Routes, str] = {
    "live": "Routes of the trainer's own routers",
    "replayed": "Routes replayed from the rollout (R3)",
}


def write_plot(file: Path, responses: Sequence[MeasuredResponse], kinds: Sequence[Routes], title: str) -> None:
    """Write the page: one panel for each way the tokens were forwarded."""
    html = plotly.io.to_html(figure(responses, kinds, title), include_plotlyjs=True, full_html=True)
    file.write_text(html, encoding="utf-8")


def figure(responses: Sequence[MeasuredResponse], kinds: Sequence[Routes], title: str) -> dict[str, Any]:
    """Return the page's plotly figure."""
    counts = {routes: token_counts(*pairs(responses, routes)) for routes in kinds}
    most = max((float(values.max()) for values in counts.values()), default=0.0)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "title": {"text": title},
        "template": "plotly_white",
        "width": 80 + 480 * len(kinds),
        "height": 560,
        "showlegend": False,
        "annotations": [],
    }
    width = (1 - _GAP * (len(kinds) - 1)) / len(kinds)
    for index, routes in enumerate(kinds):
        axis, left = "" if index == 0 else str(index + 1), index * (width + _GAP)
        data += _panel(counts[routes], axis, most, has_scale=index == len(kinds) - 1)
        layout[f"xaxis{axis}"] = _axis("μ, probability of the token in the rollout", [left, left + width])
        layout[f"yaxis{axis}"] = _axis("π, in the trainer", [0, 1]) | {"anchor": f"x{axis}"}
        heading = {
            "text": _TITLES[routes],
            "x": left + width / 2,
            "y": 1,
            "xanchor": "center",
            "yanchor": "bottom",
        }
        layout["annotations"].append({"xref": "paper", "yref": "paper", "showarrow": False} | heading)
    return {"data": data, "layout": layout}


def token_counts(log_pi: Tensor, log_mu: Tensor) -> np.ndarray:
    """Count [NUM_BINS, NUM_BINS] tokens by pi (rows) and mu (columns), equal bins from 0 to 1, without NaNs."""
    pi, mu = (log_probs.exp().clamp(max=1).numpy() for log_probs in (log_pi, log_mu))
    is_number = ~(np.isnan(pi) | np.isnan(mu))
    return np.histogram2d(pi[is_number], mu[is_number], bins=NUM_BINS, range=[[0, 1], [0, 1]])[0]


def _panel(counts: np.ndarray, axis: str, most: float, *, has_scale: bool) -> list[dict[str, Any]]:
    middles = ((np.arange(NUM_BINS) + 0.5) / NUM_BINS).tolist()
    place = {"xaxis": f"x{axis}", "yaxis": f"y{axis}"}
    ticks = [10**exponent for exponent in range(int(np.log10(max(most, 1))) + 1)]
    shown = [[float(np.log10(n)) if n else None for n in row] for row in counts]
    heatmap = {
        "type": "heatmap",
        "x": middles,
        "y": middles,
        "z": shown,
        "zmin": 0,
        "zmax": max(float(np.log10(max(most, 1))), 1.0),
        "colorscale": "Viridis",
        "showscale": has_scale,
        "colorbar": {
            "title": {"text": "tokens"},
            "tickvals": [float(np.log10(tick)) for tick in ticks],
            "ticktext": [f"{tick:,}" for tick in ticks],
        },
        "customdata": counts.tolist(),
        "hovertemplate": "μ %{x:.3f}, π %{y:.3f}: %{customdata} tokens<extra></extra>",
    }
    line = {"color": "rgba(200, 40, 40, 0.6)", "width": 1}
    diagonal = {"type": "scatter", "mode": "lines", "x": [0, 1], "y": [0, 1], "line": line, "hoverinfo": "skip"}
    return [heatmap | place, diagonal | place]


def _axis(title: str, domain: list[float]) -> dict[str, Any]:
    return {"title": {"text": title}, "domain": domain, "range": [0, 1], "constrain": "domain"}
