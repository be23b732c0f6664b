"""What the parts of a run take at n and at 2n: bytes, files, calls and work grow with the stated exponent."""

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from megatron_dppo.checkpoints import checkpoint_folder as folders
from megatron_dppo.checkpoints.checkpoint_folder import Kept, Retention
from megatron_dppo.data.prompts.prompts import PromptStream, load_prompts
from megatron_dppo.engines.weight_sync.fleet import Fleet, Member
from tests.support.counted_bytes import tensor_work
from tests.unit.test_checkpoint_folder import make
from tests.unit.test_growth import bytes_of_nodes, played
from tests.unit.test_many_servers import Faulty

OPEN_FILES = """
import os, sys, threading
from megatron_dppo.engines.base import Request, SamplingParams
from megatron_dppo.engines.sglang.engine import SglangEngine
from tests.support.sglang_stand_in import MODEL, LiveStandIn

most, is_over = 0, threading.Event()

def watch():
    global most
    while not is_over.wait(0.005):
        most = max(most, len(os.listdir("/proc/self/fd")))

with LiveStandIn(token_s=0.002).running() as server:
    engine = SglangEngine([server.url], MODEL, max_concurrent_requests=24)
    threading.Thread(target=watch).start()
    requests = [Request(f"g{n}+0", (1, 2, 3), (1, 0, n)) for n in range(int(sys.argv[1]))]
    found = engine.generate(requests, SamplingParams(8))
    is_over.set()
    assert all(each.finish_reason != "abort" for each in found)
    print(most)
"""


def episode_bytes(num_calls: int, folder: Path) -> float:
    return bytes_of_nodes(played(num_calls, has_copies=False)[0])


def episode_copies(num_calls: int, folder: Path) -> float:
    return tensor_work(lambda: played(num_calls, has_copies=False)).num_bytes


def episode_operators(num_calls: int, folder: Path) -> float:
    return tensor_work(lambda: played(num_calls, has_copies=False)).operators


def prompt_bytes(num_prompts: int, folder: Path) -> float:
    rows = ({"prompt": f"{n} and {n + 1}?", "answer": str(2 * n + 1)} for n in range(num_prompts))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tracemalloc.start()
    try:
        stream = PromptStream(load_prompts(folder / "prompts.jsonl", "prompt", "answer"), 0, True)
        assert stream.at(3 * num_prompts + 1).prompt.answer
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def files_of_requests(num_requests: int, folder: Path) -> float:
    command = (sys.executable, "-c", OPEN_FILES, str(num_requests))
    return int(subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True).stdout)


def calls_to_servers(num_servers: int, folder: Path) -> float:
    with ExitStack() as stack:
        servers = [stack.enter_context(Faulty().running()) for _ in range(num_servers)]
        members = [Member(server.url, pid, 1, "0.5.23") for pid, server in enumerate(servers)]
        Fleet(members, None, 60.0).tell(lambda member: member.calls.pause)
        return sum(cast(Faulty, server).num_calls for server in servers)


def checkpoint_bytes(num_saves: int, folder: Path) -> float:
    """With a roll-back and a torn checkpoint now and then."""
    known, rule = list[Kept](), Retention(2, 0, 1, True)
    for step in range(num_saves):
        known.append(Kept(make(folder / str(num_saves), 1000 + step), step, step % 7, False))
        if step % 5 == 4:
            folders.set_aside(known.pop().folder, "torn")
        outdated = rule.choose_deleted(known)
        known = [kept for kept in known if kept.folder not in outdated]
        place = folder / str(num_saves)
        folders._remove([*outdated, *folders.oldest_aside(place), *folders.leftovers(place)])
    return sum(path.stat().st_size for path in (folder / str(num_saves)).rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("measure", "size", "exponent"),
    [
        (episode_bytes, 60, 1),
        (episode_copies, 60, 1),
        (episode_operators, 60, 1),
        (prompt_bytes, 2000, 1),
        (files_of_requests, 60, 0),
        (calls_to_servers, 3, 1),
        (checkpoint_bytes, 40, 0),
    ],
)
def test_a_resource_grows_with_its_exponent(
    measure: Callable[[int, Path], float], size: int, exponent: int, tmp_path: Path
) -> None:
    found, doubled = measure(size, tmp_path), measure(2 * size, tmp_path)
    assert 0 < doubled <= 1.25 * 2**exponent * found
