"""Layouts for so many GPUs that fit, fastest first.

For each layout that divides model and batch, the fastest options that fit are taken: recompute off before
selective before full, Adam on the GPU before the host. What the user asked for is not varied.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_dppo.actor.layout import Layout, layout_problems
from megatron_dppo.config.schema import ParallelConfig
from megatron_dppo.errors import LayoutError, Problem
from megatron_dppo.plan.cost import StepTime, step_time
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.memory import Memory, memory_of
from megatron_dppo.plan.options import FULL, Options, Recompute

NOT_PROVEN = "parallel"
"""Where layout.py reports a layout that divides everything, and that no test has proven yet."""
MAX_PIPELINE, MAX_CONTEXT = 16, 8
HEADROOM = 0.02
"""Share of a GPU that proposals leave free."""


@dataclass(frozen=True)
class Proposal:
    """A layout that fits, with the options it needs."""

    memory: Memory
    time: StepTime
    missing: tuple[
        str, ...
    ]  # what the program cannot do yet: "layout" (no test proves it), "optimizer offload"

    @property
    def is_admitted(self) -> bool:
        """Whether the program runs it today."""
        return not self.missing

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.memory.layout

    @property
    def options(self) -> Options:
        """Recompute and offload that make it fit."""
        return self.memory.options


@dataclass(frozen=True)
class Found:
    """What the search came to."""

    proposals: tuple[Proposal, ...]  # admitted ones first, then by time
    num_divisible: int  # layouts that divide the model over the GPUs
    num_without_prompts: int  # of those, layouts whose data-parallel size does not divide the prompts


def fits(job: Job, memory: Memory) -> bool:
    """Whether GPUs are large enough, hosts where their memory is known, and the engine's cache."""
    return memory.peak <= job.machine.gpu_bytes and fits_hosts(job, memory) and fits_cache(job, memory)


def fits_hosts(job: Job, memory: Memory) -> bool:
    """Whether the ranks of a node find room in its memory; true where that is not known."""
    return job.machine.host_bytes is None or memory.host.per_node <= job.machine.host_bytes


def fits_cache(job: Job, memory: Memory) -> bool:
    """Whether one sequence as long as allowed fits the engine's cache."""
    return memory.engine.is_separate or memory.engine.cached_tokens >= job.workload.sequence_tokens


def has_headroom(job: Job, memory: Memory) -> bool:
    """Whether it fits with a little to spare: what is proposed should not fail for a rounding error."""
    return fits(job, memory) and memory.peak <= (1 - HEADROOM) * job.machine.gpu_bytes


def propose(job: Job, vary: Sequence[Options]) -> Found:
    """Search all layouts of the job's GPUs.

    Args:
        job: Its options are not read.
        vary: The options to choose from.
    """
    proposals: list[Proposal] = []
    num_divisible = num_without_prompts = 0
    for layout, is_admitted in divisible_layouts(job):
        num_divisible += 1
        if not divides_prompts(job, layout):
            num_without_prompts += 1
            continue
        proposal = _fastest(job, layout, vary, is_admitted)
        if proposal is not None:
            proposals.append(proposal)
    proposals.sort(key=lambda each: (not each.is_admitted, each.time.total, each.memory.peak))
    return Found(tuple(_without_near_copies(proposals)), num_divisible, num_without_prompts)


def _without_near_copies(proposals: Sequence[Proposal]) -> Iterator[Proposal]:
    """The first of those that differ in the virtual pipeline only."""
    seen: set[Layout] = set()
    for proposal in proposals:
        plain = replace(proposal.layout, virtual_pipeline=1)
        if plain not in seen:
            seen.add(plain)
            yield proposal


def choices(job: Job, *, is_recompute_given: bool) -> tuple[Options, ...]:
    """The options that a search may vary: recompute unless the user gave it, offload unless it is wanted."""
    given = job.options
    recomputes = [given.recompute]
    if not is_recompute_given:
        modules = ["core_attn"]
        if job.shape.sizes.moe_layers:
            modules.append("moe")
        if len(job.shape.sizes.moe_layers) < job.shape.sizes.num_layers:
            modules.append("mlp")
        recomputes = [
            Recompute(),
            Recompute("selective"),
            Recompute("selective", modules=tuple(modules)),
            FULL,
        ]
        if given.recompute not in recomputes:
            recomputes.append(given.recompute)
    places = (True,) if given.offload_optimizer else (False, True)
    return tuple(
        replace(given, recompute=recompute, offload_optimizer=place)
        for place in places
        for recompute in recomputes
    )


def divides_prompts(job: Job, layout: Layout) -> bool:
    """Whether each data-parallel rank gets as many prompts of a mini-batch."""
    parts = job.config.algorithm.minibatches_per_rollout * layout.data
    return job.config.rollout.prompts_per_rollout % parts == 0


def divisible_layouts(job: Job) -> Iterator[tuple[Layout, bool]]:
    """Each layout that divides the model, and whether layout.py admits it."""
    world_size = job.machine.num_gpus
    for parallel in _splits(job, world_size):
        problems = layout_problems(parallel, world_size, job.shape.sizes)
        if all(problem.where == NOT_PROVEN for problem in problems):
            yield Layout.of(parallel, world_size), not problems


def problems_of(job: Job) -> list[Problem]:
    """What is wrong with the configured layout on these GPUs."""
    return layout_problems(job.config.parallel, job.machine.num_gpus, job.shape.sizes)


def _splits(job: Job, world_size: int) -> Iterator[ParallelConfig]:
    configured, sizes = job.config.parallel, job.shape.sizes
    experts = _divisors(world_size) if sizes.num_experts else [1]
    for tensor in _divisors(world_size, at_most=job.machine.gpus_per_node):
        for pipeline in _divisors(world_size // tensor, at_most=MAX_PIPELINE):
            for context in _divisors(world_size // tensor // pipeline, at_most=MAX_CONTEXT):
                if context & (context - 1):  # sequences are cut in halves of halves
                    continue
                for expert in experts:
                    for expert_tensor in sorted({1, tensor}):
                        for virtual in (1, 2) if pipeline > 1 else (1,):
                            yield configured.model_copy(
                                update={
                                    "tensor": tensor,
                                    "pipeline": pipeline,
                                    "virtual_pipeline": virtual,
                                    "context": context,
                                    "expert": expert,
                                    "expert_tensor": expert_tensor,
                                }
                            )


def _divisors(number: int, at_most: int | None = None) -> list[int]:
    return [n for n in range(1, min(number, at_most or number) + 1) if number % n == 0]


def _fastest(job: Job, layout: Layout, vary: Sequence[Options], is_admitted: bool) -> Proposal | None:
    """The layout with the fastest options that fit, if any do."""
    try:
        timed = [(step_time(replace(job, options=options), layout), options) for options in vary]
        for time, options in sorted(timed, key=lambda each: each[0].total):
            memory = memory_of(replace(job, options=options), layout)
            if has_headroom(job, memory):
                missing = ["layout"] * (not is_admitted) + ["optimizer offload"] * options.offload_optimizer
                return Proposal(memory, time, tuple(missing))
    except LayoutError:
        return None
    return None
