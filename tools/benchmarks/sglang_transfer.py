"""Measures the cost of an SGLang server in the loop: pushing weights to it, and reading responses from it.

    python -m tools.benchmarks.sglang_transfer                   a model of 60 MB, on this machine's CPU or GPU
    python -m tools.benchmarks.sglang_transfer --hidden 512      a larger model
    make bench-sglang                                             installs the requirements first

The benchmark starts its own server. (a) Each way of pushing weights in turn, compared with a copy of the same
bytes in memory. On a GPU, server and trainer share the GPU, and "distributed" is left out, because NCCL does
not support two ranks on one GPU. (b) The same requests through our engine, which checks and decodes every
response, and through plain HTTP, which discards them. Responses have only tokens and log-probs, or also the
top 20 and the routes of R3. (c) The bytes of a token on the wire and in the trainer's memory.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx2
import torch
import typer

from megatron_dppo.runtime.tables import show_table
from tools.benchmarks.benchmarking import (
    OUT,
    ROOT,
    OtherPrograms,
    cli,
    machine,
    spread,
    warn_if_busy,
    write_json,
)

sys.path[:0] = [str(ROOT)]

from megatron_dppo.config.schema import Config  # noqa: E402
from megatron_dppo.engines.base import Completion, Request, SamplingParams  # noqa: E402
from megatron_dppo.runtime.process import Runtime, quiet_library_warnings, start, stop  # noqa: E402

WAYS = ("distributed", "disk", "tensor")
WAYS_ON_ONE_GPU = ("disk", "tensor")
RESPONSE = 48  # tokens
PARAMS = {
    "log-probs": SamplingParams(RESPONSE),
    "top 20 and routes": SamplingParams(RESPONSE, num_topk_log_probs=20, capture_routes=True),
}


def main(
    hidden: Annotated[int, typer.Option(help="Hidden size of the model.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each value.")] = 5,
    requests: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 32,
    python: Annotated[str, typer.Option(help="Python interpreter with SGLang.")] = ".venv-sglang/bin/python",
) -> None:
    """Measure, print, and write runs/bench/sglang.json."""
    quiet_library_warnings()
    runtime, others = start(), OtherPrograms()
    with tempfile.TemporaryDirectory() as name:
        config = make_config(Path(name), hidden, python)
        from megatron_dppo.engines.sglang.options import nccl_settings
        from megatron_dppo.engines.sglang.server import own_servers

        os.environ.update(nccl_settings(config))

        with own_servers(config, runtime):
            pushes = measure_pushes(config, runtime, rounds)
            rollouts = measure_rollouts(config, runtime, rounds, requests)
    stop()
    busy = others.cores()
    show(pushes, rollouts)
    warn_if_busy("SGLang", busy)
    write_json(
        OUT / "sglang.json", {"machine": machine(), "pushes": pushes, "rollouts": rollouts, "others": busy}
    )


def make_config(folder: Path, hidden: int, python: str) -> Config:
    """Write a random model, and return the config of a run that starts a server of it."""
    from tests.support.tiny import write_model

    sizes = dict(hidden_size=hidden, moe_intermediate_size=hidden, intermediate_size=2 * hidden)
    sizes |= dict(num_attention_heads=8, num_key_value_heads=4, head_dim=hidden // 8, num_hidden_layers=8)
    write_model(folder / "model", vocab_size=4096, max_position_embeddings=512, **sizes)
    quickstart = tomllib.loads((ROOT / "examples" / "quickstart" / "base.toml").read_text())
    on_cpu: dict[str, Any] = {} if torch.cuda.is_available() else quickstart["sglang"]
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    limits: dict[str, Any] = {
        "context_length": 256,
        "max_total_tokens": 32768,
        "dtype": dtype,
        "python": python,
    }
    if torch.cuda.is_available():
        limits |= {"mem_fraction_static": 0.3}  # the trainer is on the same GPU
    return Config.model_validate(
        {
            "run": {"folder": folder / "run"},
            "model": {"load": folder / "model", "dtype": dtype},
            "rollout": {
                "engine": "sglang",
                "routing_replay": "measure",
                "sglang": {"num_own_servers": 1, "probe_every": 0},
            },
            "sglang": on_cpu | limits,
        }
    )


def measure_pushes(config: Config, runtime: Runtime, rounds: int) -> dict[str, Any]:
    """Measure the seconds of each way of pushing in turn, and of copying the same number of bytes."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.engines.weight_sync.factory import build_sync
    from megatron_dppo.rollout.rollouts import build_engine

    actor = Actor(config, runtime)
    engine = build_engine(config, config.model.load, runtime.device)
    num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in actor.weights())
    source = torch.ones(num_bytes, dtype=torch.uint8, device=runtime.device)
    target = torch.empty_like(source)
    ways = WAYS if runtime.device.type == "cpu" else WAYS_ON_ONE_GPU
    syncs = {}
    for way in ways:
        options = config.rollout.sglang.model_copy(update={"weight_sync": way})
        of_way = config.rollout.model_copy(update={"sglang": options})
        syncs[way] = build_sync(config.model_copy(update={"rollout": of_way}), actor, engine, runtime)
    seconds: dict[str, list[float]] = {way: [] for way in (*ways, "copy")}
    for version in range(1, rounds + 2):
        of_round = {way: seconds_of(runtime, partial(syncs[way].push, version)) for way in ways}
        of_round["copy"] = seconds_of(runtime, lambda: target.copy_(source))
        for way, value in of_round.items() if version > 1 else ():  # the first one opens groups and files
            seconds[way].append(value)
    for sync in syncs.values():
        sync.close()
    return {"bytes": num_bytes, "seconds": seconds}


def seconds_of(runtime: Runtime, work: Callable[[], object]) -> float:
    """Measure the seconds of one call, including the work on the device."""
    runtime.synchronize()
    started = time.perf_counter()
    work()
    runtime.synchronize()
    return time.perf_counter() - started


def measure_rollouts(config: Config, runtime: Runtime, rounds: int, num_requests: int) -> dict[str, Any]:
    """Measure the same requests through the engine and through plain HTTP, in turn, and the bytes per token."""
    from megatron_dppo.engines.sglang.engine import SglangEngine
    from megatron_dppo.engines.sglang.model import served_model
    from megatron_dppo.engines.sglang.protocol import generation_of
    from megatron_dppo.engines.sglang.server import API_KEY, read_records

    (record,) = read_records(config.run.folder / "servers")
    model, key = served_model(config.model.load, ()), os.environ.get(API_KEY)  # no end token: equal lengths
    engine = SglangEngine(record.url, model, api_key=key)
    generation = generation_of(record.version)
    found: dict[str, Any] = {
        kind: {"engine": [], "http": [], "wire_bytes": 0.0, "memory_bytes": 0.0} for kind in PARAMS
    }
    for round_ in range(rounds + 1):
        for kind, params in PARAMS.items():
            asked = [
                Request(f"{kind}{round_}+{i:03}", tuple(range(10 + i, 26 + i)), (0, 0, i))
                for i in range(num_requests)
            ]
            bodies = [generation.generate_body(request, params, model) for request in asked]
            completions: list[Completion] = []
            sizes: list[int] = []

            def sample(
                asked: list[Request] = asked,
                params: SamplingParams = params,
                into: list[Completion] = completions,
            ) -> None:
                into += engine.generate(asked, params)

            def ask(bodies: list[dict[str, Any]] = bodies, into: list[int] = sizes) -> None:
                into += asyncio.run(post(record.url, key, bodies))

            through, plain = seconds_of(runtime, sample), seconds_of(runtime, ask)
            if round_:
                found[kind]["engine"].append(through)
                found[kind]["http"].append(plain)
            num_tokens = sum(completion.tokens.numel() for completion in completions)
            found[kind]["tokens"] = num_tokens
            found[kind]["wire_bytes"] = sum(sizes) / num_tokens
            found[kind]["memory_bytes"] = sum(map(bytes_of, completions)) / num_tokens
    return found


async def post(url: str, key: str | None, bodies: Sequence[dict[str, Any]]) -> list[int]:
    """Post the requests, and return the size of each response in bytes without reading it."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=600, trust_env=False) as http:

        async def one(body: dict[str, Any]) -> int:
            answer = await http.post("/generate", json=body | {"rid": body["rid"] + "/plain"})
            answer.raise_for_status()
            return len(answer.content)

        return list(await asyncio.gather(*(one(body) for body in bodies)))


def bytes_of(completion: Completion) -> int:
    """Return the size of a response's tensors in bytes."""
    topk, routes = completion.topk, completion.routed_experts
    tensors = [completion.tokens, completion.log_probs]
    tensors += [topk.ids, topk.log_probs] if topk is not None else []
    tensors += [routes.indices] if routes is not None else []
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def show(pushes: dict[str, Any], rollouts: dict[str, Any]) -> None:
    """Print the tables."""
    gigabytes, copy_s = pushes["bytes"] / 1e9, statistics.median(pushes["seconds"]["copy"])
    rows = [
        [
            way,
            spread(values, 4),
            f"{gigabytes / statistics.median(values):.2f}",
            f"{statistics.median(values) / copy_s:.1f}",
        ]
        for way, values in pushes["seconds"].items()
    ]
    show_table(f"(a) a push of {gigabytes * 1e3:.0f} MB", ["", "seconds", "GB/s", "times a copy"], rows)
    rows = []
    ratios: list[str] = []
    for kind, values in rollouts.items():
        engine, plain = statistics.median(values["engine"]), statistics.median(values["http"])
        per_token = (engine - plain) / values["tokens"] * 1e6
        speed = values["tokens"] / plain
        ratios.append(f"{engine / plain:.2f} with {kind}")
        rows.append(
            [
                kind,
                f"{speed:,.0f}",
                f"{values['tokens'] / engine:,.0f}",
                f"{engine / plain:.2f}",
                f"{per_token:.0f}",
                f"{values['wire_bytes']:,.0f}",
                f"{values['memory_bytes']:,.0f}",
            ]
        )
    header = [
        "requested",
        "server tokens/s",
        "engine tokens/s",
        "ratio",
        "us/token more",
        "wire B/token",
        "memory B/token",
    ]
    show_table("(b, c) responses", header, rows)
    medians = {way: statistics.median(values) for way, values in pushes["seconds"].items() if way != "copy"}
    way = min(medians, key=lambda name: medians[name])
    took = f"{medians[way]:.3f} s, {medians[way] / copy_s:.1f} times a copy"
    typer.echo(f"\nfastest push: {way}, {took}; our engine takes {', '.join(ratios)} of plain HTTP's time")


if __name__ == "__main__":
    cli(main, __doc__)
