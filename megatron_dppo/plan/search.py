"""Searches the layouts that `train` accepts and that fit: fastest first, or on the smallest number of GPUs.

Each layout gets the fastest options that fit: recompute off before selective before full, optimizer
states on the GPU before the host. No other setting is changed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_dppo.architectures.layout import Layout, is_admitted
from megatron_dppo.config.schema import ParallelConfig
from megatron_dppo.plan.cost import StepTime, step_time
from megatron_dppo.plan.job import (
    FULL,
    RESERVE_BYTES,
    Job,
    Machine,
    Recompute,
    recompute_of,
    recompute_problems,
)
from megatron_dppo.plan.memory import OF_STATES, EngineMemory, Memory, engine_memory, memory_of
from megatron_dppo.plan.units import Settings, format_count, in_gib, layout_text

MAX_PIPELINE, MAX_CONTEXT = 16, 8
HEADROOM = 0.02
"""Share of a GPU's memory that proposals leave free."""
NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of nodes that are tried, after every number of GPUs of one node."""
SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
"""Keys of [parallel] that split the model."""
WHEN = {
    "loss": "at the loss",
    "backward": "in backward",
    "step": "in the optimizer's step",
    "rollout": "in the rollout",
    "sync": "while weights go to the engine",
}
_ENGINE = "sglang.mem_fraction_static and sglang.tp_size"
_KEYS = {
    "parameters": "parallel.tensor and parallel.pipeline",
    "gradients": "parallel.tensor and parallel.pipeline",
    "optimizer": "optimizer.offload",
    "activations": "parallel.max_tokens_per_microbatch and megatron.recompute_granularity",
    "logits": "algorithm.loss_from and algorithm.logits_chunk_bytes",
    "routes": "rollout.prompts_per_rollout and rollout.samples_per_prompt",
    "top-K": "rollout.num_topk_log_probs",
    "batch": "rollout.prompts_per_rollout and rollout.samples_per_prompt",
    "engine weights": _ENGINE,
    "engine cache": _ENGINE,
    "rollout data": "rollout.max_data_gib",
    "trainer during rollout": "rollout.sglang.colocated",
    "reference": "algorithm.ref_kl_coef",
    "checkpoint in flight": "checkpoint.asynchronous",
}


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


def fits(job: Job, memory: Memory) -> bool:
    """Whether GPUs, hosts with known memory, and the engine's cache are large enough."""
    fits_engine = memory.engine.num_gpus <= job.machine.num_gpus
    holds_sequence = memory.engine.holds(job.workload.sequence_tokens)
    return memory.peak <= job.machine.gpu_bytes and fits_hosts(job, memory) and fits_engine and holds_sequence


def fits_hosts(job: Job, memory: Memory) -> bool:
    """Whether the ranks of a node fit into its memory; True if its memory is not known."""
    return job.machine.host_bytes is None or memory.host.per_node <= job.machine.host_bytes


def has_headroom(job: Job, memory: Memory) -> bool:
    """Whether the layout fits with a margin, so that a proposal does not fail because of a rounding error."""
    return fits(job, memory) and memory.peak <= (1 - HEADROOM) * job.machine.gpu_bytes


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


def largest_component(memory: Memory) -> str:
    """Return the component with the most bytes on the worst rank, at its worst moment."""
    components = memory.worst.moments[memory.worst.worst_moment]
    return max(components, key=lambda name: components[name])


def keys_of(component: str) -> str:
    """Return the settings that determine the bytes of a component; empty if none does."""
    return _KEYS.get(component, "")


def conclusion_of(job: Job, memory: Memory) -> str:
    """Return one sentence about a layout that `train` accepts."""
    worst, machine, engine = memory.worst, job.machine, memory.engine
    name = largest_component(memory)
    most = worst.moments[worst.worst_moment][name]
    peak = f"{in_gib(worst.peak)} of {in_gib(machine.gpu_bytes)} GiB"
    detail = f"{peak} {WHEN[worst.worst_moment]}, most of it {name} ({in_gib(most)} GiB)"
    if worst.peak > machine.gpu_bytes:
        return f"Does not fit: {detail}."
    if engine.num_gpus > machine.num_gpus:
        found = f"an engine over {format_count(engine.num_gpus, 'GPU')} (sglang.tp_size) on {machine.num_gpus}"
        return f"Does not fit: {found}. The rest would: {detail}."
    if not engine.holds(job.workload.sequence_tokens):
        return f"Does not fit: the {cache_shortage(job, engine)} The rest would: {detail}."
    if machine.host_bytes is not None and not fits_hosts(job, memory):
        needs = f"{in_gib(memory.host.per_node)} of {in_gib(machine.host_bytes)} GiB"
        return f"Does not fit the hosts: {needs} of a node's memory. The GPUs would do: {detail}."
    return f"Fits: {detail}."


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


def cache_shortage(job: Job, engine: EngineMemory) -> str:
    """Return what the cache of an SGLang server lacks for a sequence, and the keys that decide."""
    longest, most = job.workload.sequence_tokens, job.config.sglang.get("max_total_tokens")
    cached = f"{engine.cached_tokens} tokens next to {in_gib(engine.weights)} GiB of weights"
    limits = ["max_total_tokens"] if most == engine.cached_tokens else ["mem_fraction_static", "tp_size"]
    keys = " or ".join(f"sglang.{key}" for key in limits)
    enough = f"engine's cache holds {cached}, and the longest sequence has {longest}."
    return f"{enough} Raise {keys}, or lower rollout.max_response_tokens."


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
        return f"The {cache_shortage(job, engine)}"
    if not has_room(job, engine):
        taken, whole = in_gib(RESERVE_BYTES + engine.at_work), in_gib(job.machine.gpu_bytes)
        alone = f"The engine alone takes {taken} of {whole} GiB of each GPU."
        return f"{alone} Lower sglang.mem_fraction_static, or raise sglang.tp_size."
    if closest is None:
        return f"train admits no layout on any of them with the rest of the config.{_first_problem(job)}"
    where = f"{layout_text(closest[1].layout)} on {format_count(closest[0].machine.num_gpus, 'GPU')}"
    tight = f" A proposal leaves {HEADROOM:.0%} of a GPU free." if fits(*closest) else ""
    component = largest_component(closest[1])
    helps = f" What decides {component}: {keys}." if (keys := keys_of(component)) else ""
    return f"A GPU holds least with {where}. {conclusion_of(*closest)}{tight}{helps}"


def _first_problem(job: Job) -> str:
    problems = job.having({f"parallel.{size}": 1 for size in SIZES}).problems
    return f" Without any split: {problems[0]}" if problems else ""
