"""The report's section on shadow masks."""

import re
from collections.abc import Sequence

from megatron_dppo.algorithms import PRESETS
from megatron_dppo.analysis.report.plots import Panel, Section, by_mini_step, finite_mean, over_rollouts
from megatron_dppo.run_folder.reader import Run

_EVALUATED = re.compile(r"shadow/(.+)/masked_fraction$")


def shadow_presets(runs: Sequence[Run]) -> list[str]:
    """Return the presets that some run evaluated as shadows and that can mask a token, in registry order."""
    evaluated = {
        found[1]
        for run in runs
        for row in run.steps
        for name in row.values
        if (found := _EVALUATED.match(name))
    }
    maskless = {name for name, objective in PRESETS.items() if objective.rule == "none"}
    order = list(PRESETS)
    return sorted(
        evaluated - maskless, key=lambda name: (order.index(name) if name in PRESETS else len(order), name)
    )


def shadow_sections(runs: Sequence[Run]) -> list[Section]:
    """Return a panel for each preset, over the run and by mini-step. Empty if no run has shadows."""
    names = shadow_presets(runs)
    if not names:
        return []
    over_the_run = Section(
        "shadow",
        "Shadow masks",
        "Share of the tokens with A ≠ 0 that each preset, as published, would have masked at the same weights "
        "and batches: it trained on none of them, so this says who would act, not how its own run would end.",
        tuple(Panel(name, (f"shadow/{name}/masked_fraction",)) for name in names),
        folded=True,
    )
    mini_steps = Section(
        "shadow-mini-steps",
        "Shadow masks by mini-step",
        "The same share by the place of a gradient step in its rollout, mean over the run: at 0 pi has the "
        "weights that sampled, and what is masked there is noise; the rise after it is how far training moved.",
        tuple(
            Panel(name, (f"shadow/{name}/masked_fraction",), x_title="gradient step", points=by_mini_step)
            for name in names
        ),
        folded=True,
    )
    return [over_the_run, mini_steps]


def agreement_table(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Return by preset each run's agreement with the mask that trained it, and a note on the difference."""
    return [{"label": name, "cells": [_cell(run, name) for run in runs]} for name in shadow_presets(runs)]


def _cell(run: Run, name: str) -> dict[str, str]:
    def mean(metric: str) -> float | None:
        return finite_mean(over_rollouts(run, f"shadow/{name}/{metric}")[1])

    agreement, masked, mass = (mean(name) for name in ("agreement", "masked_fraction", "dropped_mass_fraction"))
    if agreement is None or masked is None:
        return {"text": "–", "why": "this run did not evaluate it"}
    of_mass = "" if mass is None else f" and drop {mass:.2%} of the gradient's weight"
    return {
        "text": f"{agreement:.2%}".replace("%", " %"),
        "why": f"would mask {masked:.2%} of the tokens{of_mass}",
    }
