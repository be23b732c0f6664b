"""Measures the cost of decoding SGLang responses in the trainer's process and in the decoding process.

    python -m tools.benchmarks.decoding                  1 response of 16k tokens; 16 of 2k at once; small ones
    python -m tools.benchmarks.decoding --tokens 4096    shorter responses
    python -m tools.benchmarks.decoding --sglang 0.5.21  responses of servers that write the top-K as lists

The responses are synthetic bytes in memory, of Qwen3-30B-A3B with the top 20 and the routes of R3. No server is
started. Both ways take turns. "stall" is the longest time that a second thread, which wakes every millisecond,
did not run. The stall of "nothing", with this process only sleeping, comes from the machine itself. Small
responses, with only log-probs, show the size above which the decoding process is cheaper.
"""

import asyncio
import base64
import json
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import typer

from megatron_dppo.engines.base import Request, SamplingParams
from megatron_dppo.engines.sglang.decoding_process import DecodingProcess
from megatron_dppo.engines.sglang.protocol import (
    GENERATIONS,
    NEWEST,
    Generation,
    Generation0522,
    ServedModel,
    generation_of,
)
from megatron_dppo.runtime.tables import show_table
from megatron_dppo.types import ModelRouting
from tools.benchmarks.benchmarking import OUT, OtherPrograms, cli, machine, spread, warn_if_busy, write_json

MODEL = ServedModel(151_936, 48, (), ModelRouting(tuple(range(48)), 128, 8))
PROMPT, TOPK = 256, 20
REQUEST = Request("rollout0/prompt/0+0", tuple(range(PROMPT)), (0, 0, 0))
IDLE_S = 0.5
SMALL = (32, 128, 512, 2048)  # tokens, without top-K and routes


@dataclass(frozen=True)
class Cost:
    """Cost of decoding some responses once."""

    wall_s: float
    cpu_s: float  # CPU seconds of this process
    stall_s: float  # longest stall of another thread of this process


def main(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of one response.")] = 16_384,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each value.")] = 5,
    sglang: Annotated[str, typer.Option(help=f"Server version: {', '.join(GENERATIONS)}.")] = NEWEST,
) -> None:
    """Measure, print, and write runs/bench/decoding.json."""
    others = OtherPrograms()
    kind = type(generation_of(sglang))
    ways: dict[str, Generation | None] = {
        "this process": kind(DecodingProcess(small_bytes=1 << 60)),
        "its own": kind(DecodingProcess(small_bytes=0)),
        "nothing": None,
    }
    full = SamplingParams(tokens, num_topk_log_probs=TOPK, capture_routes=True)
    several = SamplingParams(max(tokens // 8, 1), num_topk_log_probs=TOPK, capture_routes=True)
    loads = {f"1 response of {tokens}": (full, 1)}
    loads |= {f"16 responses of {several.max_response_tokens}": (several, 16)}
    loads |= {f"{size} tokens, log-probs": (SamplingParams(size), 1) for size in SMALL}
    found: dict[str, dict[str, list[Cost]]] = {}
    rows: list[list[str]] = []
    for name, (params, num) in loads.items():
        content = answer(params, kind)
        costs: dict[str, list[Cost]] = {way: [] for way in ways}
        for round_ in range(rounds + 1):
            for way, generation in ways.items():
                cost = measure(generation, content, params, num)
                costs[way] += [cost] if round_ else []  # the first one starts the process
        found[name] = costs
        rows += [
            [name, f"{len(content) / 1e6:.3f}", way, *row_of(of_way, num)] for way, of_way in costs.items()
        ]
    del ways  # ends the decoding process, so that its CPU time counts as ours
    busy = others.cores()
    header = ["", "MB each", "decoded in", "wall ms", "CPU ms", "stall ms", "responses/s"]
    show_table("decoding responses", header, rows)
    warn_if_busy("decoding", busy)
    figures = {name: {way: list(map(asdict, of)) for way, of in costs.items()} for name, costs in found.items()}
    write_json(OUT / "decoding.json", {"machine": machine(), "costs": figures, "others": busy})


def measure(generation: Generation | None, content: bytes, params: SamplingParams, num: int) -> Cost:
    """Decode `num` equal responses that arrive at once, or only sleep if `generation` is `None`."""
    gaps, is_over = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not is_over.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    async def decode() -> None:
        if generation is None:
            await asyncio.sleep(IDLE_S)
        else:
            await asyncio.gather(*(generation.read_reply(content, REQUEST, params, MODEL) for _ in range(num)))

    ticking = threading.Thread(target=tick)
    ticking.start()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    asyncio.run(decode())
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    is_over.set()
    ticking.join()
    return Cost(wall_s, cpu_s, max(gaps))


def row_of(costs: list[Cost], num: int) -> list[str]:
    """Return the table cells of one way: medians and ranges."""
    columns = [[getattr(cost, name) * 1e3 for cost in costs] for name in ("wall_s", "cpu_s", "stall_s")]
    per_s = num / statistics.median(cost.wall_s for cost in costs)
    return [*(spread(column, 1) for column in columns), f"{per_s:.1f}"]


def answer(params: SamplingParams, kind: type[Generation]) -> bytes:
    """Return the random body of a response from /generate, in the format of this kind of server."""
    count, rng = params.max_response_tokens, np.random.default_rng(0)
    log_probs = -np.sort(rng.exponential(3.0, (count, TOPK)).astype(np.float32)).astype(np.float64)
    ids = rng.integers(0, MODEL.vocab_size, (count, 1)) + 977 * np.arange(TOPK)  # distinct within a row
    top = [
        [[value, token, None] for value, token in zip(*row, strict=True)]
        for row in zip(log_probs.tolist(), (ids % MODEL.vocab_size).tolist(), strict=True)
    ]
    meta = {
        "id": REQUEST.id,
        "finish_reason": {"type": "length", "length": count},
        "prompt_tokens": PROMPT,
        "completion_tokens": count,
        "cached_tokens": 0,
        "num_retractions": 0,
        "weight_versions": [{"version": "0", "start": 0, "end": count}],
        "output_token_logprobs": [row[0] for row in top],
    }
    if params.num_topk_log_probs and issubclass(kind, Generation0522):
        arrays = {"val": log_probs.astype("<f4"), "idx": (ids % MODEL.vocab_size).astype("<i4")}
        for name, array in arrays.items():
            key = f"output_top_logprobs_{name}_flat_b64"
            meta |= {key: base64.b64encode(array.tobytes()).decode(), f"{key}_dtype": str(array.dtype)}
        meta |= {"output_top_logprobs_shape": [count, TOPK], "output_top_logprobs_null_prefix": 0}
    elif params.num_topk_log_probs:
        meta["output_top_logprobs"] = top
    if params.capture_routes:
        assert MODEL.routing is not None, "a model with experts"
        first = rng.integers(0, 128, (PROMPT + count - 1, MODEL.num_layers, 1))
        routes = (first + 16 * np.arange(MODEL.routing.top_k)) % MODEL.routing.num_experts
        meta["routed_experts"] = base64.b64encode(routes.astype("<i4").tobytes()).decode()
    body = {"output_ids": [row[0][1] for row in top], "meta_info": meta}
    return json.dumps(body, separators=(",", ":")).encode()


if __name__ == "__main__":
    cli(main, __doc__)
