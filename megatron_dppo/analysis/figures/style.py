"""Names, colours and titles of figures. Each algorithm has one colour, distinct for colour-blind readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import combinations
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.ticker import NullLocator, StrMethodFormatter
from matplotlib.typing import RcKeyType

from megatron_dppo.algorithms import Objective
from megatron_dppo.algorithms.own_rule import Own
from megatron_dppo.algorithms.paper_rules import Negative, Ratio, Relax
from megatron_dppo.analysis.lines import differing_keys
from megatron_dppo.config.load import shown

RC: Mapping[RcKeyType, Any] = MappingProxyType(
    {
        "font.family": "DejaVu Sans",
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.labelsize": 8,
        "axes.linewidth": 0.6,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.formatter.limits": (-3, 4),
        "axes.formatter.use_mathtext": False,
        "axes.formatter.useoffset": False,
        "figure.titlesize": 9,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.5,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "legend.handlelength": 2.4,
        "lines.linewidth": 1.5,
        "lines.markersize": 3,
        "savefig.facecolor": "white",
        "svg.hashsalt": "megatron_dppo",  # the same runs give the same file
        "text.parse_math": False,  # a token or a path may hold a $
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
    }
)
SOLID, DASHED, DOTTED = "-", (0, (4, 1.6)), (0, (1, 1.2))

# Colours of Okabe and Ito, then of Paul Tol's muted scheme. Variants share a colour and differ in the dash.
_ALGORITHMS: Mapping[str, tuple[str, str, Any]] = {  # name, colour, dash
    "pg_is": ("PG-IS", "#000000", SOLID),
    "pg_tis": ("PG-TIS (CISPO)", "#e69f00", DASHED),
    "cispo": ("CISPO", "#e69f00", SOLID),
    "grpo": ("GRPO", "#d55e00", DASHED),
    "grpo_clip_higher": ("GRPO-ClipHigher", "#d55e00", SOLID),
    "minirl": ("MiniRL", "#cc79a7", SOLID),
    "minirl_tis": ("MiniRL-TIS", "#cc79a7", DASHED),
    "dppo_binary_tv": ("DPPO-Binary-TV", "#0072b2", SOLID),
    "dppo_binary_kl": ("DPPO-Binary-KL", "#56b4e9", SOLID),
    "dppo_topk_tv": ("DPPO-TopK-TV", "#009e73", SOLID),
    "dppo_topk_kl": ("DPPO-TopK-KL", "#009e73", DASHED),
    "dppo_binary_tv_decoupled": ("DPPO-Binary-TV-Recompute", "#0072b2", DOTTED),
    "dppo_binary_kl_decoupled": ("DPPO-Binary-KL-Recompute", "#56b4e9", DOTTED),
    "negative_mask": ("Mask-Rollout", "#882255", SOLID),
    "negative_mask_recomputed": ("Mask-Recompute", "#882255", DASHED),
    "relax_both": ("Relax-both", "#117733", SOLID),
    "relax_high": ("Relax-high", "#999933", SOLID),
    "relax_low": ("Relax-low", "#aa4499", SOLID),
    "ipo": ("IPO", "#332288", SOLID),
    "ipo_2026_08": ("IPO (August 2026)", "#332288", DOTTED),
    "drpo": ("DRPO", "#332288", DASHED),
    "cppo": ("CPPO", "#44aa99", SOLID),
    "cppo_topk": ("CPPO-TopK", "#44aa99", DASHED),
    "trm": ("TRM", "#44aa99", DOTTED),
    "sapo": ("SAPO", "#ddcc77", SOLID),
    "gspo": ("GSPO", "#cc6677", SOLID),
    "icepop": ("IcePop", "#cc6677", DASHED),
    "mis": ("MIS", "#cc6677", DOTTED),
    "dppo_topk_kl_predictive": ("DPPO-TopK-KL, predictive", "#009e73", DOTTED),
    "estr": ("ESTR", "#999933", DASHED),
    "sat": ("SAT", "#999933", DOTTED),
    "vespo": ("VESPO", "#ddcc77", DASHED),
    "gmpo": ("GMPO", "#ddcc77", DOTTED),
    "minpro": ("MinPRO", "#e69f00", DOTTED),
}
LOOKS = MappingProxyType({preset: (colour, dash) for preset, (_, colour, dash) in _ALGORITHMS.items()})
NAMES = MappingProxyType({preset: name for preset, (name, _, _) in _ALGORITHMS.items()})
_SYMBOLS = {
    "delta_low": "δ₋",
    "delta_high": "δ₊",
    "eps_low": "ε₋",
    "eps_high": "ε₊",
    "alpha": "α",
    "rho_low": "ρ₋",
    "rho_high": "ρ₊",
    "tau_low": "τ₋",
    "tau_high": "τ₊",
    "power_low": "k₋",
    "power_high": "k₊",
    "decay_low": "λ₋",
    "decay_high": "λ₊",
    "ratio_cap": "C",
    "top_k": "K",
    "entropy_coef": "entropy",
    "ref_kl_coef": "β",
}
OWN_COLOURS = ("#661100", "#6699cc", "#aa4466", "#777711", "#888888")  # of users' rules, none of a preset's
# Shares of white in the shades, or of black. Successive shades are far apart.
_TINTS = (0.0, 0.45, 0.25, 0.65, -0.35, -0.6)
_REPLAYED: Mapping[Any, Any] = MappingProxyType(
    {SOLID: (0, (6, 1, 1, 1)), DASHED: (0, (4, 1.2, 1, 1.2, 1, 1.2)), DOTTED: (0, (1, 1, 1, 1, 1, 3.5))}
)
_REPLAYED_COLOURS = ("#d55e00", "#0072b2")  # next to cold colours, next to warm colours
_WARM = ("#d55e00", "#e69f00", "#cc79a7", "#882255", "#aa4499", "#999933", "#cc6677", "#ddcc77")
Settings = Mapping[str, str]
USUAL = "usual settings"
_LONGEST = 48  # characters of a label that lists every unusual setting
_TELLING = (
    "rollout.environment",
    "model.load",
    "data.prompts",
)  # more informative than any number, in this order
_PLAIN = "single_turn"  # the environment without a task in its name
_MOST_KEYS = 3  # in a label that does not list every unusual setting
_MOST_CANDIDATES = 24  # of the keys that such a label may have, the shortest


def objective_label(objective: Objective, alike: Sequence[Objective]) -> str:
    """Return the algorithm's name, with the fields on which it differs from others of the same preset."""
    known = [_settings(other) for other in alike]
    names = dict.fromkeys(name for settings in known for name in settings)
    own = _settings(objective)
    values = {name: own.get(name) for name in names if len({settings.get(name) for settings in known}) > 1}
    if values.keys() >= {"delta_low", "delta_high"} and objective.delta is not None:
        values = {"δ": objective.delta} | {k: v for k, v in values.items() if not k.startswith("delta")}
    name = NAMES.get(objective.name, objective.name)
    if isinstance(objective, Negative):  # the paper names these masks by their threshold
        name = name.replace("Mask", f"Mask-{_number(objective.delta_low)}")
        values = {key: value for key, value in values.items() if key not in ("δ", "delta_low", "delta_high")}
    parts = [f"{_SYMBOLS.get(key, key)} {_number(value)}" for key, value in values.items()]
    return ", ".join([name, *parts])


def _settings(objective: Objective) -> dict[str, Any]:
    """Return the fields of an objective, with each option of an own rule by its name."""
    found = {f.name: getattr(objective, f.name) for f in fields(objective) if f.name != "function"}
    over = {"over": objective.rule_over} if isinstance(objective, Own) else {}
    return found | over | objective.rule_options


def relaxed(objective: Objective) -> Relax:
    """Return the side of the clip that is lifted for rare tokens."""
    return objective.relax if isinstance(objective, Ratio) else "none"


def alpha_of(objective: Objective) -> float:
    """Return the mu below which tokens are rare; 0 if the rule does not read it."""
    return objective.alpha if isinstance(objective, Ratio) else 0.0


def plain_log_ticks(*axes: Axis) -> None:
    """Format powers of ten as 0.01: mathematical text is off, for tokens and paths may hold a $."""
    for axis in axes:
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(NullLocator())


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else shown(value)


def look(
    objective: Objective,
    shade: int = 0,
    *,
    is_replayed: bool = False,
    is_alone: bool = False,
    own_place: int = 0,
) -> dict[str, Any]:
    """Return colour and dash of an algorithm's lines; further lines of one preset are lighter or darker.

    A value of another field is no other algorithm, so its colour stays the preset's. Where one algorithm alone
    is in a panel with and without R3, they differ in colour. Among other algorithms they differ in the dash.

    Args:
        objective: Objective of the lines.
        shade: Place among the objectives of one preset.
        is_replayed: With R3.
        is_alone: The panel has no other algorithm.
        own_place: Index of a rule without a row in the table, among the rules without a row.
    """
    round_, place = divmod(own_place, len(OWN_COLOURS))
    of_own = OWN_COLOURS[place], (SOLID, DASHED, DOTTED)[round_ % 3]
    colour, dash = LOOKS.get(objective.name, of_own)
    if is_replayed and is_alone:
        return {"color": _REPLAYED_COLOURS[colour in _WARM], "linestyle": SOLID}
    tint = _TINTS[shade % len(_TINTS)]
    mixed = (1 - abs(tint)) * np.asarray(to_rgb(colour)) + max(tint, 0.0)
    return {"color": to_hex(tuple(mixed)), "linestyle": _REPLAYED[dash] if is_replayed else dash}


def labels_of(settings: Sequence[Settings]) -> list[tuple[str, str]]:
    """Return a short label and all differing settings, in words, for each experiment.

    A label lists the settings that are unlike most others'. If that is long, or another experiment's too, the
    label is the shortest setting that no other experiment has, or a few of them: the environment, the model or
    the prompts, if one of these is enough.

    Args:
        settings: Settings of each experiment, as text. A single experiment has an empty label.
    """
    if len(settings) < 2:
        return [("", "")] * len(settings)
    differing = differing_keys(settings)
    words = [", ".join(f"{key} = {shown(own.get(key))}" for key in differing) for own in settings]
    texts = _texts(settings, differing)
    listed = _unusual(settings, differing, texts)
    count = Counter(listed)
    labels = [
        label if len(label) <= _LONGEST and count[label] == 1 else _distinguishing(place, settings, texts)
        for place, label in enumerate(listed)
    ]
    return list(zip(_numbered(labels), words, strict=True))


def _texts(settings: Sequence[Settings], differing: Sequence[str]) -> list[dict[str, str]]:
    """Return each experiment's differing settings as `name value`, with paths cut to what differs."""
    last = Counter(key.rpartition(".")[2] for key in differing)
    found: list[dict[str, str]] = [{} for _ in settings]
    for key in differing:
        name = key if last[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2]
        name = "model" if key == "model.load" else name
        values = [shown(own.get(key)) for own in settings]
        brief = without_paths(values)
        for own, value in zip(found, values, strict=True):
            own[key] = f"{name} {brief[value]}"
    return found


def without_paths(values: Sequence[str]) -> dict[str, str]:
    """Return paths as the one part, near their end, in which all of them differ; other values as they are.

    If no single part differs everywhere, paths keep the last parts that do.
    """
    parts = {value: value.strip("/").split("/") for value in dict.fromkeys(values)}
    deepest = max(map(len, parts.values()), default=0)
    for depth in range(1, deepest + 1):
        names = {value: of[max(-depth, -len(of))] for value, of in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    for depth in range(2, deepest + 1):
        names = {value: " ".join(of[-depth:]) for value, of in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    return {value: " ".join(of) for value, of in parts.items()}


def _unusual(
    settings: Sequence[Settings], differing: Sequence[str], texts: Sequence[Mapping[str, str]]
) -> list[str]:
    """Return for each experiment the settings that are unlike most others'."""
    usual: dict[str, str | None] = {}
    for key in differing:
        (value, count), *others = Counter(own.get(key) for own in settings).most_common()
        usual[key] = value if not others or others[0][1] < count else ""  # "" if none
    return [
        ", ".join(text[key] for key in differing if own.get(key) != usual[key]) or USUAL
        for own, text in zip(settings, texts, strict=True)
    ]


def _distinguishing(place: int, settings: Sequence[Settings], texts: Sequence[Mapping[str, str]]) -> str:
    """Return the shortest settings of an experiment that no other one has."""
    own, others = settings[place], [other for index, other in enumerate(settings) if index != place]
    for keys in _candidates(own, texts[place]):
        if all(any(other.get(key) != own.get(key) for key in keys) for other in others):
            return ", ".join(texts[place][key] for key in keys)
    return USUAL


def _candidates(own: Settings, texts: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield sets of keys: few before many, informative ones first, then short texts first."""

    def rank(key: str) -> tuple[bool, int, int]:
        is_set = own.get(key) not in (None, _PLAIN)
        place = _TELLING.index(key) if is_set and key in _TELLING else len(_TELLING)
        return not is_set, place, len(texts[key])

    ordered = sorted(texts, key=rank)[:_MOST_CANDIDATES]
    for size in range(1, _MOST_KEYS + 1):
        yield from combinations(ordered, size)
    yield tuple(texts)


def _numbered(labels: Sequence[str]) -> list[str]:
    """Return the labels, equal ones with a number."""
    seen: Counter[str] = Counter()
    found: list[str] = []
    for label in labels:
        seen[label] += 1
        found.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return found
