"""Adds up what one rank holds at each moment of a rollout and a gradient step.

"loss": the forward pass has just ended and the loss is at its highest. "backward": of one layer. "step": of
the optimizer. "rollout": the engine samples. "sync": new weights are on their way to the engine. A colocated
engine and the trainer take turns: in a rollout the trainer's states are on the host, in training the engine's
are released.
"""

from collections.abc import Mapping

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.plan.engine import EngineMemory, largest_gathered_bytes
from megatron_dppo.plan.job import BATCH_BYTES, Job
from megatron_dppo.plan.machine import ENGINE_RESIDUE_BYTES, FRAGMENTATION, RESERVE_BYTES
from megatron_dppo.plan.partition import StagePart
from megatron_dppo.plan.stage_activations import stage_activations
from megatron_dppo.plan.states import RankStates

MOMENTS = ("loss", "backward", "step", "rollout", "sync")
OF_STATES = ("step", "rollout", "sync")
"""Moments that recompute changes nothing of."""
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
EXPERT_ID_BYTES = 8  # as routers take it
Components = Mapping[str, int]


def stage_moments(
    job: Job, layout: Layout, engine: EngineMemory, part: StagePart, states: RankStates
) -> dict[str, Components]:
    """Return the bytes of each component at each moment, on one rank of a stage; zeros are left out."""
    trainer = {"parameters": states.parameters, "gradients": states.gradients}
    trainer["optimizer"] = states.optimizer_between
    beside = _beside(engine)
    moments = _training(job, layout, part, states, trainer | beside)
    is_released = job.config.rollout.release_trainer
    moments["rollout"] = _rollout({} if is_released else trainer, beside, engine)
    moments["sync"] = _sync(job, layout, trainer, beside, engine)
    return {name: {key: held[key] for key in COMPONENTS if held.get(key)} for name, held in moments.items()}


def _beside(engine: EngineMemory) -> dict[str, int]:
    """Return the bytes held during training besides the model: the reserve, and the engine's share."""
    if engine.is_resident:
        return {"reserve": RESERVE_BYTES, "engine weights": engine.weights}
    return {"reserve": RESERVE_BYTES + (0 if engine.is_separate else ENGINE_RESIDUE_BYTES)}


def _training(
    job: Job, layout: Layout, part: StagePart, states: RankStates, always: Components
) -> dict[str, dict[str, int]]:
    work, padded = job.workload, 1 + FRAGMENTATION
    # A gradient step's micro-batches are all on the device; routers hold the expert ids of one as int64.
    on_device, current = work.step_tokens(layout.data), work.microbatch_tokens(layout.data)
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
            "gradients": states.gradients + states.gradient_temporaries,
        },
        "step": {**always, **batch, "optimizer": states.optimizer + states.step_temporaries},
    }


def _rollout(trainer: Components, beside: Components, engine: EngineMemory) -> dict[str, int]:
    """Return the bytes in a rollout: an embedded engine is beside the trainer, a colocated one in its place."""
    if engine.is_separate:
        return {**trainer, **beside}
    at_work = {"engine weights": engine.weights, "engine cache": engine.cache}
    if engine.is_resident:
        return {**trainer, **at_work, "reserve": beside["reserve"] + engine.workspace}
    return {**at_work, "reserve": RESERVE_BYTES + engine.workspace}


def _sync(
    job: Job, layout: Layout, trainer: Components, beside: Components, engine: EngineMemory
) -> dict[str, int]:
    """Return the bytes in a weight sync: the trainer's parameters, engine weights, and gathered tensors."""
    gathered = largest_gathered_bytes(job.shape, layout, job.workload.dtype_bytes)
    stays = engine.is_resident or engine.is_separate
    kept = dict(trainer) if stays else {"parameters": trainer["parameters"]}
    return {**kept, "engine weights": engine.weights, "reserve": beside["reserve"] + gathered}
