"""Adds up the memory of one rank at each moment of a rollout and a gradient step.

"loss": the forward pass has just ended and the loss is at its peak. "backward": backward of one layer. "step":
the optimizer's step. "rollout": the engine samples. "sync": new weights are sent to the engine. If engine
and trainer take turns (`runtime.gpu_ledger`), the trainer's states are on the host in "rollout" and "sync", and
the engine's weights and cache are released in training.
"""

from collections.abc import Mapping

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.plan.engine import EngineMemory, passing_bytes
from megatron_dppo.plan.job import BATCH_BYTES, Job
from megatron_dppo.plan.machine import RESERVE_BYTES
from megatron_dppo.plan.partition import StagePart
from megatron_dppo.plan.stage_activations import stage_activations
from megatron_dppo.plan.states import RankStates

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


def stage_moments(
    job: Job, layout: Layout, engine: EngineMemory, part: StagePart, states: RankStates
) -> dict[str, Components]:
    """Return the bytes of each component at each moment, on one rank of a stage; zeros are left out."""
    trainer = {"parameters": states.parameters, "gradients": states.gradients}
    trainer["optimizer"] = states.optimizer_between
    beside = {"reserve": RESERVE_BYTES + engine.residue, "engine weights": engine.weights * engine.is_resident}
    moments = _training(job, layout, part, states, trainer | beside)
    of_engine = {} if job.config.rollout.takes_turns else trainer
    moments["rollout"] = of_engine | _rollout(engine)
    moments["sync"] = of_engine | _sync(job, layout, states, engine)
    return {name: {key: held[key] for key in COMPONENTS if held.get(key)} for name, held in moments.items()}


def _training(
    job: Job, layout: Layout, part: StagePart, states: RankStates, always: Components
) -> dict[str, dict[str, int]]:
    work, padded = job.workload, 1 + job.assumptions.fragmentation
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
            "gradients": states.gradients + states.largest_gradient,
        },
        "step": {**always, **batch, "optimizer": states.optimizer + states.step_temporaries},
    }


def _rollout(engine: EngineMemory) -> dict[str, int]:
    """Return the bytes of the engine in a rollout; its workspace is more than what it keeps in training."""
    at_work = {"engine weights": engine.weights, "engine cache": engine.cache}
    return at_work | {"reserve": RESERVE_BYTES + engine.workspace}


def _sync(job: Job, layout: Layout, states: RankStates, engine: EngineMemory) -> dict[str, int]:
    """Return the bytes of a weight sync: the engine's weights, and tensors on their way to it.

    If the trainer is offloaded, its tensors return to the GPU one at a time.
    """
    passing = passing_bytes(job.config, job.shape, layout, job.workload.dtype_bytes)
    if job.config.rollout.takes_turns:
        passing += states.largest_parameter
    return {"engine weights": engine.weights, "reserve": RESERVE_BYTES + engine.residue + passing}
