"""Searches the smallest number of GPUs on which an accepted layout fits, or explains why none fits."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.plan.conclusion import conclusion_of, keys_of, largest_component
from megatron_dppo.plan.engine import EngineMemory, engine_memory
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.machine import RESERVE_BYTES, Machine
from megatron_dppo.plan.memory import Memory, memory_of
from megatron_dppo.plan.moments import OF_STATES
from megatron_dppo.plan.search import (
    HEADROOM,
    Proposal,
    admitted_layouts,
    fits,
    has_headroom,
    propose,
    recompute_choices,
)
from megatron_dppo.plan.settings import Settings
from megatron_dppo.plan.units import counted, in_gib, layout_text

NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of nodes that are tried, after every number of GPUs of one node."""


SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
"""Keys of [parallel] that split the model."""


@dataclass(frozen=True)
class Fewest:
    """Result of the search over numbers of GPUs.

    Attributes:
        num_gpus: Smallest sufficient number of GPUs; if no number is sufficient, the largest that was tried.
        proposal: Fastest layout on these GPUs, if they are sufficient.
        condition: Other necessary change, as an imperative; the proposal's settings include it.
        why_not: Sentence that explains why no number is sufficient.
    """

    num_gpus: int
    proposal: Proposal | None = None
    condition: str = ""
    why_not: str = ""


def numbers_to_try(machine: Machine) -> list[int]:
    """Return the numbers of GPUs to try, ascending."""
    return [*range(1, machine.gpus_per_node + 1), *(nodes * machine.gpus_per_node for nodes in NODES)]


def fewest_gpus(job: Job) -> Fewest:
    """Search numbers of GPUs for the first on which some layout fits."""
    numbers = numbers_to_try(job.machine)
    closest: tuple[Job, Memory] | None = None
    for num_gpus in numbers:
        on_these = job.on(num_gpus)
        if not has_room(on_these, engine_alone(on_these)):
            continue
        for each, memory in _leanest(on_these):
            is_enough = has_headroom(each, memory)
            is_closer = closest is None or memory.peak < closest[1].peak
            if not (is_enough or is_closer) or each.problems:
                continue
            if is_enough:
                return Fewest(num_gpus, propose(on_these).proposals[0])
            closest = each, memory
    return Fewest(numbers[-1], why_not=_why_not(job.on(numbers[-1]), closest))


def engine_alone(job: Job) -> EngineMemory:
    """Return the engine for the layout in which each copy of it samples the fewest responses."""
    num_gpus = job.machine.num_gpus
    return engine_memory(job.config, job.shape, Layout(num_gpus, data=num_gpus), job.machine)


def has_room(job: Job, engine: EngineMemory) -> bool:
    """Whether the sampling engine fits on a GPU without the trainer, and a sequence fits its cache."""
    is_small = RESERVE_BYTES + engine.at_work <= (1 - HEADROOM) * job.machine.gpu_bytes
    return is_small and engine.holds(job.workload.sequence_tokens)


def _leanest(job: Job) -> Iterator[tuple[Job, Memory]]:
    """Yield each layout with the least memory: offloaded optimizer states, and all useful recompute.

    Virtual stages are left out, because they keep more micro-batches and save no memory.
    """
    places: list[Settings] = [{"optimizer.offload": True}]
    if job.machine.host_bytes is not None:
        places.append({})
    options = [{**place, **recompute} for place in places for recompute in reversed(recompute_choices(job))]
    for layout in admitted_layouts(job):
        for chosen in options:
            each = job.having({**layout, **chosen})
            if each.config.parallel.virtual_pipeline > 1:
                break
            memory = memory_of(each, each.layout)
            yield each, memory
            of_states = (stage.total(moment) for stage in memory.stages for moment in OF_STATES)
            if max(of_states) > job.machine.gpu_bytes:
                break


def _why_not(job: Job, closest: tuple[Job, Memory] | None) -> str:
    engine = engine_alone(job)
    if not engine.holds(job.workload.sequence_tokens):
        longest = job.workload.sequence_tokens
        beside = f"{engine.cached_tokens} tokens next to {in_gib(engine.weights)} GiB of weights"
        enough = f"The engine's cache holds {beside}, and the longest sequence has {longest}."
        keys = "Raise sglang.mem_fraction_static or sglang.tp_size, or lower rollout.max_response_tokens."
        return f"{enough} {keys}"
    if not has_room(job, engine):
        taken, whole = in_gib(RESERVE_BYTES + engine.at_work), in_gib(job.machine.gpu_bytes)
        alone = f"The engine alone takes {taken} of {whole} GiB of each GPU."
        return f"{alone} Lower sglang.mem_fraction_static, or raise sglang.tp_size."
    if closest is None:
        return f"train admits no layout on any of them with the rest of the config.{_first_problem(job)}"
    where = f"{layout_text(closest[1].layout)} on {counted(closest[0].machine.num_gpus, 'GPU')}"
    tight = f" A proposal leaves {HEADROOM:.0%} of a GPU free." if fits(*closest) else ""
    component = largest_component(closest[1])
    helps = f" What decides {component}: {keys}." if (keys := keys_of(component)) else ""
    return f"A GPU holds least with {where}. {conclusion_of(*closest)}{tight}{helps}"


def _first_problem(job: Job) -> str:
    problems = job.having({f"parallel.{size}": 1 for size in SIZES}).problems
    return f" Without any split: {problems[0]}" if problems else ""
