"""A plan: what the configured layout needs, whether it fits, and which layouts would."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_dppo.actor.layout import Layout
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import LayoutError, Problem
from megatron_dppo.plan.advice import advise
from megatron_dppo.plan.cost import StepTime, step_time
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.machine import Machine
from megatron_dppo.plan.memory import Memory, memory_of
from megatron_dppo.plan.model import read_model_shape
from megatron_dppo.plan.options import COUNTED_MODULES, Granularity, Options, recompute_of
from megatron_dppo.plan.search import Found, choices, fits, fits_cache, fits_hosts, problems_of, propose
from megatron_dppo.plan.units import in_gib
from megatron_dppo.plan.workload import Workload

_WHEN = {
    "loss": "at the loss",
    "backward": "in backward",
    "step": "in the optimizer's step",
    "rollout": "in the rollout",
    "sync": "while weights go to the engine",
}


@dataclass(frozen=True)
class Plan:
    """What `megatron-dppo plan` found out."""

    job: Job
    problems: tuple[Problem, ...]  # of the configured layout; with some of them it has no memory
    memory: Memory | None  # of the configured layout
    time: StepTime | None
    found: Found
    advice: tuple[str, ...]
    notes: tuple[str, ...]  # options that change memory and are not counted

    @property
    def fits(self) -> bool:
        """Whether the configured layout fits GPUs and, where their memory is known, hosts."""
        return self.memory is not None and fits(self.job, self.memory)

    @property
    def verdict(self) -> str:
        """One sentence: whether it fits, and what takes most."""
        if self.memory is None:
            return "The configured layout cannot be laid out on these GPUs."
        worst, machine, memory = self.memory.worst, self.job.machine, self.memory
        components = worst.moments[worst.worst_moment]
        name, most = max(components.items(), key=lambda item: item[1])
        peak = f"{in_gib(worst.peak)} of {in_gib(machine.gpu_bytes)} GiB"
        detail = f"{peak} {_WHEN[worst.worst_moment]}, most of it {name} ({in_gib(most)} GiB)"
        if worst.peak > machine.gpu_bytes:
            return f"Does not fit: {detail}."
        if not fits_cache(self.job, memory):
            tokens = f"{memory.engine.cached_tokens} tokens, a sequence {self.job.workload.sequence_tokens}"
            return f"Does not fit: the engine's cache holds {tokens}. The rest would: {detail}."
        if machine.host_bytes is not None and not fits_hosts(self.job, memory):
            needs = f"{in_gib(memory.host.per_node)} of {in_gib(machine.host_bytes)} GiB"
            return f"Does not fit the hosts: {needs} of a node's memory. The GPUs would do: {detail}."
        return f"Fits: {detail}."


_NOT_COUNTED = (
    *("fp8", "fp4", "cpu_offloading", "fine_grained_activation_offloading", "distribute_saved_activations"),
    *("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "pipeline_model_parallel_layout"),
    *("microbatch_group_size_per_vp_stage", "deallocate_pipeline_outputs", "cross_entropy_loss_fusion"),
)
"""Fields of TransformerConfig that change what a rank holds, and that these sums do not know."""


def make_plan(
    config: Config,
    machine: Machine,
    options: Options,
    *,
    recompute: Granularity | None = None,
    is_engine_separate: bool = False,
) -> Plan:
    """Plan a run; only config.json of `model.load` is read.

    Args:
        config: The run's.
        machine: What there is to run on.
        options: Its recompute is not read: that comes from `[megatron]`.
        recompute: Takes the place of megatron.recompute_granularity, for proposals too.
        is_engine_separate: SGLang has GPUs of its own.

    Raises:
        ConfigError: There is no model whose parameters are known, or an option makes no sense.
    """
    shape = read_model_shape(config.model.load)
    job = Job(
        config=config,
        shape=shape,
        workload=Workload.of(config, shape),
        machine=machine,
        options=replace(options, recompute=recompute_of(config.megatron, recompute)),
        is_engine_separate=is_engine_separate,
    )
    problems, memory, time = problems_of(job), None, None
    try:
        layout = Layout.of(config.parallel, machine.num_gpus)
        memory, time = memory_of(job, layout), step_time(job, layout)
    except LayoutError as error:
        problems = problems or list(error.problems)
    vary = choices(job, is_recompute_given=recompute is not None)
    found = propose(job, vary)
    advice = advise(job, memory, found, vary)
    return Plan(job, tuple(problems), memory, time, found, tuple(advice), tuple(_not_counted(job)))


def _not_counted(job: Job) -> Iterator[str]:
    for key in _NOT_COUNTED:
        if job.config.megatron.get(key):
            yield f"megatron.{key} = {job.config.megatron[key]!r}"
    if job.options.recompute.granularity == "selective":
        for module in job.options.recompute.modules:
            if module not in COUNTED_MODULES:
                yield f"megatron.recompute_modules: {module!r} is taken to save nothing"
