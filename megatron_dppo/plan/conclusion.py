"""States whether a layout fits: its peak, the moment of the peak, and the largest component."""

from megatron_dppo.plan.job import Job
from megatron_dppo.plan.memory import Memory
from megatron_dppo.plan.search import fits_hosts
from megatron_dppo.plan.units import counted, in_gib

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
        found = f"an engine over {counted(engine.num_gpus, 'GPU')} (sglang.tp_size) on {machine.num_gpus}"
        return f"Does not fit: {found}. The rest would: {detail}."
    if not engine.holds(job.workload.sequence_tokens):
        tokens = f"{engine.cached_tokens} tokens, and the longest sequence has {job.workload.sequence_tokens}"
        return f"Does not fit: the engine's cache holds {tokens}. The rest would: {detail}."
    if machine.host_bytes is not None and not fits_hosts(job, memory):
        needs = f"{in_gib(memory.host.per_node)} of {in_gib(machine.host_bytes)} GiB"
        return f"Does not fit the hosts: {needs} of a node's memory. The GPUs would do: {detail}."
    return f"Fits: {detail}."
