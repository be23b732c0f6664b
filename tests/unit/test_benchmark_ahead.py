"""tools/benchmarks/ahead.py keeps the bound and counts what it sampled; its seconds mean nothing here."""

import pytest

from megatron_dppo.rollout.staleness import StalenessBound
from tools.benchmarks.ahead import Pace, measure


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_paced_run_keeps_its_bound(max_staleness: int) -> None:
    pace = Pace(prompts=3, samples=2, slots=4, scale=1e-4)
    figures = measure(pace, StalenessBound(3, max_staleness, 1.0 + max_staleness), num_rollouts=3)
    assert 0 <= figures.mean_age <= figures.max_age <= max_staleness
    assert figures.sampling_s > 0 and figures.formula_s >= pace.train_s + pace.push_s
    assert max_staleness > 0 or figures.prefill_s == 0
    assert figures.slots_busy > 0
    assert figures.hides_tail == (max_staleness * figures.formula_s >= figures.tail_s > 0)
    if max_staleness == 0:  # the trainer waits for the longest response
        sampling_s = max(figures.sampling_s, figures.tail_s)
        assert figures.formula_s == sampling_s + pace.train_s + pace.push_s and not figures.hides_tail
