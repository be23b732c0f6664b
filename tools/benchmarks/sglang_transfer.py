"""Measures the cost of an SGLang server in the loop: pushing weights to it, and reading responses from it.

    python -m tools.benchmarks.sglang_transfer                   a model of 60 MB, on this machine's CPU or GPU
    python -m tools.benchmarks.sglang_transfer --hidden 512      a larger model
    make bench-sglang                                             installs the requirements first

The benchmark starts its own server. (a) Each way of pushing weights in turn, compared with a copy of the same
bytes in memory. On a GPU, server and trainer share it, and "distributed" is left out, because NCCL does not
support this. (b) The same requests through our engine, which checks and decodes every response, and through
plain HTTP, which discards them. Responses have only tokens and log-probs, or also the top 20 and the routes of
R3.
"""

import asyncio
import os
import statistics
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import httpx2
import torch
import typer

from megatron_dppo.analysis.pages import show_table
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.base import Request, SamplingParams
from megatron_dppo.runtime.process import Runtime, quiet_library_warnings, start, stop
from megatron_dppo.types import Sample
from tools.benchmarks import benchmarking as bench

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
    runtime, others = start(), bench.OtherPrograms()
    with tempfile.TemporaryDirectory() as name:
        config = make_config(Path(name), runtime, hidden, python)
        from megatron_dppo.engines.sglang.options import nccl_settings
        from megatron_dppo.engines.sglang.server import own_servers

        os.environ.update(nccl_settings(config))
        with own_servers(config, runtime):
            pushes = measure_pushes(config, runtime, rounds)
            rollouts = measure_rollouts(config, runtime, rounds, requests)
    stop()
    busy = others.cores()
    show(pushes, rollouts)
    bench.warn_if_busy("SGLang", busy)
    found = {"pushes": pushes, "rollouts": rollouts, "others": busy}
    bench.write_json(bench.OUT / "sglang.json", found)


def make_config(folder: Path, runtime: Runtime, hidden: int, python: str) -> Config:
    """Write a random model, and return the config of a run that starts a server of it."""
    from tools.benchmarks.jobs import write_model

    sizes = dict(hidden_size=hidden, moe_intermediate_size=hidden, intermediate_size=2 * hidden)
    sizes |= dict(num_attention_heads=8, num_key_value_heads=4, head_dim=hidden // 8, num_hidden_layers=8)
    sizes |= dict(vocab_size=4096, max_position_embeddings=512, initializer_range=0.25)
    write_model(runtime, str(folder / "model"), sizes)
    dtype, options = "bfloat16", {"mem_fraction_static": 0.3}  # the trainer is on the same GPU
    if not torch.cuda.is_available():
        quickstart = tomllib.loads((bench.ROOT / "examples" / "quickstart" / "base.toml").read_text())
        dtype, options = "float32", quickstart["sglang"]
    options |= {"context_length": 256, "max_total_tokens": 32768, "dtype": dtype, "python": python}
    servers = {"num_own_servers": 1, "probe_every": 0}
    rollout = {"engine": "sglang", "routing_replay": "measure", "sglang": servers}
    run, of_model = {"folder": folder / "run"}, {"load": folder / "model", "dtype": dtype}
    return Config.model_validate({"run": run, "model": of_model, "rollout": rollout, "sglang": options})


def measure_pushes(config: Config, runtime: Runtime, rounds: int) -> dict[str, Any]:
    """Measure the seconds of each way of pushing in turn, and of copying the same number of bytes."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.engines.weight_sync.factory import build_sync
    from megatron_dppo.rollout.rollouts import build_engine

    actor = Actor(config, runtime)
    engine = build_engine(config, config.model.load, runtime.device)
    num_bytes = sum(tensor.nbytes for _, tensor in actor.weights())
    source = torch.ones(num_bytes, dtype=torch.uint8, device=runtime.device)
    target, versions = torch.empty_like(source), count(1)
    copy = partial(seconds_of, runtime, lambda: target.copy_(source))
    measures: dict[str, Callable[[], float]] = {"copy": copy}
    with ExitStack() as stack:
        for way in ("distributed", "disk", "tensor") if runtime.device.type == "cpu" else ("disk", "tensor"):
            options = config.rollout.sglang.model_copy(update={"weight_sync": way})
            of_way = config.rollout.model_copy(update={"sglang": options})
            sync = build_sync(config.model_copy(update={"rollout": of_way}), actor, engine, runtime)
            stack.callback(sync.close)
            measures[way] = lambda push=sync.push: seconds_of(runtime, lambda: push(next(versions)))
        seconds = bench.in_turn(measures, rounds)  # the warm-up opens groups and files
    return {"bytes": num_bytes, "seconds": seconds}


def seconds_of(runtime: Runtime, work: Callable[[], object]) -> float:
    """Measure the seconds of one call, including the work on the device."""
    runtime.synchronize()
    started = time.perf_counter()
    work()
    runtime.synchronize()
    return time.perf_counter() - started


def measure_rollouts(config: Config, runtime: Runtime, rounds: int, num_requests: int) -> dict[str, Any]:
    """Measure the same requests through the engine and through plain HTTP, in turn."""
    from megatron_dppo.engines.sglang.engine import SglangEngine
    from megatron_dppo.engines.sglang.model import served_model
    from megatron_dppo.engines.sglang.protocol import generation_of
    from megatron_dppo.engines.sglang.records import api_key, read_records

    (record,) = read_records(config.run.folder / "servers")
    model, key = served_model(config.model.load, ()), api_key()  # no end token: equal lengths
    engine, generation = SglangEngine(record.url, model, api_key=key), generation_of(record.version)
    found: dict[str, Any] = {kind: {} for kind in PARAMS}
    ids = count()

    def requests() -> list[Request]:
        places = range(num_requests)
        return [Request(f"r{next(ids):06}", tuple(range(10 + i, 26 + i)), (0, 0, i)) for i in places]

    def through_engine(kind: str) -> float:
        asked, done = requests(), list[Sample]()
        seconds = seconds_of(runtime, lambda: done.extend(engine.generate(asked, PARAMS[kind])))
        found[kind]["tokens"] = sum(each.tokens.numel() for each in done)
        return seconds

    def through_http(kind: str) -> float:
        bodies = [generation.generate_body(request, PARAMS[kind], model) for request in requests()]
        return seconds_of(runtime, lambda: asyncio.run(post(record.url, key, bodies)))

    ways = {"engine": through_engine, "http": through_http}
    measures = {(kind, name): partial(way, kind) for kind in PARAMS for name, way in ways.items()}
    for (kind, name), seconds in bench.in_turn(measures, rounds).items():
        found[kind][name] = seconds
    return found


async def post(url: str, key: str | None, bodies: Sequence[dict[str, Any]]) -> None:
    """Post the requests, and do not read the responses."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=600, trust_env=False) as http:

        async def one(body: dict[str, Any]) -> None:
            (await http.post("/generate", json=body)).raise_for_status()

        await asyncio.gather(*map(one, bodies))


def show(pushes: dict[str, Any], rollouts: dict[str, Any]) -> None:
    """Print the tables."""
    gigabytes = pushes["bytes"] / 1e9
    medians = {way: statistics.median(values) for way, values in pushes["seconds"].items()}
    copy_s = medians["copy"]
    rows = [
        [way, bench.spread(pushes["seconds"][way], 4), f"{gigabytes / median:.2f}", f"{median / copy_s:.1f}"]
        for way, median in medians.items()
    ]
    show_table(f"(a) a push of {gigabytes * 1e3:.0f} MB", ["", "seconds", "GB/s", "times a copy"], rows)
    rows, ratios = list[list[str]](), list[str]()
    for kind, found in rollouts.items():
        engine, plain = statistics.median(found["engine"]), statistics.median(found["http"])
        tokens = found["tokens"]
        ratios.append(f"{engine / plain:.2f} with {kind}")
        rows.append([kind, f"{tokens / plain:,.0f}", f"{tokens / engine:,.0f}", f"{engine / plain:.2f}"])
    show_table("(b) responses", ["requested", "server tokens/s", "engine tokens/s", "ratio"], rows)
    del medians["copy"]
    way = min(medians, key=lambda name: medians[name])
    took = f"{medians[way]:.3f} s, {medians[way] / copy_s:.1f} times a copy"
    typer.echo(f"\nfastest push: {way}, {took}; our engine takes {', '.join(ratios)} of plain HTTP's time")


if __name__ == "__main__":
    bench.cli(main, __doc__)
