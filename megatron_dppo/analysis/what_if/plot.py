"""Plots the share of a rollout that each trust region would have masked, as one offline HTML page."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.io

_SIGNS = {"positive": "tokens with A > 0", "negative": "tokens with A < 0"}
_SYMBOLS = {"live": "circle", "replayed": "diamond-open"}
_HEIGHT_OF_ROW = 26  # pixels


def write_plot(file: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Write the page from the rows of `variants.evaluate_variants`."""
    file.write_text(plotly.io.to_html(figure(rows, title), include_plotlyjs=True, full_html=True), "utf-8")


def figure(rows: Sequence[Mapping[str, Any]], title: str) -> dict[str, Any]:
    """Return the page's plotly figure: a line of dots for each variant, the run's own on top."""
    names = list(dict.fromkeys(str(row["variant"]) for row in rows))
    layout: dict[str, Any] = {
        "title": {"text": title},
        "template": "plotly_white",
        "height": 200 + _HEIGHT_OF_ROW * len(names),
        "margin": {"l": 260},
        "legend": {"orientation": "h", "y": -0.25},
        "yaxis": {"categoryorder": "array", "categoryarray": names[::-1], "automargin": True},
    }
    for index, heading in enumerate(_SIGNS.values()):
        axis = "" if index == 0 else "2"
        layout[f"xaxis{axis}"] = {
            "title": {"text": f"masked share of {heading}"},
            "domain": [0.54 * index, 0.46 + 0.54 * index],
            "rangemode": "tozero",
            "tickformat": ".1%",
        }
    return {"data": list(_traces(rows)), "layout": layout}


def _traces(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for index, (sign, heading) in enumerate(_SIGNS.items()):
        for routes in dict.fromkeys(str(row["routes"]) for row in rows):
            own = [row for row in rows if row["routes"] == routes]
            yield {
                "type": "scatter",
                "mode": "markers",
                "name": f"{routes} routes",
                "legendgroup": routes,
                "showlegend": index == 0,
                "x": [row[f"masked_fraction_{sign}"] for row in own],
                "y": [str(row["variant"]) for row in own],
                "xaxis": "x" if index == 0 else "x2",
                "marker": {"symbol": _SYMBOLS.get(routes, "circle"), "size": 10},
                "hovertemplate": f"%{{y}}: %{{x:.3%}} of {heading}<extra>{routes}</extra>",
            }
