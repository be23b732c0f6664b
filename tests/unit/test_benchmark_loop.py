"""What tools/benchmarks/loop.py counts as the floor of a rollout."""

import pytest

from megatron_dppo.data.batches.balance import SampleCost
from tools.benchmarks.loop import rollout_flops


def test_a_rollout_is_a_training_step_and_a_forward_pass_without_what_was_cached() -> None:
    cost = SampleCost(linear=600.0, quadratic=6.0)
    row = {"engine/prompt_tokens": 4 * 7.0, "engine/cached_tokens": 18.0, "rollout/response_length_mean": 17.0}
    training = 4 * (600 * 24 + 6 * 24 * 24)
    for fraction in (1.0, 0.75):
        expected = training * (fraction + 1 / 3) - 200 * 18
        found = rollout_flops(cost, 4, row | {"batch/forwarded_fraction": fraction})
        assert found == pytest.approx(expected), fraction
