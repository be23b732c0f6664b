"""Traces a planned run at two depths, and extrapolates the memory of a layer to deeper models."""

import multiprocessing
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.registry import model_sizes
from megatron_dppo.plan.activations import Assumptions
from megatron_dppo.plan.job import FRAGMENTATION, Job
from megatron_dppo.plan.memory import memory_of
from megatron_dppo.plan.plan import Plan
from megatron_dppo.plan.stages import chunks_in_flight, chunks_of
from tests.support.traced_step.step import StepSettings, TracedStep, run_step
from tests.support.traced_step.tensors import BACKWARD, LOSS, STEP

BETWEEN = "between steps"
MOMENTS = (BETWEEN, LOSS, BACKWARD, STEP)
"""Moments of a step that a plan also counts."""
AS_TRACED = Assumptions(expert_imbalance=1.0, attention_padding=1.0, fragmentation=0.0)
"""Assumptions of a trace: each expert gets the same number of tokens, and memory is not fragmented."""
_OF_STATES = ("parameters", "gradients", "optimizer")
_NOT_TRACED = ("routes", "top-K", "batch", "engine weights", "reserve")


@dataclass(frozen=True)
class Trace:
    """The traced gradient step of one rank, with its plan.

    Attributes:
        settings: Settings of `deep`, on the first rank of the pipeline stage that the plan finds worst.
        own_layers: Number of this rank's layers in the complete model.
        shallow: Step of a model with fewer layers than `deep`.
        deep: Step of a model with fewer layers than the complete one.
        planned: Planned bytes at each of `MOMENTS`, of the traced components.
        not_traced: Planned bytes at each of `MOMENTS`, of the other components.
    """

    settings: StepSettings
    own_layers: int
    shallow: TracedStep
    deep: TracedStep
    planned: Mapping[str, int]
    not_traced: Mapping[str, int]

    @property
    def traced(self) -> dict[str, int]:
        """Bytes at each of `MOMENTS`, extrapolated; a stage without a loss has no bytes at the loss."""
        found: dict[str, int] = {}
        for moment in MOMENTS:
            if moment == BETWEEN or moment in self.deep.peaks:
                shallow, deep = (_bytes_at(step, moment) for step in (self.shallow, self.deep))
                rest = self.own_layers - self.deep.own_layers
                found[moment] = deep + (deep - shallow) * rest // self.layers_between
        return found

    @property
    def peak(self) -> int:
        """Bytes at the worst moment, with the planned bytes of untraced components and fragmentation."""
        held = self.traced[BETWEEN]
        return max(
            num_bytes + self.not_traced[moment] + int((num_bytes - held) * FRAGMENTATION)
            for moment, num_bytes in self.traced.items()
        )

    @property
    def layers_between(self) -> int:
        """Difference between this rank's layers in the two steps."""
        return self.deep.own_layers - self.shallow.own_layers

    @property
    def waits_between(self) -> Counter[tuple[str, str]]:
        """Waits of `layers_between` layers, by phase and by operator with its source line."""
        waits = Counter(self.deep.waits)
        waits.subtract(self.shallow.waits)
        return waits


def _bytes_at(step: TracedStep, moment: str) -> int:
    return step.held if moment == BETWEEN else step.peaks[moment]


def trace_run(plan: Plan, num_layers: int) -> Trace:
    """Trace the worst rank of a planned run that `train` accepts, with at most `num_layers` layers."""
    job = plan.job
    assert plan.memory is not None, "train accepts the run"
    layout, stage = job.layout, plan.memory.worst.stage
    shallow, deep = _depths(job, layout, stage, num_layers)
    settings = StepSettings(
        config=job.config,
        num_layers=deep,
        layout=layout,
        rank=stage * layout.world_size // layout.pipeline,
        num_tokens=job.workload.microbatch_tokens(layout.data),
        tree=job.workload.tree(layout.data),
        num_microbatches=_microbatches_to_run(job, layout, stage),
    )
    planned, not_traced = planned_bytes(job, stage)
    return Trace(
        settings=settings,
        own_layers=len(_own_layers(layout, stage, job.shape.sizes.num_layers)),
        shallow=_in_own_process(replace(settings, num_layers=shallow)),
        deep=_in_own_process(settings),
        planned=planned,
        not_traced=not_traced,
    )


def planned_bytes(job: Job, stage: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the planned bytes at each of `MOMENTS` on a rank of a stage: traced components, and the rest."""
    memory = memory_of(replace(job, assumptions=AS_TRACED), job.layout)
    moments = dict(memory.stages[stage].moments)
    moments[BETWEEN] = {name: moments[LOSS].get(name, 0) for name in (*_OF_STATES, *_NOT_TRACED)}
    seen = {m: sum(n for name, n in moments[m].items() if name not in _NOT_TRACED) for m in MOMENTS}
    return seen, {m: sum(n for name, n in moments[m].items() if name in _NOT_TRACED) for m in MOMENTS}


def _depths(job: Job, layout: Layout, stage: int, num_layers: int) -> tuple[int, int]:
    """Return the numbers of layers of the two models: the first has about half the layers of the second.

    This rank has all its dense layers in both. So only the number of MoE layers differs between the two, and
    from the complete model.
    """
    whole, chunks = job.shape.sizes.num_layers, layout.pipeline * layout.virtual_pipeline
    assert num_layers < whole, "a part of the model"
    deep = num_layers // chunks * chunks
    kinds = _kinds(job, layout, stage, whole)
    assert _kinds(job, layout, stage, deep) == kinds, "more layers, to have all dense ones and others"
    for depth in range(deep // chunks // 2 * chunks, deep, chunks):
        is_alike = _kinds(job, layout, stage, depth) == kinds
        if is_alike and _adds_what_is_left(job, layout, stage, depth, deep):
            return depth, deep
    raise AssertionError("more layers, so that those between the depths are like those that are left out")


def _own_layers(layout: Layout, stage: int, num_layers: int) -> list[int]:
    """Return a rank's layers in a model of `num_layers` layers; empty if the pipeline has more stages."""
    if num_layers < layout.pipeline * layout.virtual_pipeline:
        return []
    return [layer for chunk in chunks_of(stage, layout, num_layers) for layer in chunk.layers]


def _kinds(job: Job, layout: Layout, stage: int, num_layers: int) -> tuple[int, bool]:
    """Return the number of a rank's dense layers in a model of `num_layers`, and whether it has MoE layers.

    Without MoE layers, the optimizer states of experts would not determine the peak of the step.
    """
    own = _own_layers(layout, stage, num_layers)
    if not job.shape.sizes.moe_layers:
        return 0, bool(own)
    assert isinstance(job.facts.model, dict), "a job has a model"
    moe_layers = model_sizes(job.facts.model | {"num_hidden_layers": num_layers}).moe_layers
    num_dense = len([layer for layer in own if layer not in moe_layers])
    return num_dense, num_dense < len(own)


def _adds_what_is_left(job: Job, layout: Layout, stage: int, shallow: int, deep: int) -> bool:
    """Whether the layers that the deeper model adds mix linear attention and attention as the rest does."""
    linear = job.shape.sizes.linear_layers
    own = [_own_layers(layout, stage, depth) for depth in (shallow, deep, job.shape.sizes.num_layers)]
    few, more, whole = (sum(layer in linear for layer in layers) for layers in own)
    return (more - few) * (len(own[2]) - len(own[1])) == (whole - more) * (len(own[1]) - len(own[0]))


def _microbatches_to_run(job: Job, layout: Layout, stage: int) -> int:
    """Return the number of micro-batches that fill the pipeline on this stage."""
    num = job.workload.num_microbatches(layout.data)
    if layout.virtual_pipeline > 1:
        return min(num, 2 * layout.pipeline)
    return chunks_in_flight(stage, layout, num)


def _in_own_process(settings: StepSettings) -> TracedStep:
    """Run a step in a process forked from this one, which must not have computed anything in threads."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(settings, sending))
    process.start()
    sending.close()
    try:
        return receiving.recv()
    except EOFError:
        process.join()
        raise AssertionError(f"the traced step ended with status {process.exitcode}; see above") from None
    finally:
        process.join()


def _run(settings: StepSettings, sending: Connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing is computed, so leave GPUs free
    torch.set_num_threads(1)  # a fork does not inherit threads
    sending.send(run_step(settings))
