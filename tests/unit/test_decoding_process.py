"""Faults of the process that decodes replies: each costs one reply, and none hangs."""

import asyncio
import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from megatron_dppo.engines.sglang import decoding_process
from megatron_dppo.engines.sglang.decoding_process import DecodingProcess, SharedMemory
from megatron_dppo.engines.sglang.protocol import Generation
from megatron_dppo.engines.sglang.replies import Answer, Content, Expected
from megatron_dppo.errors import ReplyError, RolloutError
from megatron_dppo.types import Sample
from tests.support.processes import hang, is_alive, wait_until
from tests.support.samples import assert_same
from tests.unit.test_sglang_protocol import MODEL, recorded

LARGE = b" " * (4 << 20)  # after a reply: more than a pipe holds
TRAINER = """
import asyncio, json, sys, time
import psutil
from megatron_dppo.errors import ReplyError
from megatron_dppo.engines.sglang.decoding_process import DecodingProcess
from megatron_dppo.engines.sglang.replies import Expected, read_reply

decoding = DecodingProcess(small_bytes=0)
try:
    asyncio.run(decoding.read(read_reply, b"[]", Expected("a reply")))
except ReplyError as error:
    pids = [process.pid for process in psutil.Process().children(recursive=True)]
    print(json.dumps([pids, str(error)]), flush=True)
if sys.argv[1] == "killed":
    time.sleep(600)
"""


async def _reply(decoding: DecodingProcess, name: str = "topk_and_routes", behind: bytes = b"") -> Sample:
    request, params, body = recorded(name)
    content = json.dumps(body).encode() + behind
    return await Generation(decoding).read_reply(content, request, params, MODEL)


def _read(decoding: DecodingProcess, behind: bytes = b"") -> Sample:
    return asyncio.run(_reply(decoding, behind=behind))


def _pid(decoding: DecodingProcess) -> int:
    """The process that decodes, the child of the one that guards it."""
    assert decoding._child is not None
    (child,) = psutil.Process(decoding._child.process._process.pid).children()
    return child.pid


def _has_unread(decoding: DecodingProcess) -> bool:
    """Whether the process was sent a request that it has not read."""
    assert decoding._child is not None
    return fcntl.ioctl(decoding._child.process._in, termios.FIONREAD, bytes(4)) != bytes(4)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, 60)


def _hang(decoding: DecodingProcess, behind: bytes = b"") -> Answer:
    return asyncio.run(decoding.read(hang, b"{}" + behind, Expected("an answer")))


@pytest.mark.parametrize(("num_kib", "where"), [(40, "here"), (63, "here"), (64, "there"), (100, "there")])
def test_responses_below_64_kib_are_decoded_here(
    monkeypatch: pytest.MonkeyPatch, num_kib: int, where: str
) -> None:
    decoding = DecodingProcess()
    monkeypatch.setattr(decoding, "_read_there", lambda reader, content, expected: "there")

    def read_here(content: Content, expected: Expected) -> Any:
        return "here"

    assert asyncio.run(decoding.read(read_here, bytes(num_kib << 10), Expected("an answer"))) == where


@pytest.mark.parametrize("behind", [b"", LARGE])
def test_process_killed_while_it_decodes_costs_one_reply_and_is_replaced(behind: bytes) -> None:
    decoding = DecodingProcess(small_bytes=0)
    for _ in range(2):
        whole = _read(decoding, behind)
        first = _pid(decoding)
        with ThreadPoolExecutor(1) as thread:
            reading = thread.submit(_hang, decoding, behind)
            wait_until(lambda: decoding._child is not None and decoding._child.has_request, 60)
            os.kill(first, signal.SIGKILL)
            with pytest.raises(ReplyError, match="SIGKILL"):
                reading.result()
        assert not is_alive(first)
        assert torch.equal(_read(decoding, behind).tokens, whole.tokens)


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_process_that_was_killed_while_idle_costs_nothing(is_noticed: bool) -> None:
    """Not even if it dies after it was sent a response that it has not read."""
    decoding = DecodingProcess(small_bytes=0)
    before = _read(decoding)
    for _ in range(3):
        first = _pid(decoding)
        if is_noticed:
            os.kill(first, signal.SIGKILL)
            wait_until(lambda pid=first: not is_alive(pid), 60)
        else:
            _stop(first)
        with ThreadPoolExecutor(1) as thread:
            reading = thread.submit(_read, decoding)
            if not is_noticed:
                wait_until(lambda: _has_unread(decoding), 60)
                os.kill(first, signal.SIGKILL)
            assert_same(reading.result(), before)
        assert _pid(decoding) != first


def test_a_process_that_hangs_is_killed_in_time() -> None:
    decoding = DecodingProcess(small_bytes=0)
    _read(decoding)
    first, decoding._timeout_s = _pid(decoding), 0.5
    with pytest.raises(ReplyError, match=r"within 0\.5 s"):
        _hang(decoding, LARGE)
    wait_until(lambda: not is_alive(first), 60)  # it was killed, and the kernel may still free its memory
    decoding._timeout_s = 120.0
    assert _read(decoding).topk is not None


def test_the_run_stops_where_the_next_process_is_lost_too() -> None:
    decoding = DecodingProcess(small_bytes=0, timeout_s=0.0)
    with pytest.raises(ReplyError, match="within 0 s"):
        _hang(decoding)
    with pytest.raises(RolloutError, match="no reply within 0 s, like the process before it") as stops:
        _hang(decoding)
    assert not isinstance(stops.value, ReplyError)  # that would be one more dropped sample


def test_a_process_that_does_not_start_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(decoding_process.SERVICE, module="megatron_dppo.no_such_module")
    monkeypatch.setattr(decoding_process, "SERVICE", broken)
    with pytest.raises(
        RolloutError, match=r"did not start: its worker exited with code 1(.|\n)*no_such_module"
    ):
        _read(DecodingProcess(small_bytes=0))


def test_threads_and_event_loops_share_one_process() -> None:
    decoding = DecodingProcess(small_bytes=0)
    names = ["plain", "topk_and_routes", "stop"]

    async def read_all(shift: int) -> None:
        order = [names[(shift + k) % len(names)] for k in range(12)]
        replies = await asyncio.gather(*(_reply(decoding, name) for name in order))
        for name, reply in zip(order, replies, strict=True):
            request, _, body = recorded(name)
            assert (reply.request_id, reply.tokens.tolist()) == (request.id, body["output_ids"])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda shift: asyncio.run(read_all(shift)), range(4)))
    assert is_alive(_pid(decoding))


def test_reply_to_a_cancelled_request_is_dropped() -> None:
    decoding = DecodingProcess(small_bytes=0)
    _read(decoding)
    _stop(_pid(decoding))

    async def read() -> Sample:
        given_up = asyncio.create_task(_reply(decoding, "stop"))
        while not _has_unread(decoding):
            await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        os.kill(_pid(decoding), signal.SIGCONT)
        return await _reply(decoding, "plain")

    found, (request, _, body) = asyncio.run(read()), recorded("plain")
    assert (found.request_id, found.tokens.tolist()) == (request.id, body["output_ids"])


@pytest.mark.parametrize("how", ["killed", "ends"])
def test_it_ends_with_the_trainer(how: str) -> None:
    with subprocess.Popen([sys.executable, "-c", TRAINER, how], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        pids, message = json.loads(trainer.stdout.readline())
        if how == "killed":
            assert len(pids) == 2 and all(map(is_alive, pids))
            trainer.kill()
    assert message.startswith("a reply: found no JSON of a response (Expected `object`, got `array`)")
    wait_until(lambda: not any(map(is_alive, pids)), 60)


def test_it_goes_with_the_object_that_started_it() -> None:
    decoding = DecodingProcess(small_bytes=0)
    _read(decoding)
    pid = _pid(decoding)
    del decoding
    gc.collect()
    wait_until(lambda: not is_alive(pid), 60)  # the thread that decoded may be the last to drop the object


def test_shared_memory_holds_smaller_and_larger_contents_than_before() -> None:
    memory = SharedMemory.create()
    reader = SharedMemory(os.dup(memory.descriptor))  # as the other process has it
    contents = [[b"abc"], [b"", b"12"], [b"x" * 70_000, b"", bytearray(b"y")], [b"z"], [b"0" * 100_000]]
    for buffers in contents:
        memory.write(buffers)
        sizes = list(map(len, buffers))
        assert reader.read(sizes) == reader.view(sizes) == buffers
    with pytest.raises(EOFError):
        reader.read([100_001])


@pytest.mark.parametrize("behind", [(b"", LARGE, b""), (LARGE, b"", 2 * LARGE)])
def test_reply_has_no_bytes_of_a_longer_earlier_one(behind: tuple[bytes, ...]) -> None:
    decoding = DecodingProcess(small_bytes=0)
    names = ("topk_and_routes", "stop", "plain")
    for name, rest in zip(names, behind, strict=True):
        there = asyncio.run(_reply(decoding, name, rest))
        here = asyncio.run(_reply(DecodingProcess(small_bytes=1 << 30), name, rest))
        assert there.tokens.tolist() == here.tokens.tolist()
        assert there.log_probs.tolist() == here.log_probs.tolist()


def test_neither_a_lost_process_nor_one_that_ends_keeps_descriptors() -> None:
    gc.collect()  # garbage of earlier tests
    descriptors = psutil.Process().num_fds()
    decoding = DecodingProcess(small_bytes=0)
    for _ in range(2):
        _read(decoding)
        child = psutil.Process(_pid(decoding))
        child.kill()
        child.wait(60)
    del decoding
    gc.collect()
    wait_until(lambda: psutil.Process().num_fds() == descriptors, 60)


def test_small_replies_start_no_process_and_its_program_needs_no_tensor_library() -> None:
    decoding = DecodingProcess()
    _read(decoding)
    assert decoding._child is None
    imports = "import sys, megatron_dppo.engines.sglang.decoding_process as worker; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", imports], capture_output=True, text=True, check=True)
    assert {"numpy", "megatron_dppo.engines.sglang.replies"} <= set(done.stdout.split())
    assert {"torch", "transformers", "pydantic", "aiohttp"}.isdisjoint(done.stdout.split())
