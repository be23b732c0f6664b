"""A trainer's processes that push weights to a server: what tests/sglang runs with `ranks.run_ranks`."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.runtime.process import Runtime
from tests.support.processes import wait_until
from tests.support.serving import KEY, num_requests_at

WAYS = ("distributed", "disk", "tensor")


def connect(runtime: Runtime, settings: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return (config, actor, engine) of a run; the trainer holds its own copy of the weights."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.config.schema import Config
    from megatron_dppo.engines.sglang.options import nccl_settings
    from megatron_dppo.rollout.rollouts import build_engine

    config = Config.model_validate(settings)
    os.environ.update(nccl_settings(config))  # as a session does before it joins the job's processes
    return config, Actor(config, runtime), build_engine(config, config.model.load, runtime.device)


def change(actor: Any, factor: float) -> None:
    """Other weights than before, in every tensor."""
    with torch.no_grad():
        for chunk in actor.chunks:
            for parameter in chunk.parameters():
                parameter.mul_(factor)


def push_every_way(
    runtime: Runtime, settings: dict[str, Any], first_version: int, ways: tuple[str, ...] = WAYS
) -> dict[str, Any]:
    """Change the weights and push them, once for each way; the probe must fail before and not after."""
    from megatron_dppo.engines.base import Request, SamplingParams
    from megatron_dppo.engines.weight_sync.factory import build_sync
    from megatron_dppo.errors import WeightSyncError

    config, actor, engine = connect(runtime, settings)
    results: dict[str, Any] = {}
    for version, way in enumerate(ways, first_version):
        of_way = config.rollout.sglang.model_copy(update={"weight_sync": way, "sync_bucket_bytes": 40_000})
        rollout = config.rollout.model_copy(update={"sglang": of_way})
        sync: Any = build_sync(config.model_copy(update={"rollout": rollout}), actor, engine, runtime)
        change(actor, 1.05)
        stale = ""
        try:
            sync._probe.run(sync._servers.fleet()[0].members)
        except WeightSyncError as error:
            stale = str(error)
        metrics = sync.push(version)
        sync.close()
        request = Request(f"{way}{runtime.rank}", (5, 6, 7, 8), (0, 0, 0))
        (completion,) = engine.generate([request], SamplingParams(8))
        versions = {span.version for span in completion.weight_versions}
        results[way] = {"stale": stale, "metrics": metrics, "versions": versions, "version": version}
    return results


def perturb_each_tensor(runtime: Runtime, settings: dict[str, Any], version: int) -> dict[str, float]:
    """Give the server one wrong tensor at a time; by name, how far the probe then finds it."""
    from megatron_dppo.engines.weight_sync.factory import build_sync
    from megatron_dppo.engines.weight_sync.transports import TensorTransport
    from megatron_dppo.errors import WeightSyncError

    config, actor, engine = connect(runtime, settings)
    sync: Any = build_sync(config, actor, engine, runtime)
    sync.push(version)
    found: dict[str, float] = {}
    (member,) = sync._servers.fleet()[0].members

    def give(name: str, tensor: Tensor) -> None:
        def one() -> Iterator[tuple[str, Tensor]]:
            yield name, tensor

        fleet = sync._servers.fleet()[0]
        fleet.tell(lambda m: m.calls.begin)
        TensorTransport(one, 1, runtime, 1).send(fleet, version)
        fleet.tell(lambda m: m.calls.end)
        assert not fleet.failures, fleet.failures

    generator = torch.Generator().manual_seed(0)  # scaling some tensors changes nothing: norms undo it
    weights = {name: tensor.clone() for name, tensor in actor.weights()}
    for name, tensor in weights.items():
        give(name, tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator))
        try:
            found[name] = -sync._probe.run([member])["sync/probe_abs_diff_max"]
        except WeightSyncError as error:
            found[name] = float(str(error).split(" in the mean and ")[1].split(" ")[0])
        give(name, tensor)
    found["restored"] = sync._probe.run([member])["sync/probe_abs_diff_max"]
    return found


async def scores_of(probe: Any, member: Any, num_sequences: int) -> list[Any]:
    """Return log-probs and routes of the probe's first sequences, from one server."""
    from megatron_dppo.engines.sglang.client import SglangClient

    async with SglangClient(member.url, api_key=KEY) as client:
        return await probe._score(client, probe._sequences[:num_sequences])


def move_an_expert(
    runtime: Runtime, settings: dict[str, Any], first_version: int, ways: tuple[str, ...] = WAYS
) -> dict[str, dict[str, float]]:
    """Push equal weights twice, then with one changed expert of the last layer, then the first ones again.

    Returns mean changes of log-probs per way: "noise" between equal pushes, "moved" and "unmoved" of tokens
    that are and are not routed to the expert, "restored" between the first and the last push.
    """
    from megatron_dppo.engines.weight_sync.factory import build_sync

    config, actor, engine = connect(runtime, settings)
    results: dict[str, dict[str, float]] = {}
    for number, way in enumerate(ways):
        of_way = config.rollout.sglang.model_copy(update={"weight_sync": way, "probe_every": 100})
        rollout = config.rollout.model_copy(update={"sglang": of_way})
        sync: Any = build_sync(config.model_copy(update={"rollout": rollout}), actor, engine, runtime)
        stream_of, factors = sync._transport._weights, dict[str, float]()

        def weights(stream_of: Any = stream_of, factors: Any = factors) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in stream_of():
                yield name, tensor * factors.get(name, 1.0)

        sync._transport._weights = weights
        log_probs: list[Tensor] = []
        is_routed = torch.empty(0)
        for step in range(4):
            sync.push(first_version + 4 * number + step)
            (member,) = sync._servers.fleet()[0].members
            answers = asyncio.run(scores_of(sync._probe, member, 16))
            log_probs.append(torch.stack([each for each, _ in answers]))
            if step == 1:
                last = torch.stack([routes.indices[: len(each), -1].long() for each, routes in answers])
                layer, expert = answers[0][1].layer_numbers[-1], int(last.flatten().bincount().argmax())
                is_routed = (last == expert).any(-1)
                factors[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"] = -2.0
            elif step == 2:
                factors.clear()
        sync.close()
        first, again, changed, restored = log_probs
        results[way] = {
            "noise": float((again - first).abs().mean()),
            "moved": float((changed - again).abs()[is_routed].mean()),
            "unmoved": float((changed - again).abs()[~is_routed].mean()),
            "restored": float((restored - first).abs().mean()),
        }
    return results


def require_moved(found: dict[str, float], rounding: float) -> None:
    """Require of `move_an_expert` that only the routed tokens moved, and by more than rounding."""
    assert max(found["noise"], found["unmoved"], found["restored"]) <= rounding, found
    assert found["moved"] > 10 * max(found["noise"], found["unmoved"]), found
    assert found["moved"] > 2 * rounding, found


def lose_a_server(
    runtime: Runtime, settings: dict[str, Any], way: str, signal_number: int, pid: int
) -> dict[str, Any]:
    """Push to two servers, and send one of them (a whole process group) a signal in the middle."""
    from megatron_dppo.engines.base import Request, SamplingParams
    from megatron_dppo.engines.weight_sync.factory import build_sync

    config, actor, engine = connect(runtime, settings)
    sync: Any = build_sync(config, actor, engine, runtime)
    change(actor, 1.05)
    stream_of, is_hit = sync._transport._weights, False

    def weights() -> Iterator[tuple[str, Tensor]]:
        nonlocal is_hit
        for index, named in enumerate(stream_of()):
            if index == 10 and not is_hit:
                is_hit = True
                os.killpg(pid, signal_number)
            yield named

    sync._transport._weights = weights
    metrics = sync.push(41)
    requests = [Request(f"lost{i}", (5, 6, 7 + i), (0, 0, i)) for i in range(4)]
    versions = {
        span.version for c in engine.generate(requests, SamplingParams(6)) for span in c.weight_versions
    }
    sync.close()
    return {"metrics": metrics, "versions": versions, "is_hit": is_hit, "urls": engine.urls}


def die_in_the_middle(runtime: Runtime, settings: dict[str, Any]) -> None:
    """End without a word after the first bucket, with the server paused and its update open."""
    from megatron_dppo.engines.weight_sync.factory import build_sync

    config, actor, engine = connect(runtime, settings)
    sync: Any = build_sync(config, actor, engine, runtime)
    stream_of = sync._transport._weights

    def weights() -> Iterator[tuple[str, Tensor]]:
        for index, named in enumerate(stream_of()):
            if index == 40:
                os._exit(7)
            yield named

    sync._transport._weights = weights
    sync.push(51)


def die_while_sampling(runtime: Runtime, settings: dict[str, Any]) -> None:
    """Be killed while the server works on requests of this process."""
    from megatron_dppo.engines.base import Request, SamplingParams

    _, _, engine = connect(runtime, settings)

    def die() -> None:
        wait_until(lambda: num_requests_at(engine.urls[0]) >= 32, 300)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()
    requests = [Request(f"dies+{i:03}", (5 + i % 80, 6, 7), (0, 0, i)) for i in range(512)]
    engine.generate(requests, SamplingParams(400, temperature=0.5))


def push_once(runtime: Runtime, settings: dict[str, Any], version: int) -> dict[str, float]:
    """One push of changed weights, with its proof."""
    from megatron_dppo.engines.weight_sync.factory import build_sync

    config, actor, engine = connect(runtime, settings)
    change(actor, 1.02)
    return build_sync(config, actor, engine, runtime).push(version)


def release_and_push(runtime: Runtime, settings: dict[str, Any], version: int) -> dict[str, Any]:
    """Let a colocated server release its memory, lose sight of it, and push; free bytes of the device.

    "free_" and: before, after_release, after_trainer_left, after_push, at_the_end. As two trainers would, of
    which the first died after the release.
    """
    from megatron_dppo.config.schema import Config
    from megatron_dppo.engines.weight_sync.factory import build_sync, release_servers
    from megatron_dppo.run.parts import Turns

    config = Config.model_validate(settings)

    def free() -> int:
        runtime.synchronize()
        return torch.cuda.mem_get_info(runtime.device)[0] if runtime.device.type == "cuda" else 0

    found: dict[str, Any] = {"free_before": free()}
    for _ in range(2):  # the second one finds a server that has released what it had
        release_servers(config, runtime)
    found["free_after_release"] = free()
    config, actor, engine = connect(runtime, settings)
    turns = Turns(actor, build_sync(config, actor, engine, runtime), runtime)
    change(actor, 1.05)
    leave = actor.memory.leave

    def leave_and_look() -> None:
        leave()
        found["free_after_trainer_left"] = free()

    actor.memory.leave = leave_and_look
    found["metrics"] = turns.to_engine(version)
    found["free_after_push"] = free()
    found["is_away"] = actor.memory.is_away
    turns.to_trainer()
    found["free_at_the_end"] = free()
    found["outside_bytes"] = runtime.gpu_ledger.outside_bytes
    turns.to_engine(version + 1)  # for whoever uses the server next
    return found


def push_quantised(
    runtime: Runtime, settings: dict[str, Any], first_version: int, ways: tuple[str, ...] = WAYS
) -> dict[str, dict[str, Any]]:
    """Push other weights by each way to a server of 8-bit floats; its distance from their dequantised model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from megatron_dppo.analysis.mismatch.quantized import fill
    from megatron_dppo.engines.sglang.quantization import served_form
    from megatron_dppo.engines.weight_sync.factory import build_sync

    config, actor, engine = connect(runtime, settings)
    form, folder = served_form(config), config.model.load
    assert form is not None
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32
    ).eval()
    results: dict[str, dict[str, Any]] = {}
    for version, way in enumerate(ways, first_version):
        of_way = config.rollout.sglang.model_copy(update={"weight_sync": way, "sync_bucket_bytes": 400_000})
        rollout = config.rollout.model_copy(update={"sglang": of_way})
        sync: Any = build_sync(config.model_copy(update={"rollout": rollout}), actor, engine, runtime)
        change(actor, 1.1)
        metrics = sync.push(version)
        sent = dict(form.quantized((name, tensor.clone()) for name, tensor in actor.weights()))
        fill(model, _dequantized(sent), folder)
        sequences = sync._probe._sequences[:4]
        log_probs = model(input_ids=sequences).logits[:, :-1].log_softmax(-1)
        expected = log_probs.gather(-1, sequences[:, 1:, None])[..., 0].detach()
        (member,) = sync._servers.fleet()[0].members
        scores, _ = sync._probe._ask([member], 4)
        found = scores[member].log_probs
        results[way] = {"metrics": metrics, "from_dequantised": float((found - expected).abs().max())}
        sync.close()
    return results


def _dequantized(sent: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights that a push sent, in float32."""
    for name, tensor in sent.items():
        if tensor.dtype == torch.float8_e4m3fn:
            rows, columns = (torch.arange(size) // 128 for size in tensor.shape)
            yield name, tensor.float() * sent[f"{name}_scale_inv"][rows][:, columns]
        elif not name.endswith("_scale_inv"):
            yield name, tensor
