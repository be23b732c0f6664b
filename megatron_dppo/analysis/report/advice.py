"""Gives advice on asynchronous sampling, by the same rules as a run's log."""

from __future__ import annotations

from megatron_dppo.metrics.sampling_advice import WINDOW, Limits, advice, means_of
from megatron_dppo.run_folder.reader import Run

_KEYS = ("prompts_per_rollout", "max_staleness", "over_sampling", "max_response_tokens")


def sampling_advice(run: Run) -> str | None:
    """Return advice on the run's last rollouts, or `None` if there is none or the run is synchronous."""
    values = [run.option(f"rollout.{key}") for key in _KEYS]
    rows = [row.values for row in run.rollouts[-WINDOW:]]
    if not values[1] or None in values or len(rows) < WINDOW:
        return None
    first = run.rollouts[-len(rows)].rollout
    lengths = [row.values.get("theory/longest_response", 0.0) for row in run.steps if row.rollout >= first]
    limits = Limits(*values)
    means = means_of(rows, limits, max(lengths, default=0.0) or None)
    found = None if means is None else advice(means, limits)
    return None if found is None else found.text
