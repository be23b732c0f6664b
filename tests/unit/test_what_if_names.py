"""What-if shows each figure below its own name: no two figures of these results are equal."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from megatron_dppo.analysis.what_if.answer import as_text
from megatron_dppo.analysis.what_if.measures import PROB_EDGES

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
    """A result of three variants with both ways of routing, all of whose figures differ."""
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
    """These are masks: M is 1 for a kept token."""
    return three(1 - row["masked_fraction"])


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


def mean_and_deviation(row: dict[str, Any], name: str) -> tuple[float, float]:
    first, second = (each[name] for each in row["by_rollout"])
    return (first + second) / 2, abs(first - second) / 2**0.5


def test_the_spread_over_rollouts_is_of_the_figure_that_it_names() -> None:
    for trained in KINDS:
        found = numbered(trained)
        rows = rows_with(found, trained)
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
