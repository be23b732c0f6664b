"""Traces a planned run at two depths, and extrapolates the memory of a layer to deeper models."""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.registry import model_sizes
from megatron_dppo.errors import ConfigError, MegatronDppoError, Problem, TraceError
from megatron_dppo.plan.activations import Assumptions
from megatron_dppo.plan.job import FRAGMENTATION, Job
from megatron_dppo.plan.memory import memory_of
from megatron_dppo.plan.plan import Plan
from megatron_dppo.plan.stages import chunks_in_flight, chunks_of
from megatron_dppo.plan.trace.step import StepSettings, TracedStep, run_step
from megatron_dppo.plan.trace.tensors import BACKWARD, LOSS, STEP, Count
from megatron_dppo.plan.units import format_count

BETWEEN = "between steps"
MOMENTS = (BETWEEN, LOSS, BACKWARD, STEP)
"""Moments of a step that a plan also counts."""
AS_TRACED = Assumptions(expert_imbalance=1.0, attention_padding=1.0, fragmentation=0.0)
"""Assumptions of a trace: each expert gets the same number of tokens, and memory is not fragmented."""
_OF_STATES = ("parameters", "gradients", "optimizer")
_NOT_TRACED = ("routes", "top-K", "batch", "engine weights", "reserve")
_PROGRESS_S = 2.0
Announce = Callable[[str], None]


@dataclass(frozen=True)
class Trace:
    """The traced gradient step of one rank, with its plan.

    Attributes:
        settings: Settings of `deep`, on the first rank of a pipeline stage.
        stage: 0-based pipeline stage of the rank.
        num_layers: Number of the model's layers.
        own_layers: Number of this rank's layers.
        shallow: Step of a model with fewer layers than `deep`.
        deep: Step of a model with at most `num_layers` layers.
        planned: Planned bytes at each of `MOMENTS`, of the traced components.
        not_traced: Planned bytes at each of `MOMENTS`, of the other components: the step's micro-batches, and
            memory of libraries and the engine.
        gpu_bytes: Bytes of each GPU.
        seconds: Duration of the trace.
    """

    settings: StepSettings
    stage: int
    num_layers: int
    own_layers: int
    shallow: TracedStep
    deep: TracedStep
    planned: Mapping[str, int]
    not_traced: Mapping[str, int]
    gpu_bytes: int
    seconds: float

    @property
    def is_extrapolated(self) -> bool:
        """Whether fewer layers ran than the model has."""
        return self.deep.num_layers < self.num_layers

    @property
    def traced(self) -> dict[str, int]:
        """Bytes at each of `MOMENTS`; a stage without a loss has no bytes at the loss."""
        return {
            moment: self._extrapolated(_bytes_at(self.shallow, moment), _bytes_at(self.deep, moment))
            for moment in MOMENTS
            if moment == BETWEEN or moment in self.deep.peaks
        }

    @property
    def peak(self) -> tuple[str, int]:
        """The worst moment and its bytes, including untraced components and fragmentation."""
        held = self.traced[BETWEEN]
        totals = {
            moment: num_bytes + self.not_traced[moment] + int((num_bytes - held) * FRAGMENTATION)
            for moment, num_bytes in self.traced.items()
        }
        return max(totals.items(), key=lambda item: item[1])

    @property
    def per_layer(self) -> Count:
        """Operators of `layers_between` layers."""
        return self.deep.count - self.shallow.count

    @property
    def layers_between(self) -> int:
        """Difference between this rank's layers in the two steps."""
        return self.deep.own_layers - self.shallow.own_layers

    def _extrapolated(self, shallow: int, deep: int) -> int:
        return deep + (deep - shallow) * (self.own_layers - self.deep.own_layers) // self.layers_between


def _bytes_at(step: TracedStep, moment: str) -> int:
    return step.held.num_bytes if moment == BETWEEN else step.peaks[moment].num_bytes


def trace_run(plan: Plan, announce: Announce, num_layers: int | None = None) -> Trace:
    """Trace the worst rank of a planned run, as configured.

    Args:
        plan: Plan of the run.
        announce: Callback with a line of progress, from other processes.
        num_layers: Most layers that run; the rest is extrapolated. None runs all layers.

    Raises:
        ConfigError: `train` refuses the run, or it cannot be traced.
        TraceError: A step's shapes depend on values that a trace does not compute, or its process died.
    """
    started, job = time.perf_counter(), plan.job
    if plan.memory is None:
        action = "Solve the plan's problems first."
        raise ConfigError(Problem("--trace", "a run that train refuses", "one that it accepts", action))
    if job.config.model.dtype == "float32" and job.shape.sizes.num_experts:
        found = "model.dtype = 'float32' of a model with experts; torch shapes their products only in bfloat16"
        action = "Add --set model.dtype=bfloat16. The plan itself counts float32."
        raise ConfigError(Problem("--trace", found, "bfloat16", action))
    _refuse_other_layers(job)
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
        stage=stage,
        num_layers=job.shape.sizes.num_layers,
        own_layers=len(_own_layers(layout, stage, job.shape.sizes.num_layers)),
        shallow=_in_own_process(replace(settings, num_layers=shallow), announce),
        deep=_in_own_process(settings, announce),
        planned=planned,
        not_traced=not_traced,
        gpu_bytes=job.machine.gpu_bytes,
        seconds=time.perf_counter() - started,
    )


def planned_bytes(job: Job, stage: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the planned bytes at each of `MOMENTS` on a rank of a stage: traced components, and the rest."""
    memory = memory_of(replace(job, assumptions=AS_TRACED), job.layout)
    moments = dict(memory.stages[stage].moments)
    moments[BETWEEN] = {name: moments[LOSS].get(name, 0) for name in (*_OF_STATES, *_NOT_TRACED)}
    seen = {m: sum(n for name, n in moments[m].items() if name not in _NOT_TRACED) for m in MOMENTS}
    return seen, {m: sum(n for name, n in moments[m].items() if name in _NOT_TRACED) for m in MOMENTS}


def _refuse_other_layers(job: Job) -> None:
    if job.config.model.layer_spec == "transformer_engine":
        raise ConfigError(
            Problem(
                "model.layer_spec",
                "'transformer_engine'",
                "'torch' or 'auto': what Transformer Engine's kernels keep is not known without a GPU",
                "Trace with --set model.layer_spec=torch, which keeps a little more.",
            )
        )


def _depths(job: Job, layout: Layout, stage: int, num_layers: int | None) -> tuple[int, int]:
    """Return the numbers of layers of the two models: the first has half the layers, or one per chunk.

    If both have fewer layers than the full model, this rank has all its dense layers in both. Then only the
    number of MoE layers differs between the two, and from the full model.
    """
    whole, chunks = job.shape.sizes.num_layers, layout.pipeline * layout.virtual_pipeline
    wanted = whole if num_layers is None else num_layers
    is_whole = wanted >= whole
    deep = whole if is_whole else wanted // chunks * chunks
    if len(_own_layers(layout, stage, deep)) < 2 * layout.virtual_pipeline:
        found = f"{num_layers or whole} over {chunks} pipeline stages"
        expected = f"at least {2 * chunks}: two layers on each"
        raise ConfigError(Problem("--trace-layers", found, expected, "Give more, or leave it out."))
    if is_whole:
        return chunks, deep
    kinds = _kinds(job, layout, stage, whole)
    depths = range(deep // chunks // 2 * chunks, deep, chunks)
    alike = (depth for depth in depths if _kinds(job, layout, stage, depth) == kinds)
    shallow = next((depth for depth in alike if _adds_what_is_left(job, layout, stage, depth, deep)), None)
    if shallow is None or _kinds(job, layout, stage, deep) != kinds:
        found = f"{num_layers} of a model with {len(job.shape.sizes.moe_layers)} MoE layers among {whole}"
        expected = (
            f"so many that half of them have this rank's {format_count(kinds[0], 'dense layer')}, and others"
        )
        if job.shape.sizes.linear_layers:
            expected += ", and that some of the others mix linear attention and attention as all layers do"
        raise ConfigError(Problem("--trace-layers", found, expected, "Give more, or leave it out."))
    return shallow, deep


def _own_layers(layout: Layout, stage: int, num_layers: int) -> list[int]:
    """Return a rank's layers in a model of `num_layers` layers; empty if the pipeline has more stages."""
    if num_layers < layout.pipeline * layout.virtual_pipeline:
        return []
    return [layer for chunk in chunks_of(stage, layout, num_layers) for layer in chunk.layers]


def _kinds(job: Job, layout: Layout, stage: int, num_layers: int) -> tuple[int, bool]:
    """Return the number of a rank's dense layers in a model of `num_layers`, and whether it has MoE layers.

    Without MoE layers, the optimizer states of experts would not determine the peak of the step.
    """
    assert not isinstance(job.facts.model, Problem), "a job has a model"
    if not job.shape.sizes.moe_layers:
        return 0, True
    moe_layers = model_sizes(dict(job.facts.model) | {"num_hidden_layers": num_layers}).moe_layers
    own = _own_layers(layout, stage, num_layers)
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


def _in_own_process(settings: StepSettings, announce: Announce) -> TracedStep:
    """Run a step in a process forked from this one, after loading Megatron and before computing anything."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(settings, announce, sending))
    process.start()
    sending.close()
    try:
        result: TracedStep | MegatronDppoError = receiving.recv()
    except EOFError:
        process.join()
        raise TraceError(
            f"the process that traced {settings.num_layers} layers ended with status {process.exitcode} and no "
            "result; see its messages above. -9 means that memory ran out: free some, or give --trace-layers."
        ) from None
    process.join()
    if isinstance(result, MegatronDppoError):
        raise result
    return result


def _run(settings: StepSettings, announce: Announce, sending: Connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing is computed, so leave GPUs free
    torch.set_num_threads(1)  # a fork does not inherit threads
    progress = _Progress(settings.num_layers, announce)
    result: Any
    try:
        result = run_step(settings, progress)
    except MegatronDppoError as error:
        result = error
    sending.send(result)


class _Progress:
    """Reports the progress of a step every few seconds."""

    def __init__(self, num_layers: int, announce: Announce) -> None:
        self._num_layers, self._announce = num_layers, announce
        self._started = self._next = time.monotonic()

    def __call__(self, phase: str, num_bytes: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PROGRESS_S
            elapsed = f"{now - self._started:.0f} s"
            self._announce(f"{self._num_layers} layers, {phase}: {num_bytes / 2**30:.1f} GiB, {elapsed}")
