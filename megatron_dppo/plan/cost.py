"""Estimates the relative time of one gradient step: floating-point operations and bytes moved.

Use it to order layouts, not to forecast durations. Layers, the output layer and the update run at the rates
that one GPU was measured at (`gpu_rates.py`). Every transfer between GPUs runs at a fixed share of the link's
speed and never overlaps with computation. All sequences have the longest allowed length, and a prompt that
samples of a micro-batch share is forwarded once. The slowest pipeline stage sets the pace. The rollout is not
counted. Smaller matrices, and waits between ranks with different packed micro-batches, are modelled as a loss
for each doubling of a parallel size: the smallest for tensors, the largest for the pipeline.
"""

import math
from collections import Counter
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.parameters import LayerKind, ModelShape, padded_vocab
from megatron_dppo.plan.job import Job, Recompute
from megatron_dppo.plan.stages import GRADIENT_BYTES, optimizer_bytes, stage_parts

BACKWARD = 2  # operations relative to forward
CORE_ATTENTION = 0.3  # share of an attention block's operations
LOSS_PER_DOUBLING = {"tensor": 0.03, "context": 0.05, "pipeline": 0.08}
"""Share of the time of micro-batches that each doubling of the size adds; an estimate, not a measurement."""
ADAM_SHARE, ADDING_SHARE = 0.45, 0.09
"""Shares of an update after one micro-batch: AdamW on the rank's shard, and the gradients that each micro-batch
adds. Measured on one H200; the rest is on all gradients of the rank, once."""


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of one gradient step."""

    compute: float
    tensor: float  # gathers and scatters of tensor and sequence parallelism
    context: float  # keys and values
    expert: float  # tokens to their experts and back
    pipeline: float  # between stages, and the time that stages wait
    losses: float  # see LOSS_PER_DOUBLING
    data: float  # gradients and parameters of data parallelism
    update: float  # gradients added and their norm, and AdamW
    optimizer: float  # optimizer states from the host and back, if they are offloaded
    reference: float  # reference forward, and its weights from the host and back; algorithm.ref_kl_coef
    anchor: float  # forward that recomputes log-probs; algorithm.anchor

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))


Seconds = np.ndarray
"""[4] float64 seconds of one micro-batch: compute, and transfers of tensor, context and expert parallelism."""


def step_time(job: Job, layout: Layout) -> StepTime:
    """Estimate the step time of a layout with the job's options."""
    num = job.workload.num_microbatches(layout.data)
    tokens = job.workload.forwarded_tokens(layout.data) / num / layout.context
    one = _slowest_stage(job, layout, tokens)
    compute, tensor, context, expert = (num * each for each in one.tolist())
    total = float(one.sum())
    waiting = (layout.pipeline - 1) / layout.virtual_pipeline * total
    passed = tokens / layout.tensor * job.shape.sizes.hidden_size * job.workload.dtype_bytes
    hops = 4 * layout.virtual_pipeline if layout.pipeline > 1 else 0  # received and sent, forward and backward
    losses = sum(loss * math.log2(getattr(layout, key)) for key, loss in LOSS_PER_DOUBLING.items())
    data, update, optimizer = _end_of_step(job, layout)
    return StepTime(
        compute=compute,
        tensor=tensor,
        context=context,
        expert=expert,
        pipeline=waiting + num * hops * passed / job.machine.link(layout.world_size),
        losses=num * total * losses,
        data=data,
        update=update,
        optimizer=optimizer,
        reference=_reference(job, layout, tokens, num * (1 + losses)) if job.has_reference else 0.0,
        anchor=_forward(job, layout, tokens, num * (1 + losses)) if job.recomputes_log_probs else 0.0,
    )


def _forward(job: Job, layout: Layout, tokens: float, num: float) -> float:
    """Return the seconds of one step's forward, without backward."""
    one = float(_slowest_stage(job, layout, tokens, passes=1).sum())
    return (num + (layout.pipeline - 1) / layout.virtual_pipeline) * one


def _reference(job: Job, layout: Layout, tokens: float, num: float) -> float:
    """Return the seconds of the reference's forward for one step, and the step's share of swapping weights."""
    forward = _forward(job, layout, tokens, num)
    if not job.has_reference_weights:
        return forward
    largest = max(part.weights for part in stage_parts(job, layout)) * job.workload.dtype_bytes
    steps = job.config.algorithm.steps_per_rollout
    return forward + 4 * largest / job.machine.rates.host_bytes_per_s / steps


def _slowest_stage(job: Job, layout: Layout, tokens: float, passes: int = 1 + BACKWARD) -> Seconds:
    """Return the seconds of a micro-batch; with 1 pass, only of the forward."""
    sizes, is_forward = job.shape.sizes, passes == 1
    kinds = [job.shape.kind(layer) for layer in range(sizes.num_layers)]
    of_layer = {kind: _layer(job, layout, tokens, kind, is_forward=is_forward) for kind in set(kinds)}
    columns = padded_vocab(job.shape, layout) // layout.tensor
    tree = job.workload.tree(layout.data)
    rows = tokens * tree.num_rows / tree.num_tokens
    head = 2 * rows * columns * sizes.hidden_size * passes / job.machine.rates.output_flops_per_s
    stages: list[Seconds] = []
    for part in stage_parts(job, layout):
        seconds = np.zeros(4)
        for kind, number in Counter(kinds[layer] for chunk in part.chunks for layer in chunk.layers).items():
            seconds = seconds + number * of_layer[kind]
        seconds[0] += head * part.chunks[-1].is_last
        stages.append(seconds)
    return max(stages, key=lambda stage: stage.sum())


def _layer(job: Job, layout: Layout, tokens: float, kind: LayerKind, *, is_forward: bool) -> Seconds:
    """Return the seconds of one layer on one rank, forward and backward unless `is_forward`."""
    sizes, e = job.shape.sizes, job.workload.dtype_bytes
    hidden, tensor, heads = sizes.hidden_size, layout.tensor, sizes.num_attention_heads
    scores = heads * (sizes.head_dim + sizes.value_head_dim) * _mean_keys(job, layout)
    if kind.is_linear:
        assert sizes.linear is not None, "a layer has linear attention"
        scores = sizes.linear.multiplications
    keys_and_values = sizes.num_key_value_heads * (sizes.head_dim + sizes.value_head_dim)
    gathered_column = tokens * e * (tensor - 1) / tensor
    state, shared = hidden * gathered_column, sizes.shared_expert_intermediate_size
    if kind.is_moe:
        imbalance = job.assumptions.expert_imbalance if layout.expert > 1 else 1.0
        mlp = 3 * hidden * (sizes.experts_per_token * sizes.moe_intermediate_size * imbalance + shared)
        rows = tokens / tensor * sizes.experts_per_token * hidden * e
        to_experts = 2 * rows * (layout.expert - 1) / layout.expert * imbalance
        gathers = 2 * rows * (layout.expert_tensor - 1) + 2 * state * bool(shared)
    else:
        mlp, to_experts, gathers = 3 * hidden * sizes.intermediate_size, 0.0, 2 * state
    attention = 2 * tokens * (_attention_weights(job.shape, kind.is_linear) + scores) / tensor
    mlp = 2 * tokens * mlp / tensor
    attention_again, mlp_again = _recomputed_shares(job.options.recompute)
    passes, link = 2 + max(attention_again, mlp_again), job.machine.link
    operations = attention * (1 + BACKWARD + attention_again) + mlp * (1 + BACKWARD + mlp_again)
    if is_forward:
        passes, operations = 1, attention + mlp
    gathered = 2 * state + gathers + _latent_columns(job.shape) * gathered_column
    exchanged = tokens * (layout.context - 1) * keys_and_values / tensor * e
    return np.array(
        [
            operations / job.machine.rates.layer_flops_per_s,
            passes * gathered / link(tensor),
            passes * exchanged / link(tensor * layout.context),
            passes * to_experts / link(layout.expert * layout.expert_tensor),
        ]
    )


def _mean_keys(job: Job, layout: Layout) -> float:
    """Return the mean number of keys of a token: half of the length, or more if prompts are shared."""
    tree = job.workload.tree(layout.data)
    prompt, response = tree.prompt_tokens, tree.response_tokens
    of_responses = tree.num_samples * response * (prompt + response / 2)
    return (prompt**2 / 2 + of_responses) / tree.num_tokens


@lru_cache(maxsize=16)
def _attention_weights(shape: ModelShape, is_linear: bool = False) -> int:
    """Return the number of a layer's attention weights that are used for one token."""
    others = "softmax" if is_linear else "linear"
    rules = (
        rule
        for rule in shape.family.rules
        if "self_attention" in rule.megatron and rule.is_of(shape.sizes) and rule.mixers != others
    )
    matrices = (matrix for rule in rules for matrix in rule.hf_shapes(shape.sizes) if len(matrix) > 1)
    return sum(map(math.prod, matrices))


def _latent_columns(shape: ModelShape) -> int:
    """Return the columns that tensor ranks gather for latent attention, in addition to hidden states.

    They gather latents and the rotated part of keys. If queries come from a latent, hidden states are not
    gathered, and are subtracted here.
    """
    latent = shape.sizes.latent
    if latent is None:
        return 0
    of_queries = 0 if latent.query_rank is None else latent.query_rank - shape.sizes.hidden_size
    return of_queries + latent.rank + latent.rotary_head_dim


def _recomputed_shares(recompute: Recompute) -> tuple[float, float]:
    """Return the recomputed shares of the forward pass: (attention, feed-forward)."""
    if recompute.granularity == "none":
        return 0.0, 0.0
    if recompute.granularity == "full":
        return 1.0, 1.0
    modules = recompute.modules
    return CORE_ATTENTION * ("core_attn" in modules), 1.0 * ("moe" in modules or "mlp" in modules)


def _end_of_step(job: Job, layout: Layout) -> tuple[float, float, float]:
    """Return the seconds to reduce gradients and gather parameters, to update, and to move offloaded states."""
    dtype_bytes = job.workload.dtype_bytes
    back = dtype_bytes if job.config.optimizer.distributed else GRADIENT_BYTES
    parts = stage_parts(job, layout)
    moved = max(
        sum(
            (e.buffer * (GRADIENT_BYTES + back) * (e.sharers - 1) / e.sharers)
            for e in (part.dense, part.expert)
        )
        for part in parts
    )
    reduced = moved / job.machine.link(layout.world_size // layout.pipeline)
    rates = job.machine.rates
    of_all = 1 - ADAM_SHARE - ADDING_SHARE + ADDING_SHARE * job.workload.num_microbatches(layout.data)
    updated = max(part.shard * ADAM_SHARE + part.buffer * of_all for part in parts)
    states = max(optimizer_bytes(part.shard, dtype_bytes) for part in parts) * job.config.optimizer.offload
    return reduced, updated / rates.update_parameters_per_s, 2 * states / rates.host_bytes_per_s
