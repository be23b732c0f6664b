"""Estimates the memory of a layout: pipeline stages, the rollout engine, weights on their way to it, the host.

"loss": the forward pass has just ended and the loss is at its peak. "backward": backward of one layer. "step":
the optimizer's step. "rollout": the engine samples. "sync": new weights are sent to the engine. If engine
and trainer take turns (`runtime.gpu_ledger`), the trainer's states are on the host in "rollout" and "sync", and
the engine's weights and cache are released in training.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.parameters import ModelShape, largest_gathered_bytes, largest_stack_bytes
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.memory import rollout_bytes_bound
from megatron_dppo.engines.sglang.quantization import served_form, served_tensors
from megatron_dppo.plan.job import (
    BATCH_BYTES,
    PROCESS_HOST_BYTES,
    RESERVE_BYTES,
    Job,
    LayerOptions,
    Machine,
)
from megatron_dppo.plan.stages import RankStates, StagePart, rank_states, stage_activations, stage_parts
from megatron_dppo.plan.units import GIB, format_count, require_number

MOMENTS = ("loss", "backward", "step", "rollout", "sync")
OF_STATES = ("step", "rollout", "sync")
"""Moments that recompute does not affect."""
COMPONENTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "routes",
    "top-K",
    "batch",
    "engine weights",
    "engine cache",
    "reserve",
)
EXPERT_ID_BYTES = 8  # int64, as routers use it
Components = Mapping[str, int]
SGLANG_MEMORY_FRACTION = 0.8
"""Default of mem_fraction_static if [sglang] sets none: share of weights and cache in the GPU's memory."""
SGLANG_WORKSPACE_BYTES = 4 * GIB
"""Bytes of SGLang's activations and CUDA graphs, in addition to its static memory; an assumption."""
_STATE_RATIO = 0.9  # SGLang's default: recurrent-state memory over key-value memory
_CACHED_DTYPE_BYTES, _STATE_BYTES = 2, 4
_WITHOUT_NUCLEUS, _WITH_NUCLEUS = 24, 45  # bytes per logit to sample with top_p 1 and below; measured by a test


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of the engine on one GPU.

    Attributes:
        weights: Bytes of the engine's weights.
        cache: Bytes of keys and values during a rollout.
        workspace: Other bytes during a rollout.
        residue: Bytes that it keeps during training, besides weights.
        is_resident: Whether the weights stay during training. If not, engine and trainer take turns on the GPU.
        cached_tokens: Number of tokens that fit the cache of one engine.
        num_gpus: Number of GPUs that one engine is split over.
        is_separate: Whether it has separate GPUs; then all bytes here are 0.
        text: Description for the report.
    """

    weights: int
    cache: int
    workspace: int
    residue: int
    is_resident: bool
    cached_tokens: int
    num_gpus: int
    is_separate: bool
    text: str

    @property
    def at_work(self) -> int:
        """Bytes during a rollout."""
        return self.weights + self.cache + self.workspace

    def holds(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens fits its cache."""
        return self.is_separate or self.cached_tokens >= num_tokens


def engine_memory(config: Config, shape: ModelShape, layout: Layout, machine: Machine) -> EngineMemory:
    """Return the memory of the engine that `rollout.engine` names, next to a trainer with this layout."""
    if config.rollout.engine == "transformers":
        return _embedded(config, shape, layout)
    if not config.rollout.sglang.colocated:
        text = "SGLang on GPUs of its own, which are not counted (rollout.sglang.colocated = false)"
        return EngineMemory(0, 0, 0, 0, False, 0, 0, True, text)
    return server_memory(config, shape, machine)


def _cache_bytes_per_token(shape: ModelShape, dtype_bytes: int) -> int:
    """Return the bytes of a token's keys and values for all heads."""
    sizes = shape.sizes
    of_head = sizes.head_dim + sizes.value_head_dim
    return (sizes.num_layers - len(sizes.linear_layers)) * sizes.num_key_value_heads * of_head * dtype_bytes


def _state_bytes(shape: ModelShape, dtype_bytes: int) -> int:
    """Return the bytes of a sequence's states in all layers with linear attention, in the embedded engine."""
    linear, inputs = shape.sizes.linear, shape.sizes.dimensions.get("X", 0)
    if linear is None:
        return 0
    return len(linear.layers) * (linear.conv_width * inputs * dtype_bytes + linear.state_size * _STATE_BYTES)


def _sglang_cache_bytes_per_token(shape: ModelShape, size: int) -> int:
    """Return the bytes of a token in the cache of each of an engine's GPUs.

    Heads are split over the GPUs. A latent belongs to all heads, so each GPU has it, with the rotated part of
    keys.
    """
    sizes = shape.sizes
    if sizes.latent is not None:
        return sizes.num_layers * (sizes.latent.rank + sizes.latent.rotary_head_dim) * _CACHED_DTYPE_BYTES
    return _cache_bytes_per_token(shape, _CACHED_DTYPE_BYTES) // min(size, sizes.num_key_value_heads)


def _embedded(config: Config, shape: ModelShape, layout: Layout) -> EngineMemory:
    """Return the memory of the embedded engine: a full copy of the model in each trainer process."""
    rollout = config.rollout
    dtype_bytes = 4 if config.embedded_weights == "float32" else 2
    samples = -(-rollout.prompts_per_rollout // layout.data) * rollout.samples_per_prompt
    slots = min(rollout.transformers.batch_size, samples)
    tokens = slots * (config.data.max_prompt_tokens + rollout.max_response_tokens)
    return EngineMemory(
        weights=shape.num_parameters * dtype_bytes,
        cache=tokens * _cache_bytes_per_token(shape, dtype_bytes) + slots * _state_bytes(shape, dtype_bytes),
        workspace=slots * shape.sizes.vocab_size * (dtype_bytes + _bytes_to_sample_a_logit(config)),
        residue=0,
        is_resident=not rollout.colocated,
        cached_tokens=tokens,
        num_gpus=1,
        is_separate=False,
        text=f"transformers, a whole copy of the model in each process, {slots} sequences at once",
    )


def _bytes_to_sample_a_logit(config: Config) -> int:
    """Return the bytes per logit, besides the logit, that the embedded engine takes to draw a token.

    If top_p = 1, drawing takes most: log-probs and probabilities in float32, and the probabilities and
    their cumulative sum in float64. If top_p < 1, sorting the tempered log-probs in float64 takes most.
    """
    nuclei = [config.rollout.top_p]
    for each in config.evaluation.used_sets.values():
        nuclei.append(config.evaluation.top_p if each.top_p is None else each.top_p)
    return _WITHOUT_NUCLEUS if min(nuclei) == 1.0 else _WITH_NUCLEUS


def server_memory(config: Config, shape: ModelShape, machine: Machine) -> EngineMemory:
    """Return the memory of an SGLang server on the trainer's GPUs, or on others of the same size."""
    fraction = config.sglang.get("mem_fraction_static", SGLANG_MEMORY_FRACTION)
    size = config.sglang.get("tp_size", 1)
    require_number("sglang.mem_fraction_static", fraction, "a share of the GPU above 0 and below 1", 1.0)
    require_number("sglang.tp_size", size, "a number of GPUs", kinds=int)
    weights = -(-_sglang_weight_bytes(config, shape) // size)
    cache = max(int(machine.gpu_bytes * fraction) - weights, 0)
    held = _sglang_cache_bytes_per_token(shape, size)
    of_tokens, ratio = cache, config.sglang.get("mamba_full_memory_ratio", _STATE_RATIO)
    if shape.sizes.linear_layers:  # the rest is for recurrent states
        require_number("sglang.mamba_full_memory_ratio", ratio, "a ratio above 0")
        of_tokens = int(cache / (1 + ratio))
    if "max_total_tokens" in config.sglang:
        most = config.sglang["max_total_tokens"]
        require_number("sglang.max_total_tokens", most, "a number of tokens", kinds=int)
        of_tokens = min(of_tokens, most * held)
        cache = cache if shape.sizes.linear_layers else of_tokens
    text = (
        f"SGLang on the trainer's GPUs, over {format_count(size, 'GPU')} each, mem_fraction_static {fraction:g}"
    )
    return EngineMemory(
        weights,
        cache,
        SGLANG_WORKSPACE_BYTES,
        machine.engine_residue_bytes,
        False,
        of_tokens // held,
        size,
        False,
        text,
    )


def _sglang_weight_bytes(config: Config, shape: ModelShape) -> int:
    """Return the bytes of a server's weights, with the output layer that SGLang adds to some tied models."""
    sizes, form = shape.sizes, served_form(config)
    has_own_output = sizes.is_tied and shape.family.sglang.has_own_output
    in_bfloat16 = 2 * (shape.num_parameters + has_own_output * sizes.vocab_size * sizes.hidden_size)
    if form is None:
        return in_bfloat16
    tensors = served_tensors(shape.family, sizes)
    quantised = sum(copies * math.prod(each) for name, each, copies in tensors if form.quantizes(name))
    return in_bfloat16 - quantised  # scales are 1 / 4096 of it


def passing_bytes(config: Config, shape: ModelShape, layout: Layout, dtype_bytes: int) -> int:
    """Return the bytes of weights in transfer to the engine: gathered tensors, their local copy, and a bucket.

    Half of `sync_bucket_bytes` is a server's bucket. The other half limits the gathered experts of a layer, as
    in `weight_sync.factory`. The embedded engine takes all experts of a layer at once. A stack of a layer's
    experts is made of gathered ones, and gets a separate bucket if it is larger than a bucket.
    """
    half = config.rollout.sglang.sync_bucket_bytes // 2 if config.rollout.engine == "sglang" else None
    gathered = largest_gathered_bytes(shape, layout, dtype_bytes, half)
    gathered *= 2 * (layout.world_size > 1)
    stack = largest_stack_bytes(shape, dtype_bytes)
    return gathered if half is None else max(half, stack) + max(gathered, half) + stack


def stage_moments(
    job: Job, layout: Layout, engine: EngineMemory, part: StagePart, states: RankStates
) -> dict[str, Components]:
    """Return the bytes of each component at each moment, on one rank of a stage; zeros are left out."""
    trainer = {"parameters": states.parameters, "gradients": states.gradients}
    trainer["optimizer"] = states.optimizer_between
    rest = {"reserve": RESERVE_BYTES + engine.residue, "engine weights": engine.weights * engine.is_resident}
    moments = _training(job, layout, part, states, trainer | rest)
    of_engine = {} if job.config.rollout.colocated else trainer
    at_work = {"engine weights": engine.weights, "engine cache": engine.cache}
    moments["rollout"] = of_engine | at_work | {"reserve": RESERVE_BYTES + engine.workspace}
    moments["sync"] = of_engine | _sync(job, layout, states, engine)
    return {name: {key: held[key] for key in COMPONENTS if held.get(key)} for name, held in moments.items()}


def _training(
    job: Job, layout: Layout, part: StagePart, states: RankStates, always: Components
) -> dict[str, dict[str, int]]:
    work, padded = job.workload, 1 + job.assumptions.fragmentation
    # A gradient step's micro-batches are all on the device, and with shared prefixes the distinct tokens again.
    # Routers hold the expert ids of one as int64.
    on_device, current = work.step_rows(layout.data), work.microbatch_tokens(layout.data)
    if work.tree(layout.data).is_shared:
        on_device += math.ceil(work.forwarded_tokens(layout.data))
    batch = {
        "routes": on_device * work.routes_bytes
        + current * work.routed_layers * work.routed_experts * EXPERT_ID_BYTES,
        "top-K": on_device * work.topk_bytes,
        "batch": on_device * BATCH_BYTES,
    }
    kept = stage_activations(job, layout, part)
    held = kept.held + kept.passed
    return {
        "loss": {
            **always,
            **batch,
            "activations": int((held + kept.head) * padded),
            "logits": int(kept.logits * padded),
        },
        "backward": {
            **always,
            **batch,
            "activations": int((held + kept.again + kept.working) * padded),
            "gradients": states.gradients + states.largest_gradient,
        },
        "step": {**always, **batch, "optimizer": states.optimizer + states.step_temporaries},
    }


def _sync(job: Job, layout: Layout, states: RankStates, engine: EngineMemory) -> dict[str, int]:
    """Return the bytes of a weight sync: the engine's weights, and tensors on their way to it.

    If the trainer is offloaded, its tensors return to the GPU one at a time.
    """
    passing = passing_bytes(job.config, job.shape, layout, job.workload.dtype_bytes)
    if job.config.rollout.colocated:
        passing += states.largest_parameter
    return {"engine weights": engine.weights, "reserve": RESERVE_BYTES + engine.residue + passing}


@dataclass(frozen=True)
class StageMemory:
    """Memory of one rank of a pipeline stage, at each moment."""

    stage: int
    moments: Mapping[str, Components]  # bytes of each component at each moment

    def total(self, moment: str) -> int:
        """Return the bytes of all components."""
        return sum(self.moments[moment].values())

    @property
    def worst_moment(self) -> str:
        """Moment with the most bytes on this rank."""
        return max(MOMENTS, key=self.total)

    @property
    def peak(self) -> int:
        """Most bytes at any moment."""
        return self.total(self.worst_moment)


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory that the ranks of one node use."""

    per_rank: Mapping[str, int]  # of the rank that takes most
    ranks_per_node: int

    @property
    def per_node(self) -> int:
        """Bytes of all ranks of a node, if each used the bytes of the largest."""
        return sum(self.per_rank.values()) * self.ranks_per_node


@dataclass(frozen=True)
class Memory:
    """Memory of a layout on its GPUs and hosts."""

    layout: Layout
    options: LayerOptions
    stages: tuple[StageMemory, ...]
    engine: EngineMemory
    host: HostMemory
    num_microbatches: int  # of one gradient step on one rank
    microbatch_tokens: int
    samples_sharing: int  # samples of a micro-batch whose prompt is forwarded once

    @property
    def worst(self) -> StageMemory:
        """Pipeline stage with the most bytes on a rank."""
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def peak(self) -> int:
        """Most bytes on any GPU."""
        return self.worst.peak


def memory_of(job: Job, layout: Layout) -> Memory:
    """Return the memory of a layout that divides the model."""
    parts = stage_parts(job, layout)
    engine = engine_memory(job.config, job.shape, layout, job.machine)
    states = [rank_states(job, part) for part in parts]
    return Memory(
        layout=layout,
        options=job.options,
        stages=tuple(
            StageMemory(part.stage, stage_moments(job, layout, engine, part, own))
            for part, own in zip(parts, states, strict=True)
        ),
        engine=engine,
        host=_host_memory(job, layout, states),
        num_microbatches=job.workload.num_microbatches(layout.data),
        microbatch_tokens=job.workload.microbatch_tokens(layout.data),
        samples_sharing=job.workload.tree(layout.data).num_samples,
    )


def _host_memory(job: Job, layout: Layout, stages: Sequence[RankStates]) -> HostMemory:
    """Return the host memory of a rank of the pipeline stage that needs most."""
    candidates = [_of_stage(job, layout, states) for states in stages]
    largest = max(candidates, key=lambda components: sum(components.values()))
    return HostMemory(largest, job.machine.ranks_per_node)


def _of_stage(job: Job, layout: Layout, states: RankStates) -> dict[str, int]:
    routing = job.shape.sizes.routing if job.config.has_routes else None
    components = {
        "process": PROCESS_HOST_BYTES,
        "rollout data": rollout_bytes_bound(
            job.config, layout.world_size, layout.data, routing, shares_prefixes=job.shares_prefixes
        ),
        "optimizer": states.optimizer_on_host,
        "trainer during rollout": (states.parameters + states.optimizer_between) * job.config.rollout.colocated,
        "reference": states.parameters * job.has_reference_weights,
        "checkpoint in flight": states.checkpoint
        if job.config.checkpoint.asynchronous
        else states.checkpoint_pieces,
    }
    return {name: num_bytes for name, num_bytes in components.items() if num_bytes}
