"""Estimates the bytes of the rollout engine on the trainer's GPUs, and of weights on their way to it."""

import math
from dataclasses import dataclass

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.parameters import ModelShape, largest_gathered_bytes
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.plan.machine import ENGINE_RESIDUE_BYTES, Machine
from megatron_dppo.plan.units import GIB, counted

SGLANG_MEMORY_FRACTION = 0.8
"""Default of mem_fraction_static if [sglang] sets none: share of weights and cache in the GPU's memory."""
SGLANG_WORKSPACE_BYTES = 4 * GIB
"""Bytes of SGLang's activations and CUDA graphs, in addition to its static memory; an assumption."""
_CACHED_DTYPE_BYTES = 2
_WITHOUT_NUCLEUS, _WITH_NUCLEUS = 24, 45  # bytes per logit; measured by a test


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of the engine on one GPU.

    Attributes:
        weights: Bytes of its copy of the weights.
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
    """Return the memory of the engine that `rollout.engine` names, next to a trainer with this layout.

    Raises:
        ConfigError: An option of [sglang] that affects memory has an invalid value.
    """
    if config.rollout.engine == "transformers":
        return _embedded(config, shape, layout)
    if not config.rollout.sglang.colocated:
        text = "SGLang on GPUs of its own, which are not counted (rollout.sglang.colocated = false)"
        return EngineMemory(0, 0, 0, 0, False, 0, 0, True, text)
    return _sglang(config, shape, machine)


def _cache_bytes_per_token(shape: ModelShape, dtype_bytes: int) -> int:
    """Return the bytes of a token's keys and values for all heads."""
    sizes = shape.sizes
    of_head = sizes.head_dim + sizes.value_head_dim
    return sizes.num_layers * sizes.num_key_value_heads * of_head * dtype_bytes


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
        cache=tokens * _cache_bytes_per_token(shape, dtype_bytes),
        workspace=slots * shape.sizes.vocab_size * (dtype_bytes + _bytes_to_sample_a_logit(config)),
        residue=0,
        is_resident=not rollout.takes_turns,
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


def _sglang(config: Config, shape: ModelShape, machine: Machine) -> EngineMemory:
    fraction = config.sglang.get("mem_fraction_static", SGLANG_MEMORY_FRACTION)
    size = config.sglang.get("tp_size", 1)
    _require_number("sglang.mem_fraction_static", fraction, "a share of the GPU above 0 and below 1", 1.0)
    _require_number("sglang.tp_size", size, "a number of GPUs", math.inf)
    weights = -(-_sglang_parameters(shape) * _sglang_weight_bytes(config) // size)
    cache = max(int(machine.gpu_bytes * fraction) - weights, 0)
    held = _sglang_cache_bytes_per_token(shape, size)
    text = f"SGLang on the trainer's GPUs, over {counted(size, 'GPU')} each, mem_fraction_static {fraction:g}"
    beside = SGLANG_WORKSPACE_BYTES, ENGINE_RESIDUE_BYTES
    return EngineMemory(weights, cache, *beside, False, cache // held, size, False, text)


def _sglang_parameters(shape: ModelShape) -> int:
    """Return the parameters of a server's model, with the output layer that SGLang adds to some tied models."""
    sizes = shape.sizes
    has_own_output = sizes.is_tied and shape.family.sglang.has_own_output
    return shape.num_parameters + has_own_output * sizes.vocab_size * sizes.hidden_size


def _sglang_weight_bytes(config: Config) -> int:
    return 1 if config.sglang.get("quantization") == "fp8" else 2


def _require_number(where: str, found: object, expected: str, below: float) -> None:
    kinds = int | float if below <= 1 else int
    if isinstance(found, bool) or not isinstance(found, kinds) or not 0 < found < below:
        raise ConfigError(Problem(where, repr(found), expected, "Correct or remove it."))


def passing_bytes(config: Config, shape: ModelShape, layout: Layout, dtype_bytes: int) -> int:
    """Return the bytes of weights in transfer to the engine: gathered tensors, their local copy, and a bucket.

    Half of `sync_bucket_bytes` is a server's bucket. The other half limits the gathered experts of a layer, as
    in `weight_sync.factory`. The embedded engine takes all experts of a layer at once.
    """
    half = config.rollout.sglang.sync_bucket_bytes // 2 if config.rollout.engine == "sglang" else None
    gathered = largest_gathered_bytes(shape, layout, dtype_bytes, half)
    gathered *= 2 * (layout.world_size > 1)
    return gathered if half is None else half + max(gathered, half)
