"""Writes the report's texts: differences between configs, missing metrics, caveats."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from megatron_dppo.analysis.lines import (
    WITHOUT_EFFECT,
    differing_keys,
    experiment_of,
    over_rollouts,
    places_of_equal,
)
from megatron_dppo.analysis.report.diagnostics import describe_unfinished
from megatron_dppo.analysis.report.summary import LAST, paired_kl_k3, summary
from megatron_dppo.config.load import flat, shown
from megatron_dppo.metrics.alarms import NOISE_LIMIT
from megatron_dppo.run_folder.reader import Run

PAIRED = ("mismatch_live/", "mismatch_replayed/")
SEEDS_FOR_A_CLAIM = 10
BOOKKEEPING = (  # differ in every run, or repeat another key in words
    *("run.folder", "versions.argv", "versions.layer_spec_reason"),
)


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return config keys and versions that differ, without bookkeeping, and each run's value."""
    of_runs = [flat(run.config) | flat(run.versions, "versions.") for run in runs]
    keys = [key for key in differing_keys(of_runs) if key not in BOOKKEEPING]
    return {key: [shown(values.get(key)) for values in of_runs] for key in keys}


def changes_of(run: Run) -> list[str]:
    """Return one sentence for each setting that was changed before a resume."""
    return [
        f"after {row.rollout} rollouts: {row.change.setting} from {row.change.was} to {row.change.now}"
        for row in run.changes
    ]


def why_missing(run: Run, metric: str) -> str:
    """Return the reason why a run has no such metric."""
    routing_replay = run.option("rollout.routing_replay")
    if not run.rollouts and not run.steps:
        return "the run has no finished gradient step yet"
    if metric.startswith(("routing/", *PAIRED)) and routing_replay in (None, "off"):
        return 'rollout.routing_replay is "off", so the rollout\'s expert choices were not captured'
    if metric.startswith(PAIRED) and not run.option("tracking.paired_routing_every"):
        return "tracking.paired_routing_every is 0, so no mini-batch was forwarded twice"
    if metric.startswith("routing/"):
        return "not in metrics.jsonl although routes were captured"
    if metric.startswith("drift/topk_tv"):
        return "no Top-K log-probs were kept, or none were compared"
    if metric.startswith("mismatch_age_"):
        return "no token was sampled by older weights than those it was first trained with"
    if metric.startswith("rule/"):
        return "the trust region of this run returns no such value"
    if metric.startswith("shadow/"):
        is_off = run.option("tracking.shadow") is False
        return (
            "tracking.shadow is false" if is_off else "the batches of this run lack what this preset compares"
        )
    if metric.startswith("eval/"):
        is_set = metric.split("/")[1] in (run.option("evaluation.sets") or {})
        return "this set was not evaluated, or not yet" if is_set else "evaluation.sets does not name this set"
    return "not in metrics.jsonl"


def caveats(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Return the caveats of the data, each as one or two plain sentences."""
    texts = [
        _seeds(runs),
        *_lengths(runs, names),
        _size(runs),
        *_several_causes(runs),
        *_changed(runs, names),
        _mismatch(runs),
        *_noise(runs, names),
        *_routing(runs, names),
        *_machines(runs),
        *_odd_files(runs, names),
    ]
    return [text for text in texts if text]


def _seeds(runs: Sequence[Run]) -> str:
    """Return a note on the number of seeds of each setting."""
    seeds = [shown(run.option("run.seed")) for run in runs]
    alike = places_of_equal([experiment_of(run) for run in runs])
    fewest = min(len({seeds[index] for index in indices}) for indices in alike)
    if fewest >= SEEDS_FOR_A_CLAIM:
        return (
            f"Each setting has {fewest} seeds or more; curves are single runs, and the intervals of the "
            "tables say nothing about another model to start from."
        )
    as_few = "one seed" if fewest == 1 else f"as few as {fewest} seeds"
    limit = (
        "it does not show how much another seed would differ"
        if len(runs) == 1
        else "a difference between two curves may be chance, and this report ranks nothing"
    )
    return (
        f"There is {as_few} per setting: {limit}. "
        f"To claim that a setting learns better, or collapses, takes {SEEDS_FOR_A_CLAIM} seeds or more of each."
    )


def _lengths(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    texts = describe_unfinished(runs, names)
    counts = [len(run.rollouts) for run in runs]
    if min(counts) != max(counts):
        texts.append(
            f"The runs have between {min(counts)} and {max(counts)} rollouts: compare curves only up to "
            f"rollout {min(counts)}, and read closing means with that in mind."
        )
    else:
        texts.append(f"Each run has {counts[0]} rollouts: what would come later is not known.")
    if min(counts) < 2 * LAST:
        texts.append(f"With so few rollouts the mean of the last {LAST} still contains early ones.")
    return texts


def _size(runs: Sequence[Run]) -> str:
    models = sorted({shown(run.option("model.load")) for run in runs})
    sizes = {row.values.get("model/num_parameters") for run in runs for row in run.rollouts[:1]} - {None}
    size = " and ".join(f"{value:,.0f} parameters" for value in sorted(filter(None, sizes)))
    what = f"models of {size}" if size else f"what model.load names ({', '.join(models)})"
    lengths = [summary(run)["response_length_last"] for run in runs]
    longest = max((length for length in lengths if length is not None), default=None)
    responses = f" and responses of about {longest:.0f} tokens" if longest is not None else ""
    return (
        f"These are results for {what}{responses}. Models of another size, and longer responses, may behave "
        "differently: a tiny model on a toy task shows that the machinery works, not which algorithm to choose."
    )


def _several_causes(runs: Sequence[Run]) -> list[str]:
    keys = [key for key in differences(runs) if not key.startswith(WITHOUT_EFFECT)]
    if len(keys) < 2:
        return []
    return [
        f"The runs differ in {len(keys)} things at once ({', '.join(keys)}): no effect belongs to one alone."
    ]


def _changed(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Return a note on runs with a config that holds only for their last part."""
    return [
        f"{name} is not one experiment: {'; '.join(changes_of(run))}. Its config and its label hold for what "
        "came after, and means over its rollouts mix both."
        for run, name in zip(runs, names, strict=True)
        if run.changes
    ]


def _mismatch(runs: Sequence[Run]) -> str:
    text = (
        "Mismatch is measured before the first gradient step of each rollout: it shows how far two engines "
        "disagree on the same weights, not how far the policy drifts during the steps that follow; drift holds "
        "both, each step's on its own mini-batch."
    )
    if any(run.option("rollout.engine") == "transformers" for run in runs):
        text += " It is the mismatch of the embedded engine, not of SGLang."
    return text


def _noise(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Return a note on trust regions that masked more than the noise limit before any update."""
    texts: list[str] = []
    for run, name in zip(runs, names, strict=True):
        masked = over_rollouts(run, "trust_region/noise_masked_fraction")[1]
        if masked and (mean := fmean(masked)) > NOISE_LIMIT:
            texts.append(
                f"{name}: {mean:.1%} of the tokens were masked before any update, mean of {len(masked)} "
                f"rollouts (at most {max(masked):.1%}): the trust region sits inside the noise of the "
                "engines, and part of what it masks later is noise as well."
            )
    return texts


def _routing(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    off = [
        name
        for run, name in zip(runs, names, strict=True)
        if run.option("rollout.routing_replay") in (None, "off")
    ]
    texts: list[str] = []
    if off and len(off) < len(runs):  # without any captured routes the note is useless
        texts.append(f'No routing agreement for {", ".join(off)}: rollout.routing_replay is "off".')
    if all(run.option("rollout.routing_replay") != "replay" for run in runs):
        return texts
    texts.append(
        "Replay (R3) mainly cuts the tail: read it by KL and by both ends of the ratio, not by mean |π − μ| "
        "alone, and never by a single mini-batch."
    )
    if any(paired_kl_k3(run)[2] for run in runs):
        texts.append(
            "Only the paired forward compares live and replayed routes on the same tokens; between two runs "
            "the tokens and the weights differ as well."
        )
    else:
        texts.append(
            "No run forwarded the same tokens with live and with replayed routes "
            "(tracking.paired_routing_every), so what replay brings is only seen between different runs."
        )
    return texts


def _machines(runs: Sequence[Run]) -> list[str]:
    hosts = {shown(run.versions.get("host")) for run in runs}
    if len(hosts) > 1:
        return [
            f"The runs ran on different machines ({', '.join(sorted(hosts))}): do not compare their seconds."
        ]
    return [
        "Seconds were measured on one machine that may have done other work. They do not rank implementations."
    ]


def _odd_files(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    texts: list[str] = []
    for run, name in zip(runs, names, strict=True):
        texts += [f"{name}: {note}." for note in run.notes]
        if num_non_finite := summary(run)["num_non_finite"]:
            texts.append(
                f"{name}: {num_non_finite} values are not finite; plots show gaps, and means skip them."
            )
    return texts
