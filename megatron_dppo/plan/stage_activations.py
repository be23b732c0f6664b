"""Estimates activations and logits of one pipeline stage, over the micro-batches in flight."""

from dataclasses import dataclass

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.plan.activations import LayerModel, LayerTokens, kept_by_layers
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.logits import LossTokens, loss_bytes
from megatron_dppo.plan.partition import StagePart
from megatron_dppo.plan.stages import chunks_in_flight


@dataclass(frozen=True)
class StageActivations:
    """Bytes of activations on one rank of a stage, without the allocator's losses."""

    held: int  # kept by layers from forward to backward, all micro-batches in flight
    head: int  # kept by the final norm, with its result, until backward reaches the layers
    again: int  # of recomputed layers, while one of them is in backward
    working: int  # held for a moment in forward or backward of one layer
    passed: int  # what the stage received and sent, of the micro-batches in flight
    logits: int  # logits and what the loss makes of them, at its highest point


def stage_activations(job: Job, layout: Layout, part: StagePart) -> StageActivations:
    """Return the activation bytes of a rank that holds this part of the model."""
    work, options = job.workload, job.options
    num_tokens, num_microbatches = work.microbatch_tokens(layout.data), work.num_microbatches(layout.data)
    tokens = LayerTokens.of(num_tokens, layout)
    model = LayerModel(job.shape, layout, tokens, work.dtype_bytes, options.layer_spec, job.assumptions)
    kept = [kept_by_layers(model, chunk.layers, options.recompute) for chunk in part.chunks]
    flights = chunks_in_flight(part.stage, layout, num_microbatches)
    # A micro-batch goes through all chunks in turn: whole rounds of them, then the largest of what is left.
    rounds, rest = divmod(flights, len(kept))
    by_size = sorted((chunk.held for chunk in kept), reverse=True)
    held = rounds * sum(by_size) + sum(by_size[:rest])
    has_head = part.chunks[-1].is_last
    of_loss = LossTokens(tokens.attended, work.dtype_bytes, work.topk_columns)
    return StageActivations(
        held=held,
        head=model.head() * has_head,
        again=max(chunk.again for chunk in kept),
        working=model.working(),
        passed=flights * 2 * model.hidden_bytes if layout.pipeline > 1 else 0,
        logits=loss_bytes(job.shape, layout, job.config.algorithm, of_loss) * has_head,
    )
