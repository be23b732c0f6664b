"""Runs work with ever more open files left, in a separate process, and prints the result of each.

python -m tests.support.few_files client URL URL | rewards | decoding
"""

import asyncio
import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

import psutil

from megatron_dppo.engines.sglang.client import Patience, SglangClient, ask_each
from megatron_dppo.engines.sglang.decoding_process import DecodingProcess
from megatron_dppo.engines.sglang.protocol import Generation
from megatron_dppo.rewards import RewardPool, RewardRequest
from megatron_dppo.types import Prompt
from tests.unit.test_sglang_protocol import MODEL, recorded

MOST = 24
LOOP, RECORDED = asyncio.new_event_loop(), recorded("topk_and_routes")
BODY: dict[str, Any] = {
    "input_ids": [1],
    "sampling_params": {"max_new_tokens": 2},
    "return_routed_experts": False,
}
QUICK = Patience(first_pause_s=0.001, max_attempts=2)


def open_files() -> list[int]:
    """The numbers of this process's open files."""
    return [int(file.name) for file in list(Path("/proc/self/fd").iterdir()) if file.exists()]


def limit_that_leaves(number: int) -> int:
    """The limit with which so many files can be opened."""
    used = set(open_files())
    return next(islice((each for each in count() if each not in used), number, None))


def calls(urls: list[str]) -> list[Any]:
    """Generations at one server, and one call to each: what came of each."""

    async def work() -> list[Any]:
        async with SglangClient(urls[0], QUICK) as client:
            bodies = [BODY | {"rid": f"g+{index}"} for index in range(3)]
            found: list[Any] = await asyncio.gather(*map(client.generate, bodies), return_exceptions=True)
        loads = {url: lambda client: client.is_healthy() for url in urls}
        return [*found, *(await ask_each(loads, timeout_s=300, patience=QUICK)).values()]

    return LOOP.run_until_complete(work())


def scores() -> list[Any]:
    """Rewards of new workers."""
    ask = [RewardRequest(Prompt("p", "4", "test", text="2 * 2 ="), response, "stop") for response in "abc"]
    with RewardPool("tests.unit.bad_rewards:told", num_workers=2, timeout_s=300, memory_mb=0) as pool:
        return list(pool.score(ask))


def decoded() -> list[Any]:
    """A response that a new process decodes."""
    request, params, body = RECORDED
    generation, content = Generation(DecodingProcess(small_bytes=0)), json.dumps(body).encode()
    return [LOOP.run_until_complete(generation.read_reply(content, request, params, MODEL))]


def num_files_at_rest(least: int) -> int:
    """The number of open files, once processes that are ending have closed theirs; at most 20 s later."""
    end = time.monotonic() + 20.0
    while (found := len(open_files())) > least + 2 and time.monotonic() < end:
        time.sleep(0.05)
        gc.collect()
    return found


def main() -> None:
    """Print for each limit [what each call gave, whether all work again, open files, child processes]."""
    which, *urls = sys.argv[1:]
    works: dict[str, Callable[[], list[Any]]] = {
        "client": lambda: calls(urls),
        "rewards": scores,
        "decoding": decoded,
    }
    work = works[which]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    work()
    gc.collect()
    least = len(open_files())
    for left in range(MOST):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit_that_leaves(left), hard))
        try:
            found = work()
        except Exception as error:  # noqa: BLE001 - reported to the test
            found = [error]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        of_calls = [f"{type(each).__name__}: {each}" if isinstance(each, Exception) else "" for each in found]
        del found
        works_again = not any(isinstance(each, Exception) for each in work())
        gc.collect()
        num_files = num_files_at_rest(least)
        least = min(least, num_files)
        row = [of_calls, works_again, num_files, len(psutil.Process().children())]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
