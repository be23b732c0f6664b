"""Decides whether a layout fits, and names what takes most memory and the settings that change it."""

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.plan.job import RESERVE_BYTES, Job
from megatron_dppo.plan.memory import EngineMemory, Memory, engine_memory
from megatron_dppo.plan.units import format_count, in_gib

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
