"""Searches the layouts that `train` accepts and that fit: fastest first, or on the smallest number of GPUs.

Each layout gets the fastest options that fit: recompute off before selective before full, optimizer
states on the GPU before the host. No other setting is changed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_dppo.architectures.layout import Layout, is_admitted
from megatron_dppo.config.schema import ParallelConfig
from megatron_dppo.plan.cost import StepTime, step_time
from megatron_dppo.plan.fit import engine_alone, has_headroom, has_room
from megatron_dppo.plan.job import FULL, Job, Machine, Recompute, recompute_of, recompute_problems
from megatron_dppo.plan.memory import OF_STATES, Memory, memory_of
from megatron_dppo.plan.units import Settings

MAX_PIPELINE, MAX_CONTEXT = 16, 8
NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of nodes that are tried, after every number of GPUs of one node."""
SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
"""Keys of [parallel] that split the model."""


@dataclass(frozen=True)
class Proposal:
    """A layout that `train` accepts and that fits, with the options it needs."""

    settings: Settings  # differences from the config
    memory: Memory
    time: StepTime

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.memory.layout


@dataclass(frozen=True)
class Found:
    """Result of the search."""

    proposals: tuple[Proposal, ...]  # fastest first
    num_admitted: int  # number of layouts that `train` accepts


def propose(job: Job) -> Found:
    """Search the layouts of the job's GPUs, including its configured one."""
    options = _choices(job)
    proposals: list[Proposal] = []
    num_admitted = 0
    for settings in admitted_layouts(job):
        num_admitted += 1
        proposal = _fastest(job, settings, options)
        if proposal is not None:
            proposals.append(proposal)
    proposals.sort(key=lambda each: (each.time.total, each.memory.peak))
    return Found(tuple(_without_near_copies(proposals)), num_admitted)


def admitted_layouts(job: Job) -> Iterator[Settings]:
    """Yield the settings of each layout of the job's GPUs that `train` accepts with the rest of the config."""
    for settings in divisible_layouts(job):
        if not job.having(settings).problems:
            yield settings


def divisible_layouts(job: Job) -> Iterator[Settings]:
    """Yield the settings of each proven layout that divides the model over the job's GPUs."""
    for parallel in _splits(job):
        if is_admitted(parallel, job.machine.num_gpus, job.shape.sizes):
            yield _difference(job.config.parallel, parallel)


def recompute_choices(job: Job) -> list[Settings]:
    """Return the configured recompute, and all choices that `--set` can express, from least to most."""
    modules = ["core_attn"]
    if job.shape.sizes.moe_layers:
        modules.append("moe")
    if len(job.shape.sizes.moe_layers) < job.shape.sizes.num_layers:
        modules.append("mlp")
    found: list[Settings] = [{}]
    for recompute in (Recompute("selective"), Recompute("selective", modules=tuple(modules)), FULL):
        table = {**job.config.megatron, **recompute.keys()}
        if not recompute_problems(table) and recompute_of(table) != job.options.recompute:
            found.append({f"megatron.{key}": value for key, value in recompute.keys().items()})
    return found


def _choices(job: Job) -> list[Settings]:
    """Return recompute choices, with optimizer states at their configured place, and on the host."""
    places: list[Settings] = [{}] if job.config.optimizer.offload else [{}, {"optimizer.offload": True}]
    return [{**recompute, **place} for place in places for recompute in recompute_choices(job)]


def _fastest(job: Job, layout: Settings, options: Sequence[Settings]) -> Proposal | None:
    """Return the layout with the fastest options that fit, if any do."""
    changed = [(job.having({**layout, **chosen}), {**layout, **chosen}) for chosen in options]
    timed = [(step_time(each, each.layout), each, settings) for each, settings in changed]
    for time, each, settings in sorted(timed, key=lambda entry: entry[0].total):
        memory = memory_of(each, each.layout)
        if has_headroom(each, memory) and not each.problems:
            return Proposal(settings, memory, time)
    return None


def _without_near_copies(proposals: Sequence[Proposal]) -> Iterator[Proposal]:
    """Keep the first of the layouts that differ only in the virtual pipeline."""
    seen: set[Layout] = set()
    for proposal in proposals:
        plain = replace(proposal.layout, virtual_pipeline=1)
        if plain not in seen:
            seen.add(plain)
            yield proposal


def _difference(configured: ParallelConfig, parallel: ParallelConfig) -> Settings:
    """Return the keys of `parallel` to set; expert_tensor stays unset if it equals the tensor size."""
    sizes = parallel.model_dump()
    if configured.expert_tensor is None and parallel.expert_tensor == parallel.tensor:
        sizes["expert_tensor"] = None
    return {f"parallel.{key}": size for key, size in sizes.items() if size != getattr(configured, key)}


def _splits(job: Job) -> Iterator[ParallelConfig]:
    """Yield the products of sizes that divide the GPUs."""
    configured, num_gpus = job.config.parallel, job.machine.num_gpus
    experts = _divisors(num_gpus) if job.shape.sizes.num_experts else [1]
    for tensor in _divisors(num_gpus, at_most=job.machine.gpus_per_node):
        for pipeline in _divisors(num_gpus // tensor, at_most=MAX_PIPELINE):
            for context in _divisors(num_gpus // tensor // pipeline, at_most=MAX_CONTEXT):
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


def numbers_to_try(machine: Machine) -> list[int]:
    """Return the numbers of GPUs to try, ascending."""
    return [*range(1, machine.gpus_per_node + 1), *(nodes * machine.gpus_per_node for nodes in NODES)]


def fewest_gpus(job: Job) -> tuple[int, Proposal] | None:
    """Return the smallest sufficient number of GPUs of `numbers_to_try`, and the fastest layout on them."""
    for num_gpus in numbers_to_try(job.machine):
        on_these = job.on(num_gpus)
        if has_room(on_these, engine_alone(on_these)) and _is_enough(on_these):
            return num_gpus, propose(on_these).proposals[0]
    return None


def _is_enough(job: Job) -> bool:
    """Whether a layout fits with the options that take least memory, without virtual stages."""
    options = _choices(job)[::-1]
    for layout in admitted_layouts(job):
        if job.having(layout).config.parallel.virtual_pipeline > 1:
            continue
        for chosen in options:
            each = job.having({**layout, **chosen})
            memory = memory_of(each, each.layout)
            if has_headroom(each, memory) and not each.problems:
                return True
            of_states = max(stage.total(moment) for stage in memory.stages for moment in OF_STATES)
            if of_states > job.machine.gpu_bytes:
                break  # recompute does not help
    return False
