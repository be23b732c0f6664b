"""Gradient steps of the real actor on random samples, for the benchmarks that time them."""

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import RolloutTopK, Sample, TrainBatch

PROMPT_TOKENS = 8


def write_model(runtime: Runtime, folder: str, sizes: dict[str, Any]) -> None:
    """Write a random model as a Hugging Face folder: that of a config.json, or a Qwen3-MoE of these sizes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.tiny import write_model as write_qwen3_moe

    def write() -> None:
        if "model_type" not in sizes:
            write_qwen3_moe(Path(folder), **{"initializer_range": 0.02, **sizes})
            return
        config = AutoConfig.for_model(**sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
        model.save_pretrained(folder)

    with runtime.device:  # random numbers come faster from a GPU
        runtime.on_main(write)


def random_samples(lengths: Sequence[int], vocab_size: int, topk: int = 0) -> list[Sample]:
    """Return scored samples of so many tokens with nearly uniform log-probs, the same on every rank."""
    generator = torch.Generator().manual_seed(0)

    def near_uniform(*shape: int) -> Tensor:
        return 0.1 * torch.randn(shape, generator=generator) - torch.tensor(float(vocab_size)).log()

    def sample(index: int, length: int) -> Sample:
        response, best = length - PROMPT_TOKENS, None
        if topk:
            first = torch.randint(0, vocab_size, (response, 1), generator=generator)
            ids = ((first + torch.arange(topk)) % vocab_size).int()
            best = RolloutTopK(ids, near_uniform(response, topk).sort(descending=True).values)
        return Sample(
            id=f"{index:06}",
            group_id="0",
            tokens=torch.randint(0, vocab_size, (length,), generator=generator),
            prompt_length=PROMPT_TOKENS,
            loss_mask=torch.ones(response, dtype=torch.bool),
            rollout_log_probs=near_uniform(response),
            finish_reason="stop",
            topk=best,
            advantage=float(torch.randn((), generator=generator)),
        )

    assert min(lengths) > PROMPT_TOKENS, "a response follows the prompt"
    return [sample(index, length) for index, length in enumerate(lengths)]


def build_actor(
    runtime: Runtime,
    model: str,
    parallel: dict[str, int],
    dtype: str = "float32",
    layer_spec: str = "auto",
    **tables: dict[str, Any],
) -> Any:
    """Build the `Actor` of a run with this model, `[parallel]` and other tables of a config."""
    from megatron_dppo.actor.actor import Actor  # after quiet_library_warnings

    of_model = {"load": model, "dtype": dtype, "layer_spec": layer_spec}
    tables |= {"model": of_model, "parallel": parallel, "optimizer": {"lr": 1e-6}}
    return Actor(Config.model_validate(tables), runtime)


def batch_of(
    runtime: Runtime, actor: Any, lengths: Sequence[int], max_tokens: int, topk: int = 0
) -> TrainBatch:
    """Build this rank's part of a gradient step on samples that start on the ranks as after a rollout."""
    own = random_samples(lengths, actor.hf["vocab_size"], topk)[runtime.rank :: runtime.world_size]
    shape = BatchShape("token_mean", max(lengths), max_tokens, topk)
    (batch,), _ = train_batches([own], shape, actor.data_parallel)
    return batch


def step_seconds(runtime: Runtime, actor: Any, batch: TrainBatch) -> float:
    """Time one gradient step (forward, backward and update), from barrier to barrier of all ranks."""
    runtime.barrier()
    runtime.synchronize()
    began = time.perf_counter()
    step = actor.train_step(batch, is_first=False)
    runtime.synchronize()
    runtime.barrier()
    seconds = time.perf_counter() - began
    assert not step.faults and not step.is_skipped, step.faults
    return seconds


def layouts_seconds(
    runtime: Runtime, model: str, layouts: dict[str, dict[str, int]], lengths: list[int], num_steps: int
) -> dict[str, list[float]]:
    """Time gradient steps of a new actor for each `[parallel]` on one mini-batch, after one warm-up step."""
    found: dict[str, list[float]] = {}
    for name, parallel in layouts.items():
        actor = build_actor(runtime, model, parallel)
        batch = batch_of(runtime, actor, lengths, parallel["max_tokens_per_microbatch"])
        found[name] = [step_seconds(runtime, actor, batch) for _ in range(num_steps + 1)][1:]
        del actor
        gc.collect()  # the threads of process groups end with the last reference to them
    return found
