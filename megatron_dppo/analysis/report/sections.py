"""Lists the sections of the report in order, each with one sentence on how to read it."""

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from megatron_dppo.algorithms import PRESETS
from megatron_dppo.analysis.lines import finite_mean, over_rollouts
from megatron_dppo.analysis.report.diagnostics import why_not_comparable
from megatron_dppo.analysis.report.mismatch_sources import has_routes, mismatch_sections
from megatron_dppo.analysis.report.plots import (
    PHASES,
    Panel,
    Section,
    agreement_by_layer,
    by_mini_step,
    seconds_by_phase,
    shares_by_phase,
)
from megatron_dppo.run_folder.reader import Run

REWARD = Section(
    "reward",
    "Reward",
    "Mean reward of each rollout's samples, at the training temperature: it should rise, and a steady fall "
    "is how a collapse shows.",
    (Panel("reward/mean", ("reward/mean",), least=0.1),),
)

TRAINING = (
    Section(
        "response-length",
        "Response length",
        "Tokens per response, end-of-sequence included: a climb to the limit or a sudden drop often comes with "
        "a collapse.",
        (Panel("rollout/response_length_mean", ("rollout/response_length_mean",), least_share=0.1),),
    ),
    Section(
        "entropy",
        "Entropy",
        "How undecided the policy is at each token, in nats: it falls as the model learns, and near 0 it has "
        "stopped exploring.",
        (Panel("policy/entropy", ("policy/entropy",), least=0.05),),
    ),
    Section(
        "prob-diff",
        "Mean |π − μ|",
        "Distance between trainer and rollout engine at the same weights, before the first gradient step: the "
        "lower the better, and a masking threshold below it masks noise.",
        (Panel("mismatch/abs_prob_diff_mean", ("mismatch/abs_prob_diff_mean",), least_share=0.2),),
    ),
    Section(
        "kl",
        "KL(μ ‖ π)",
        "Two estimates of one divergence: k3 is steady and shows the level, k1 is noisy and should scatter "
        "around the same small value, at times below 0.",
        (
            Panel("mismatch/kl_k3", ("mismatch/kl_k3",), log=True),
            Panel("mismatch/kl_k1", ("mismatch/kl_k1",)),
        ),
    ),
    Section(
        "ratio",
        "Both ends of π/μ",
        "The single most extreme token of each rollout on either side: 1 is perfect, and a tail that moves "
        "away from 1 matters even if the mean looks calm.",
        (
            Panel("mismatch/ratio_max", ("mismatch/ratio_max",), log=True),
            Panel("mismatch/ratio_min", ("mismatch/ratio_min",), log=True),
        ),
    ),
    Section(
        "masked",
        "Masked fraction by sign",
        "Share of the tokens with positive and with negative advantage that the trust region drops: near 0 it "
        "hardly acts, and far above a few percent it does much of the steering.",
        (
            Panel("A > 0", ("trust_region/masked_fraction_positive",), least=0.002),
            Panel("A < 0", ("trust_region/masked_fraction_negative",), least=0.002),
            Panel(
                "before any update: noise of the engines", ("trust_region/noise_masked_fraction",), least=0.002
            ),
        ),
    ),
    Section(
        "agreement",
        "Routing agreement",
        "Share of experts on which the trainer's live router and the rollout's agree: 1 means the same "
        "experts, and replay does not change this number, it makes up for what is missing.",
        (
            Panel("routing/agreement_mean", ("routing/agreement_mean",), least=0.02),
            Panel(
                "by layer, mean over the run",
                ("routing/agreement_layer_<n>",),
                x_title="layer",
                points=agreement_by_layer,
                least=0.02,
            ),
        ),
    ),
    Section(
        "paired",
        "Paired forward: live and replayed routes",
        "The same tokens and weights, forwarded once with the live router (solid) and once with the rollout's "
        "experts (dotted): the gap between the two lines of a run is what replay removes.",
        (Panel("k3 KL", ("mismatch_live/kl_k3", "mismatch_replayed/kl_k3"), log=True),),
    ),
)

TIME = Section(
    "time",
    "Time per phase",
    "Where a rollout's seconds go on the machine that ran it: shorter is faster, and the tallest bar is the "
    "one worth work.",
    (
        Panel(
            "seconds per rollout, mean over the run",
            tuple(f"time/{phase}_s" for phase in PHASES),
            x_title="phase",
            points=seconds_by_phase,
            bars=True,
            unit=" s",
        ),
    ),
)
_OF_ROUTES = ("agreement", "paired")
_KL = next(section for section in TRAINING if section.id == "kl")

BOUND = Section(
    "bound",
    "Surrogate and bound",
    "What the step promises on its own batch, in units of the advantage, and how far the promise may be off: "
    "if the smaller term exceeds the surrogate, the theorems promise nothing. The quadratic term is estimated "
    "from below, and the linear one without bias.",
    (
        Panel("surrogate", ("theory/surrogate",)),
        Panel("linear term", ("theory/linear_term",), log=True),
        Panel("quadratic term", ("theory/quadratic_term",), log=True),
    ),
)
_BY_FILE = re.compile(r"source/.+/reward_mean$")
_EVALUATED = re.compile(r"shadow/(.+)/masked_fraction$")


def sections(runs: Sequence[Run]) -> list[Section]:
    """Return all sections. Evaluation, routing, sources, shadows and bound appear if a run has them."""
    names = {name for run in runs for row in _eval_rows(run) for name in row if name.startswith("eval/")}
    evaluation = Section(
        "evaluation",
        "Evaluation",
        "Scores on prompts that are not trained on, sampled with the evaluation's own settings; shaded is the "
        "95 % interval over the prompts of a set, and x is the number of rollouts finished before it.",
        tuple(_eval_panels(names)),
    )
    has_bound = any("theory/surrogate" in row.values for run in runs for row in run.steps)
    sources, *others = mismatch_sections(runs) or [_KL]
    without = () if any(map(has_routes, runs)) else _OF_ROUTES
    return [
        sources,
        REWARD,
        *_by_file(runs),
        *([evaluation] if names else []),
        *(section for section in TRAINING if section is not sources and section.id not in without),
        _time(runs),
        *others,
        *rule_sections(runs),
        *shadow_sections(runs),
        *([BOUND] if has_bound else []),
    ]


def _by_file(runs: Sequence[Run]) -> Iterator[Section]:
    """Yield the section on the prompt files, if a run has several."""
    names = sorted(
        {name for run in runs for row in run.rollouts for name in row.values if _BY_FILE.match(name)}
    )
    if names:
        reading = (
            "Mean reward over the prompts of each file of data.prompts: a file that stays flat at 0 or at the "
            "largest reward teaches nothing, and its weight may be lowered."
        )
        yield Section("reward-by-file", "Reward by prompt file", reading, tuple(Panel(n, (n,)) for n in names))


def _time(runs: Sequence[Run]) -> Section:
    """Return the section on seconds, or on shares of phases if seconds may not be compared."""
    why = why_not_comparable(runs)
    if not why:
        return TIME
    panel = replace(TIME.panels[0], title="% of a rollout's time", points=shares_by_phase, unit=" %")
    reading = f"Where a rollout's time goes in each run. Seconds are not compared: {why}."
    return replace(TIME, reading=reading, panels=(panel,))


def _eval_panels(names: Set[str]) -> Iterator[Panel]:
    """Yield for each set its score, pass@k for the largest k, truncation and response length."""
    for prefix in sorted({name.rpartition("/")[0] for name in names}):
        own = {name.rpartition("/")[2] for name in names if name.rpartition("/")[0] == prefix}
        scores = sorted(name for name in own if re.fullmatch(r"avg_at_\d+", name))
        for name in (f"{prefix}/{score}" for score in scores):
            yield Panel(name, (name,), band=(f"{name}_low", f"{name}_high"))
        ks = [int(found[1]) for name in own if (found := re.fullmatch(r"pass_at_(\d+)", name))]
        others = [f"pass_at_{max(ks)}"] if ks else []
        others += [name for name in ("truncated_fraction", "response_length_mean") if name in own]
        yield from (Panel(f"{prefix}/{name}", (f"{prefix}/{name}",)) for name in others)


def _eval_rows(run: Run) -> list[set[str]]:
    return [set(row.values) for row in (*run.rollouts, *run.evaluations)]


def rule_sections(runs: Sequence[Run]) -> list[Section]:
    """Return a section with a panel for each value that a custom rule returned, or none."""
    names = {name for run in runs for row in run.steps for name in row.values if name.startswith("rule/")}
    reading = "Mean over learning tokens of each value that the custom rule returns by name."
    panels = tuple(Panel(name, (name,)) for name in sorted(names))
    return [Section("rule", "Values of the custom rule", reading, panels)] if panels else []


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
        "and batches. A run with that preset has other weights, so this does not predict how it would end.",
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
