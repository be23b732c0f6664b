"""Decides whether a layout fits and why not, and searches the layouts that `train` accepts and that fit.

They come fastest first, or on the smallest number of GPUs. Each layout gets the fastest options that fit:
recompute off before selective before full, optimizer states on the GPU before the host. No other setting is
changed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

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
from megatron_dppo.plan.units import Settings, format_count, in_gib

MAX_PIPELINE, CONTEXTS = 16, (1, 2, 4, 8)
NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of nodes that are tried, after every number of GPUs of one node."""
SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
"""Keys of [parallel] that split the model."""
HEADROOM = 0.02
"""Share of a GPU's memory that proposals leave free."""
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


def largest_component(memory: Memory) -> str:
    """Return the component with the most bytes on the worst rank, at its worst moment."""
    components = memory.worst.moments[memory.worst.worst_moment]
    return max(components, key=lambda name: components[name])


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


def remedy_of(job: Job, memory: Memory) -> str:
    """Return the settings that decide what does not fit; empty if the conclusion names them."""
    if memory.peak > job.machine.gpu_bytes:
        name = largest_component(memory)
    elif not fits_hosts(job, memory):
        name = max(memory.host.per_rank, key=lambda each: (each in _KEYS, memory.host.per_rank[each]))
    else:
        return ""
    keys = "rollout.engine" if _is_embedded(job) and name.startswith("engine") else _KEYS.get(name)
    return f"What decides {name}: {keys}." if keys else ""


def _is_embedded(job: Job) -> bool:
    return job.config.rollout.engine == "transformers"


def why_not_enough(job: Job) -> str:
    """Return the reason why no layout fits on many GPUs, if it is the engine or the rest of the config."""
    engine = engine_alone(job)
    if not engine.holds(job.workload.sequence_tokens):
        return f"The {cache_shortage(job, engine)}"
    if not has_room(job, engine):
        taken, whole = in_gib(RESERVE_BYTES + engine.at_work), in_gib(job.machine.gpu_bytes)
        alone = f"The engine alone takes {taken} of {whole} GiB of each GPU."
        if _is_embedded(job):
            return f"{alone} Set rollout.engine = 'sglang', whose weights are split over sglang.tp_size GPUs."
        return f"{alone} Lower sglang.mem_fraction_static, or raise sglang.tp_size."
    return ""


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
    """Yield the products of sizes that divide the GPUs; context cuts sequences in halves of halves."""
    configured, num_gpus = job.config.parallel, job.machine.num_gpus
    divisors = [n for n in range(1, num_gpus + 1) if num_gpus % n == 0]
    tensors = [n for n in divisors if n <= job.machine.gpus_per_node]
    pipelines = [n for n in divisors if n <= MAX_PIPELINE]
    experts = divisors if job.shape.sizes.num_experts else [1]
    for tensor, pipeline, context, expert in product(tensors, pipelines, CONTEXTS, experts):
        if num_gpus % (tensor * pipeline * context) == 0:
            for expert_tensor, virtual in product(sorted({1, tensor}), (1, 2) if pipeline > 1 else (1,)):
                sizes = tensor, pipeline, virtual, context, expert, expert_tensor
                yield configured.model_copy(update=dict(zip(SIZES, sizes, strict=True)))


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
