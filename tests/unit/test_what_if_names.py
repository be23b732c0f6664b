"""What-if's table and page show each figure below its own name: no two figures of these answers are equal."""

import itertools
import re
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any

from megatron_dppo.analysis.what_if.measures import PROB_EDGES
from megatron_dppo.analysis.what_if.results import as_text, page

VARIANTS = ("dppo_topk_tv top_k=8", "grpo", "gspo eps_low=0.1")
ROLLOUTS = (3, 7)
KINDS = ("live", "replayed")
FIGURES = (
    *("masked_fraction", "masked_fraction_positive", "masked_fraction_negative", "weight_mean_positive"),
    *("weight_mean_negative", "agreement", "dropped_mass_fraction", "gradient_mass_kept", "cosine_unmasked"),
    *("cosine_dppo_topk_tv", "cosine_dppo_topk_kl", "rollout_prob_masked", "divergence_p999"),
)
OF_ROLLOUT = ("masked_fraction", "gradient_mass_kept", "cosine_unmasked")


def row_of(variant: str, routes: str, fresh: Iterator[float]) -> dict[str, Any]:
    """A row of what_if.json whose figures differ in the digits that are shown."""
    row: dict[str, Any] = {"variant": variant, "preset": variant.split()[0], "routes": routes}
    row |= {name: next(fresh) for name in FIGURES}
    row["by_prob"] = [
        {
            "sign": sign,
            "prob_low": low,
            "prob_high": high,
            "num_tokens": round(1e4 * next(fresh)),
            "masked_fraction": next(fresh),
            "weight_mean": next(fresh),
        }
        for sign in ("positive", "negative")
        for low, high in itertools.pairwise(PROB_EDGES)
    ]
    row["by_rollout"] = [
        {"rollout": number, **{name: next(fresh) for name in OF_ROLLOUT}} for number in ROLLOUTS
    ]
    row["threshold"] = f"delta {next(fresh):.4f}"
    row["sensitivity"] = [
        {"factor": factor, "masked_fraction": next(fresh), "weight_mean": next(fresh)}
        for factor in (0.5, 1.0, 2.0)
    ]
    return row


def numbered(trained: str) -> dict[str, Any]:
    """An answer of three variants with both ways of routing, all of whose figures differ."""
    fresh = (round(0.1 + 0.0011 * n, 4) for n in itertools.count())
    rows = [row_of(variant, routes, fresh) for routes in KINDS for variant in VARIANTS]
    mismatch = {
        routes: {name: next(fresh) for name in ("abs_prob_diff_mean", "kl_k3", "ratio_min", "ratio_max")}
        for routes in KINDS
    }
    pairs = {routes: {"same_decision": [[next(fresh) for _ in VARIANTS] for _ in VARIANTS]} for routes in KINDS}
    return {
        "run": "runs/a",
        "checkpoint": "runs/a/checkpoints/step_00000009",
        "before": "runs/a/checkpoints/step_00000004",
        "rollouts": list(ROLLOUTS),
        "num_tokens": 400,
        "trained_routes": trained,
        "mismatch": mismatch,
        "variants": list(VARIANTS),
        "left_out": {"minirl": "why minirl", "gmpo": "why gmpo"},
        "rows": rows,
        "agreement": pairs,
    }


def percent(value: float) -> str:
    return f"{100 * value:.2f}"


def three(value: float) -> str:
    return f"{value:.3f}"


def of(name: str, form: Callable[[float], str]) -> Callable[[dict[str, Any]], str]:
    return lambda row: form(row[name])


def scaled(factor: float) -> Callable[[dict[str, Any]], str]:
    return lambda row: percent(
        next(each["masked_fraction"] for each in row["sensitivity"] if each["factor"] == factor)
    )


def mean_m(row: dict[str, Any]) -> str:
    """These are masks: M is 1 where a token is kept."""
    return three(1 - row["masked_fraction"])


ON_THE_PAGE: dict[str, Callable[[dict[str, Any]], str]] = {
    "masked, A > 0 [%]": of("masked_fraction_positive", percent),
    "masked, A < 0 [%]": of("masked_fraction_negative", percent),
    "mean M": mean_m,
    "gradient mass kept [%]": of("gradient_mass_kept", percent),
    "cosine with no mask": of("cosine_unmasked", three),
    "cosine with Top-K TV": of("cosine_dppo_topk_tv", three),
    "cosine with Top-K KL": of("cosine_dppo_topk_kl", three),
    "agrees with the run's [%]": of("agreement", percent),
    "mean μ of masked": of("rollout_prob_masked", three),
    "masked at half the threshold [%]": scaled(0.5),
    "at twice [%]": scaled(2.0),
}
IN_THE_TABLE: dict[str, Callable[[dict[str, Any]], str]] = {
    "masked A>0": lambda row: f"{of('masked_fraction_positive', percent)(row)}%",
    "share A<0": lambda row: f"{of('masked_fraction_negative', percent)(row)}%",
    "mean M": mean_m,
    "grad. mass": lambda row: f"{of('gradient_mass_kept', percent)(row)}%",
    "cosine no mask": of("cosine_unmasked", three),
    "with TopK TV": of("cosine_dppo_topk_tv", three),
    "agrees w. run": lambda row: f"{of('agreement', percent)(row)}%",
    "masked at 1/2": lambda row: f"{scaled(0.5)(row)}%",
    "share at 2x": lambda row: f"{scaled(2.0)(row)}%",
}


def rows_with(found: dict[str, Any], routes: str) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in found["rows"] if row["routes"] == routes}


def plain(html: str) -> str:
    text = unescape(re.sub(r"<[^>]*>", "", html))
    return text.replace("\u2011", "-").replace("\u00a0", " ").strip()


def table_of(html: str, label: str) -> dict[str, dict[str, str]]:
    """Texts by row and column of the table with this label."""
    (body,) = re.findall(rf'aria-label="{label}"><table[^>]*>(.*?)</table>', html, re.DOTALL)
    headings = [plain(each) for each in re.findall(r'<th scope="col"[^>]*>(.*?)</th>', body)]
    found: dict[str, dict[str, str]] = {}
    for name, cells in re.findall(r'<th scope="row"[^>]*>(.*?)</th>(.*?)</tr>', body, re.DOTALL):
        texts = [plain(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", cells)]
        found[plain(name)] = dict(zip(headings, texts, strict=True))
    return found


def test_the_page_has_each_figure_below_its_name() -> None:
    for trained in KINDS:
        found = numbered(trained)
        html = page(found)
        for routes in KINDS:
            expected = {
                variant: {heading: text(row) for heading, text in ON_THE_PAGE.items()}
                for variant, row in rows_with(found, routes).items()
            }
            assert table_of(html, f"Figures, {routes} routes") == expected
            values = found["mismatch"][routes]
            said = (
                f"{routes.capitalize()} routes: mean |π − μ| {values['abs_prob_diff_mean']:.2e}, k3 "
                f"{values['kl_k3']:.2e} nats, π/μ {values['ratio_min']:.3g} to {values['ratio_max']:.3g}."
            )
            assert said in plain(html)
        other = next(routes for routes in KINDS if routes != trained)
        headings = (
            f"With {trained} routes, as the run trained",
            f"With {other} routes, as the run did not train",
        )
        assert all(html.count(heading) == 1 for heading in headings)
        assert "step_00000009" in html.partition("recomputed anchors from")[0]
        assert re.findall(r"<li><b>(\w+)</b>, (why \w+)", html) == [
            ("minirl", "why minirl"),
            ("gmpo", "why gmpo"),
        ]


def test_the_pages_drawings_are_of_the_routes_that_trained() -> None:
    for trained in KINDS:
        found = numbered(trained)
        html = page(found)
        rows = rows_with(found, trained)
        drawings = re.findall(
            r'aria-label="Masked share of ([^"]*?) by (probability|threshold)">(.*?)</svg>', html, re.DOTALL
        )
        assert [(name, by) for name, by, _ in drawings] == [
            (variant, by) for by in ("probability", "threshold") for variant in VARIANTS
        ]
        for name, by, drawing in drawings:
            row = rows[name]
            if by == "probability":
                bars = re.findall(r'<rect class="(\w+)"[^>]*><title>(.*?)</title>', drawing)
                assert [(sign, unescape(text)) for sign, text in bars] == [
                    (
                        each["sign"],
                        f"A {'>' if each['sign'] == 'positive' else '<'} 0, "
                        f"μ {each['prob_low']:g}\u2013{each['prob_high']:g}: "
                        f"masked {percent(each['masked_fraction'])}%, mean M {three(each['weight_mean'])}, "
                        f"of {each['num_tokens']:,} tokens",
                    )
                    for each in row["by_prob"]
                ]
            else:
                points = re.findall(r'<text class="middle value" x="([\d.]+)"[^>]*>(.*?)</text>', drawing)
                shown = [text for _, text in sorted(points, key=lambda point: float(point[0]))]
                assert shown == [f"{percent(1 - each['weight_mean'])}%" for each in row["sensitivity"]]
                assert f"<small>{row['threshold']}</small>" in html
        cells = re.findall(r'<td title="([^"]*?), ([^",]*?): ([\d.]+)%"', html)
        same = found["agreement"][trained]["same_decision"]
        assert cells == [
            (first, second, f"{100 * same[i][j]:.3f}")
            for i, first in enumerate(VARIANTS)
            for j, second in enumerate(VARIANTS)
        ]


def mean_and_deviation(row: dict[str, Any], name: str) -> tuple[float, float]:
    first, second = (each[name] for each in row["by_rollout"])
    return (first + second) / 2, abs(first - second) / 2**0.5


def test_the_spread_over_rollouts_is_of_the_figure_that_it_names() -> None:
    for trained in KINDS:
        found = numbered(trained)
        rows, shown = rows_with(found, trained), table_of(page(found), "Spread over rollouts")
        for variant, row in rows.items():
            masked, mass, cosine = (mean_and_deviation(row, name) for name in OF_ROLLOUT)
            assert shown[variant] == {
                "masked [%]": f"{percent(masked[0])} ± {percent(masked[1])}",
                "gradient mass kept [%]": f"{percent(mass[0])} ± {percent(mass[1])}",
                "cosine with no mask": f"{three(cosine[0])} ± {three(cosine[1])}",
            }
        text = tables_in(as_text(found))[f"{trained} routes, mean and standard deviation over rollouts"]
        for variant, row in rows.items():
            masked, mass, cosine = (mean_and_deviation(row, name) for name in OF_ROLLOUT)
            assert text[variant] == {
                "masked mean": f"{percent(masked[0])}%",
                "share sd": f"{percent(masked[1])}%",
                "grad. mean": f"{percent(mass[0])}%",
                "mass sd": f"{percent(mass[1])}%",
                "cosine mean": three(cosine[0]),
                "no mask sd": three(cosine[1]),
            }


def tables_in(text: str) -> dict[str, dict[str, dict[str, str]]]:
    """Texts by title, row and column of a terminal's tables, whose columns are eight characters wide."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for block in text.split("\n\n"):
        title, *lines = block.splitlines()
        if len(lines) < 3:
            continue
        width = max(map(len, VARIANTS))
        first, second, *rows = (
            [line[width:][start : start + 8].strip() for start in range(0, len(line) - width, 8)]
            for line in lines
        )
        headings = [f"{a} {b}" for a, b in zip(first, second, strict=True)]
        names = [line[:width].strip() for line in lines[2:]]
        found[title] = {
            name: dict(zip(headings, cells, strict=True)) for name, cells in zip(names, rows, strict=True)
        }
    return found


def test_the_table_has_each_figure_below_its_name() -> None:
    for trained in KINDS:
        found = numbered(trained)
        shown = tables_in(as_text(found))
        for routes in KINDS:
            values = found["mismatch"][routes]
            title = (
                f"{routes} routes: mean |pi-mu| {values['abs_prob_diff_mean']:.2e}  k3 {values['kl_k3']:.2e}  "
                f"pi/mu {values['ratio_min']:.3g} .. {values['ratio_max']:.3g}"
            )
            assert shown[title] == {
                variant: {heading: text(row) for heading, text in IN_THE_TABLE.items()}
                for variant, row in rows_with(found, routes).items()
            }
        assert len(shown) == 3, "two tables of figures, and the spread with the routes that trained"
