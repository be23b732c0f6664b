"""A trainer's process that pushes weights of any family: what test_served_families runs with `run_ranks`."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_dppo.engines.base import SamplingParams
from megatron_dppo.runtime.process import Runtime
from tests.support.comparing import requests_of
from tests.support.sync_job import WAYS, connect

BUCKETS_OF_ONE = 1  # byte: every tensor gets a separate bucket


def push_every_way(
    runtime: Runtime, settings: dict[str, Any], params: SamplingParams, folder: str, first_version: int
) -> dict[str, dict[str, Any]]:
    """Change every tensor and push, once for each way; return the server's completions by way.

    The weights that it must have are written to a folder of the way's name in `folder`.
    """
    from megatron_dppo.errors import WeightSyncError

    _, actor, engine = connect(runtime, settings)
    results: dict[str, dict[str, Any]] = {}
    for version, way in enumerate(WAYS, first_version):
        sync = sync_of(settings, actor, engine, runtime, weight_sync=way)
        change(actor, version)
        stale = ""
        try:
            sync._probe.run(sync._servers.fleet()[0].members)
        except WeightSyncError as error:
            stale = str(error)
        metrics = sync.push(version)
        sync.close()
        answered = answers(actor, engine, params, Path(folder) / way)
        results[way] = answered | {"stale": stale, "metrics": metrics, "version": version}
    return results


def push_from_bfloat16(
    runtime: Runtime, settings: dict[str, Any], params: SamplingParams, folder: str, version: int
) -> dict[str, Any]:
    """Push a bfloat16 trainer's weights, with expert biases that bfloat16 could not tell apart."""
    from megatron_dppo.checkpoints.megatron_weights import weight_buffers

    in_half = settings | {"model": settings["model"] | {"dtype": "bfloat16"}}
    _, actor, engine = connect(runtime, in_half)
    generator = torch.Generator().manual_seed(version)
    for _, bias in weight_buffers(actor.chunks[0]):
        bias.copy_(7 + 0.03 * (torch.rand(bias.shape, generator=generator) - 0.5))  # half of bfloat16's step
    sync = sync_of(in_half, actor, engine, runtime, probe_every=0)  # whose limits are a float32 trainer's
    sync.push(version)
    sync.close()
    return answers(actor, engine, params, Path(folder))


def push_parted(
    runtime: Runtime, settings: dict[str, Any], params: SamplingParams, folder: str, version: int
) -> dict[str, Any]:
    """Push tensors that belong together in separate buckets, after a push that keeps them together.

    Only these tensors change in between, or all tensors if the model has no such pair.

    Returns:
        The second push's error, the server's completions after it, and the weights before and after it in
        `folder`.
    """
    from megatron_dppo.architectures.registry import family_of
    from megatron_dppo.engines.weight_sync.transports import Buffer
    from megatron_dppo.errors import WeightSyncError

    _, actor, engine = connect(runtime, settings)
    sync = sync_of(settings, actor, engine, runtime)
    sync.push(version)
    save(actor, Path(folder) / "before")
    together = family_of(actor.hf).travelling_together(actor.hf)
    change(actor, version, only="_down_proj." if together else "")
    sync._transport._buffer = Buffer(BUCKETS_OF_ONE)
    raised = ""
    try:
        sync.push(version + 1)
    except WeightSyncError as error:
        raised = str(error)
    sync.close()
    engine.admit(engine.urls, version + 1)  # which a push that raises does not
    answered = answers(actor, engine, params, Path(folder) / "after")
    return answered | {"raised": raised, "together": together}


def sync_of(settings: dict[str, Any], actor: Any, engine: Any, runtime: Runtime, **options: Any) -> Any:
    """The sync of a run, with other options of [rollout.sglang]."""
    from megatron_dppo.config.schema import Config
    from megatron_dppo.engines.weight_sync.factory import build_sync

    rollout = settings["rollout"]
    changed = rollout | {"sglang": rollout["sglang"] | options}
    return build_sync(Config.model_validate(settings | {"rollout": changed}), actor, engine, runtime)


def change(actor: Any, seed: int, only: str = "") -> None:
    """Add noise to every parameter and buffer, a tenth of its size, or to those with `only` in their names."""
    from megatron_dppo.checkpoints.megatron_weights import weight_buffers

    generator = torch.Generator().manual_seed(seed)
    (chunk,) = actor.chunks
    with torch.no_grad():
        for name, tensor in (*chunk.named_parameters(), *weight_buffers(chunk)):
            if only in name:
                tensor.add_(0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator))


def answers(actor: Any, engine: Any, params: SamplingParams, folder: Path) -> dict[str, Any]:
    """Requests and completions of the server, and the actor's weights in `folder`."""
    save(actor, folder)
    requests = requests_of(folder.name, num_prompts=4, samples=2, length=24)
    return {"requests": requests, "completions": engine.generate(requests, params)}


def save(actor: Any, folder: Path) -> None:
    """Write the actor's weights as safetensors, in Hugging Face names and as they are pushed."""
    folder.mkdir(parents=True)
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in actor.weights()}, folder / "model.safetensors"
    )
