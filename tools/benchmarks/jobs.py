"""Jobs for the ranks of a benchmark: train on random samples with the real actor, and return the seconds."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.actor.actor import Actor
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.balance import plan_minibatch
from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches
from megatron_dppo.data.batches.packing import pack
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import RolloutTopK, Sample, TrainBatch

PROMPT_TOKENS = 8
ENOUGH_S = 0.05  # calls are repeated until they take this long
LR = 1e-6


def write_model(runtime: Runtime, folder: str, sizes: dict[str, Any]) -> None:
    """Write a random Qwen3-MoE of these sizes as a Hugging Face folder."""
    from tests.support import tiny

    runtime.on_main(lambda: tiny.write_model(Path(folder), initializer_range=0.02, **sizes))


def random_samples(lengths: Sequence[int], vocab_size: int, topk: int = 0) -> list[Sample]:
    """Return scored samples of these lengths with nearly uniform log-probs, the same on every rank.

    Args:
        lengths: Number of tokens of each sample; more than the prompt's 8.
        vocab_size: Vocabulary size of the model.
        topk: Columns of the rollout's top-K log-probs; 0 for no top-K.
    """
    generator = torch.Generator().manual_seed(0)

    def near_uniform(*shape: int) -> Tensor:
        return 0.1 * torch.randn(shape, generator=generator) - torch.tensor(float(vocab_size)).log()

    def sample(index: int, length: int) -> Sample:
        response = length - PROMPT_TOKENS
        best = None
        if topk:
            first = torch.randint(0, vocab_size, (response, 1), generator=generator)
            ids = (first + torch.arange(topk)) % vocab_size
            best = RolloutTopK(ids.int(), near_uniform(response, topk).sort(descending=True).values)
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
) -> Actor:
    """Build the actor of a run with this model, `[parallel]` and other tables of a config."""
    of_model = {"load": model, "dtype": dtype, "layer_spec": layer_spec}
    common = {"model": of_model, "parallel": parallel, "optimizer": {"lr": LR}}
    return Actor(Config.model_validate(common | tables), runtime)


def step_seconds(runtime: Runtime, actor: Actor, batch: TrainBatch) -> float:
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


def layout_seconds(
    runtime: Runtime, model: str, parallel: dict[str, int], lengths: list[int], num_steps: int
) -> list[float]:
    """Time gradient steps of a new actor on one mini-batch, after one warm-up step.

    Samples start on the ranks as after a rollout. They move to the ranks that train on them before the timing.
    """
    actor = build_actor(runtime, model, parallel)
    own = random_samples(lengths, actor.hf["vocab_size"])[runtime.rank :: runtime.world_size]
    shape = BatchShape("token_mean", max(lengths), parallel["max_tokens_per_microbatch"])
    (batch,), _ = train_batches([own], shape, actor.data_parallel)
    seconds = [step_seconds(runtime, actor, batch) for _ in range(num_steps + 1)]
    del actor
    gc.collect()  # the threads of process groups end with the last reference to them
    return seconds[1:]


def step_of(microbatches: Sequence[Sequence[Sample]]) -> TrainBatch:
    """Build a gradient step of one process in which every token has weight 1."""
    packed = tuple(
        pack([replace(sample, token_weights=sample.loss_mask.float()) for sample in samples])
        for samples in microbatches
    )
    num_samples = sum(map(len, microbatches))
    return TrainBatch(packed, sum(microbatch.num_loss_tokens for microbatch in packed), num_samples)


def packed_and_padded_seconds(
    runtime: Runtime, model: str, lengths: list[int], max_tokens: int, num_rounds: int
) -> dict[str, Any]:
    """Time steps on one process, on packed micro-batches and on the same micro-batches padded, in turn.

    Returns:
        Seconds of each round as `packed` and `padded`, and the `num_tokens` and `num_padded_tokens` of a step.
    """
    actor = build_actor(runtime, model, {"max_tokens_per_microbatch": max_tokens})
    samples = random_samples(lengths, actor.hf["vocab_size"])
    plan = plan_minibatch(
        lengths, [0] * len(lengths), [0], max_tokens=max_tokens, cost=actor.data_parallel.cost
    )
    microbatches = [[samples[place] for place in chosen] for chosen in plan.microbatches[0]]
    padded = [[_padded(s, max(lengths[int(o.id)] for o in chosen)) for s in chosen] for chosen in microbatches]
    steps = {"packed": step_of(microbatches), "padded": step_of(padded)}
    seconds = _in_turn(
        {kind: lambda s=step: step_seconds(runtime, actor, s) for kind, step in steps.items()}, num_rounds
    )
    counts = {kind: sum(m.tokens.numel() for m in step.microbatches) for kind, step in steps.items()}
    return {**seconds, "num_tokens": counts["packed"], "num_padded_tokens": counts["padded"]}


def _padded(sample: Sample, length: int) -> Sample:
    """Return the sample with masked padding tokens at its end."""
    extra = length - sample.tokens.numel()

    def longer(values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(extra)])

    return replace(
        sample,
        tokens=longer(sample.tokens),
        loss_mask=longer(sample.loss_mask),
        rollout_log_probs=longer(sample.rollout_log_probs),
    )


def length_seconds(
    runtime: Runtime, model: str, lengths: list[int], num_tokens: int, num_rounds: int
) -> dict[str, Any]:
    """Time steps on one process, on `num_tokens` tokens in sequences of each length, in turn.

    Returns:
        `seconds` of the rounds for each length, and the `predicted` cost of a token, without a unit.
    """
    actor = build_actor(runtime, model, {"max_tokens_per_microbatch": num_tokens})
    vocab_size, cost = actor.hf["vocab_size"], actor.data_parallel.cost
    steps = {n: step_of([random_samples([n] * (num_tokens // n), vocab_size)]) for n in lengths}
    seconds = _in_turn(
        {str(n): lambda s=step: step_seconds(runtime, actor, s) for n, step in steps.items()}, num_rounds
    )
    return {"seconds": seconds, "predicted": {str(n): cost.of(n) / n for n in lengths}}


def expert_seconds(
    runtime: Runtime, model: str, num_experts: int, tokens_per_expert: list[int], num_rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Time forward and backward of grouped and of sequential experts on one process, in turn.

    Returns:
        Seconds of each round of `grouped` and `sequential`, for each number of tokens per expert.
    """
    from tests.support.expert_pair import expert_pair

    pair = expert_pair(Path(model), num_experts, torch.float32, runtime.device)
    named = dict(zip(("grouped", "sequential"), pair, strict=True))
    found: dict[str, dict[str, list[float]]] = {}
    for num_tokens in tokens_per_expert:
        tokens = torch.full((num_experts,), num_tokens)
        hidden = torch.randn(num_experts * num_tokens, pair[0].fc1_weight.shape[-1], device=runtime.device)
        probs = torch.full((len(hidden),), 0.5, device=runtime.device)

        def seconds_of(
            experts: Any, tokens: Tensor = tokens, hidden: Tensor = hidden, probs: Tensor = probs
        ) -> float:
            def step() -> None:
                output, _ = experts(hidden.requires_grad_(), tokens, probs)
                output.backward(hidden)

            return _seconds_per_call(runtime, step)

        found[str(num_tokens)] = _in_turn(
            {name: lambda e=experts: seconds_of(e) for name, experts in named.items()}, num_rounds
        )
    return found


def _in_turn(measures: dict[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """Run each measure once to warm up, then once per round. Every second round runs in reverse order."""
    for measure in measures.values():
        measure()
    found: dict[str, list[float]] = {name: [] for name in measures}
    for index in range(num_rounds):
        for name in list(measures)[:: 1 if index % 2 == 0 else -1]:
            found[name].append(measures[name]())
    return found


def _seconds_per_call(runtime: Runtime, action: Callable[[], None]) -> float:
    """Return the mean seconds of a call, over enough calls to be timed."""
    num_calls = 1
    while True:
        runtime.synchronize()
        began = time.perf_counter()
        for _ in range(num_calls):
            action()
        runtime.synchronize()
        seconds = time.perf_counter() - began
        if seconds >= ENOUGH_S:
            return seconds / num_calls
        num_calls *= 2
