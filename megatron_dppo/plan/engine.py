"""Bytes of the rollout engine on the trainer's GPUs, and of weights on their way to it."""

from dataclasses import dataclass
from functools import lru_cache

from megatron_dppo.actor.layout import Layout
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.plan.machine import Machine
from megatron_dppo.plan.model import Chunk, ModelShape, chunk_tensors
from megatron_dppo.plan.units import GIB, counted

SGLANG_MEMORY_FRACTION = 0.8
"""mem_fraction_static where [sglang] names none: weights and cache, of the GPU's memory."""
SGLANG_WORKSPACE_BYTES = 4 * GIB
"""Activations and CUDA graphs of SGLang beside its static memory; an assumption."""


@dataclass(frozen=True)
class EngineMemory:
    """The engine on one GPU.

    Attributes:
        weights: Its copy of the weights.
        cache: Keys and values while it rolls out.
        workspace: What it takes besides while it rolls out.
        is_resident: The weights stay during training; otherwise engine and trainer take turns on the GPU.
        cached_tokens: Tokens that fit the caches of one engine at once.
        is_separate: It has GPUs of its own; everything here is 0.
        text: What it is, for people.
    """

    weights: int
    cache: int
    workspace: int
    is_resident: bool
    cached_tokens: int
    is_separate: bool
    text: str


def engine_memory(
    config: Config, shape: ModelShape, layout: Layout, machine: Machine, is_separate: bool
) -> EngineMemory:
    """The engine that `rollout.engine` names, beside a trainer of this layout.

    Raises:
        ConfigError: An option of [sglang] that matters here has no meaningful value.
    """
    if config.rollout.engine == "transformers":
        return _embedded(config, shape, layout)
    if is_separate:
        return EngineMemory(0, 0, 0, False, 0, True, "SGLang on GPUs of its own, not counted here")
    return _sglang(config, shape, machine)


def _cache_bytes_per_token(shape: ModelShape, dtype_bytes: int) -> int:
    sizes = shape.sizes
    return 2 * sizes.num_layers * sizes.num_key_value_heads * sizes.head_dim * dtype_bytes


def _embedded(config: Config, shape: ModelShape, layout: Layout) -> EngineMemory:
    """A whole copy of the model in each process, there all the time; the trainer stays beside its cache."""
    rollout = config.rollout
    dtype_bytes = 4 if rollout.transformers.weights == "float32" else 2
    samples = -(-rollout.prompts_per_rollout // layout.data) * rollout.samples_per_prompt
    slots = min(rollout.transformers.batch_size, samples)
    tokens = slots * (config.data.max_prompt_tokens + rollout.max_response_tokens)
    return EngineMemory(
        weights=shape.num_parameters * dtype_bytes,
        cache=tokens * _cache_bytes_per_token(shape, dtype_bytes),
        workspace=3 * slots * shape.sizes.vocab_size * 4,  # float32 logits, log-probs, noise
        is_resident=True,
        cached_tokens=tokens,
        is_separate=False,
        text=f"transformers, a whole copy of the model in each process, {slots} sequences at once",
    )


def _sglang(config: Config, shape: ModelShape, machine: Machine) -> EngineMemory:
    fraction = config.sglang.get("mem_fraction_static", SGLANG_MEMORY_FRACTION)
    size = config.sglang.get("tp_size", 1)
    _require_number("sglang.mem_fraction_static", fraction, "a share of the GPU above 0 and below 1", 1.0)
    expected = f"a number of GPUs from 1 to {machine.num_gpus}"
    _require_number("sglang.tp_size", size, expected, machine.num_gpus + 0.5)
    weights = -(-shape.num_parameters * _sglang_weight_bytes(config) // int(size))
    cache = max(int(machine.gpu_bytes * fraction) - weights, 0)
    held = _cache_bytes_per_token(shape, 2) // min(int(size), shape.sizes.num_key_value_heads)
    text = f"SGLang over {counted(int(size), 'GPU')}, mem_fraction_static {fraction:g}, taking turns"
    return EngineMemory(weights, cache, SGLANG_WORKSPACE_BYTES, False, cache // held, False, text)


def _sglang_weight_bytes(config: Config) -> int:
    return 1 if config.sglang.get("quantization") == "fp8" else 2


def _require_number(where: str, found: object, expected: str, below: float) -> None:
    kinds = int | float if below <= 1 else int
    if isinstance(found, bool) or not isinstance(found, kinds) or not 0 < found < below:
        raise ConfigError(Problem(where, repr(found), expected, "Correct or remove it."))


@lru_cache(maxsize=16)
def _largest_tensor(shape: ModelShape) -> int:
    whole = chunk_tensors(shape, Layout(world_size=1), Chunk.whole(shape))
    return max(tensor.numel for tensor in whole)


def largest_gathered_bytes(shape: ModelShape, layout: Layout, dtype_bytes: int) -> int:
    """The largest tensor that is gathered from all ranks on its way to the engine, and its own copy."""
    if layout.world_size == 1:
        return 0
    return 2 * _largest_tensor(shape) * dtype_bytes
