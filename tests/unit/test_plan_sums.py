"""The sums that `plan` prints: no component is left out at any moment, and none is counted twice.

Every component is a power of ten, so that the digits of a sum name its parts.
"""

from dataclasses import fields, replace
from typing import Any

import pytest

from megatron_dppo.plan import memory
from megatron_dppo.plan.job import BATCH_BYTES, PROCESS_HOST_BYTES, RESERVE_BYTES, Job
from megatron_dppo.plan.memory import EngineMemory, StageMemory
from megatron_dppo.plan.stages import RankStates, StageActivations, stage_parts
from tests.support.plan_models import COLOCATED, QWEN3_8B, job_of, layout_of

STATES = RankStates(*(10**power for power in range(10)))
KEPT = StageActivations(*(10**power for power in range(10, 16)))
WEIGHTS, CACHE, WORKSPACE, RESIDUE = (10**power for power in range(16, 20))
PASSING = 10**20
EMBEDDED = {"rollout.engine": "transformers"}


def moments_of(job: Job, *, is_resident: bool, monkeypatch: pytest.MonkeyPatch) -> StageMemory:
    """The moments of one stage of a job on eight GPUs, made of powers of ten."""
    monkeypatch.setattr(memory, "stage_activations", lambda *_: KEPT)
    monkeypatch.setattr(memory, "passing_bytes", lambda *_: PASSING)
    layout = layout_of(8)
    engine = EngineMemory(WEIGHTS, CACHE, WORKSPACE, RESIDUE, is_resident, 1, 1, False, "an engine")
    whole = replace(job, assumptions=replace(job.assumptions, fragmentation=0.0))
    (part,) = stage_parts(whole, layout)
    return StageMemory(0, memory.stage_moments(whole, layout, engine, part, STATES))


@pytest.mark.parametrize(
    ("settings", "is_resident"),
    [
        (COLOCATED, False),  # takes turns with the trainer
        (EMBEDDED, True),
        (EMBEDDED | {"rollout.release_trainer": True}, False),
    ],
)
def test_every_component_is_counted_once_at_each_moment(
    settings: dict[str, Any], is_resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(QWEN3_8B, settings)
    assert job.config.rollout.colocated is not is_resident
    found = moments_of(job, is_resident=is_resident, monkeypatch=monkeypatch)
    batch = job.workload.step_rows(8) * (BATCH_BYTES + job.workload.topk_bytes)
    if job.shares_prefixes:
        batch += found.moments["loss"]["batch"] - job.workload.step_rows(8) * BATCH_BYTES
    trainer = STATES.parameters + STATES.gradients + STATES.optimizer_between
    in_training = trainer + batch + RESERVE_BYTES + RESIDUE + WEIGHTS * is_resident
    held = KEPT.held + KEPT.passed
    expected = {
        "loss": in_training + held + KEPT.head + KEPT.logits,
        "backward": in_training + held + KEPT.again + KEPT.working + STATES.largest_gradient,
        "step": in_training - STATES.optimizer_between + STATES.optimizer + STATES.step_temporaries,
        "rollout": WEIGHTS + CACHE + WORKSPACE + RESERVE_BYTES + trainer * is_resident,
        "sync": WEIGHTS
        + RESERVE_BYTES
        + RESIDUE
        + PASSING
        + (trainer if is_resident else STATES.largest_parameter),
    }
    assert {name: found.total(name) for name in memory.MOMENTS} == expected
    assert found.peak == max(expected.values()) and expected[found.worst_moment] == found.peak


@pytest.mark.parametrize("is_asynchronous", [True, False])
@pytest.mark.parametrize("settings", [COLOCATED, EMBEDDED])
def test_every_component_of_the_host_is_counted_once(settings: dict[str, Any], is_asynchronous: bool) -> None:
    """Of the stage with the most bytes, for each of a node's ranks."""
    more = {"checkpoint.asynchronous": is_asynchronous, "algorithm.ref_kl_coef": 0.1}
    job = job_of(QWEN3_8B, settings | more)
    larger = RankStates(*(2 * getattr(STATES, field.name) for field in fields(STATES)))
    found = memory._host_memory(job, layout_of(8), [STATES, larger, STATES])
    saved = larger.checkpoint if is_asynchronous else larger.checkpoint_pieces
    released = (larger.parameters + larger.optimizer_between) * job.config.rollout.colocated
    rest = PROCESS_HOST_BYTES + found.per_rank["rollout data"]
    expected = rest + larger.optimizer_on_host + released + larger.parameters + saved
    assert sum(found.per_rank.values()) == expected and found.per_rank["rollout data"] > 0
    assert found.per_node == expected * job.machine.ranks_per_node
