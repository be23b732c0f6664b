"""Style of all figures: one colour for each algorithm, distinct for colour-blind readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.ticker import NullLocator, StrMethodFormatter
from matplotlib.typing import RcKeyType

from megatron_dppo.algorithms import Objective

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

# Colours of Okabe and Ito, then of Paul Tol's muted scheme. Kin share a colour; the dash tells them apart.
LOOKS: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "pg_is": ("#000000", SOLID),
        "pg_tis": ("#e69f00", DASHED),
        "cispo": ("#e69f00", SOLID),
        "grpo": ("#d55e00", DASHED),
        "grpo_clip_higher": ("#d55e00", SOLID),
        "minirl": ("#cc79a7", SOLID),
        "minirl_tis": ("#cc79a7", DASHED),
        "dppo_binary_tv": ("#0072b2", SOLID),
        "dppo_binary_kl": ("#56b4e9", SOLID),
        "dppo_topk_tv": ("#009e73", SOLID),
        "dppo_topk_kl": ("#009e73", DASHED),
        "dppo_binary_tv_decoupled": ("#0072b2", DOTTED),
        "dppo_binary_kl_decoupled": ("#56b4e9", DOTTED),
        "negative_mask": ("#882255", SOLID),
        "negative_mask_recomputed": ("#882255", DASHED),
        "relax_both": ("#117733", SOLID),
        "relax_high": ("#999933", SOLID),
        "relax_low": ("#aa4499", SOLID),
        "ipo": ("#332288", SOLID),
        "drpo": ("#332288", DASHED),
        "cppo": ("#44aa99", SOLID),
        "cppo_topk": ("#44aa99", DASHED),
        "trm": ("#44aa99", DOTTED),
        "sapo": ("#ddcc77", SOLID),
        "gspo": ("#cc6677", SOLID),
        "icepop": ("#cc6677", DASHED),
        "mis": ("#cc6677", DOTTED),
        "dppo_topk_kl_predictive": ("#009e73", DOTTED),
    }
)
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "pg_is": "PG-IS",
        "pg_tis": "PG-TIS",
        "cispo": "CISPO",
        "grpo": "GRPO",
        "grpo_clip_higher": "GRPO-ClipHigher",
        "minirl": "MiniRL",
        "minirl_tis": "MiniRL-TIS",
        "dppo_binary_tv": "DPPO-Binary-TV",
        "dppo_binary_kl": "DPPO-Binary-KL",
        "dppo_topk_tv": "DPPO-TopK-TV",
        "dppo_topk_kl": "DPPO-TopK-KL",
        "dppo_binary_tv_decoupled": "DPPO-Binary-TV, recomputed",
        "dppo_binary_kl_decoupled": "DPPO-Binary-KL, recomputed",
        "negative_mask": "Mask",
        "negative_mask_recomputed": "Mask, recomputed",
        "relax_both": "Relax-both",
        "relax_high": "Relax-high",
        "relax_low": "Relax-low",
        "ipo": "IPO",
        "drpo": "DRPO",
        "cppo": "CPPO",
        "cppo_topk": "CPPO-TopK",
        "trm": "TRM",
        "sapo": "SAPO",
        "gspo": "GSPO",
        "icepop": "IcePop",
        "mis": "MIS",
        "dppo_topk_kl_predictive": "DPPO-TopK-KL, predictive",
    }
)
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
    "ratio_cap": "C",
    "top_k": "K",
    "entropy_coef": "entropy",
    "ref_kl_coef": "β",
}
_WHITES = (0.0, 0.45, 0.25, 0.65)  # shares of white in the shades, those in turn far apart
_REPLAYED = (0, (6, 1, 1, 1))
_REPLAYED_COLOURS = ("#d55e00", "#0072b2")  # beside cold colours, beside warm ones
_WARM = ("#d55e00", "#e69f00", "#cc79a7", "#882255", "#aa4499", "#999933", "#cc6677", "#ddcc77")


def objective_label(objective: Objective, alike: Sequence[Objective]) -> str:
    """Return the algorithm's name, with the fields on which it differs from others of the same preset."""
    differing = [f.name for f in fields(Objective) if len({getattr(other, f.name) for other in alike}) > 1]
    values = {name: getattr(objective, name) for name in differing}
    if values.keys() >= {"delta_low", "delta_high"} and objective.delta is not None:
        values = {"δ": objective.delta} | {k: v for k, v in values.items() if not k.startswith("delta")}
    parts = [f"{_SYMBOLS.get(name, name)} {_number(value)}" for name, value in values.items()]
    return ", ".join([NAMES.get(objective.name, objective.name), *parts])


def plain_log_ticks(*axes: Axis) -> None:
    """Format powers of ten as 0.01: mathematical text is off, for tokens and paths may hold a $."""
    for axis in axes:
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(NullLocator())


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def look(
    objective: Objective, shade: int = 0, *, is_replayed: bool = False, is_alone: bool = False
) -> dict[str, Any]:
    """Return colour and dash of an algorithm's lines; further lines of one preset are lighter.

    A value of another field is no other algorithm, so its colour stays the preset's. Where one algorithm alone
    stands in a panel with and without R3, colour tells them apart; among others, the dash does.
    """
    colour, dash = LOOKS.get(objective.name, ("#777777", SOLID))
    if is_replayed and is_alone:
        return {"color": _REPLAYED_COLOURS[colour in _WARM], "linestyle": SOLID}
    white = _WHITES[shade % len(_WHITES)]
    mixed = (1 - white) * np.asarray(to_rgb(colour)) + white
    return {"color": to_hex(tuple(mixed)), "linestyle": _REPLAYED if is_replayed and dash == SOLID else dash}
