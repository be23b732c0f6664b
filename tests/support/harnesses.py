"""Harnesses of tests, for workers: clients of the wire format, without a client library.

Named in a config as "tests.support.harnesses:<name>".
"""

import asyncio
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from megatron_dppo.agents import AgentOutcome
from megatron_dppo.types import Prompt

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def post(base_url: str, key: str, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
    """Return the status and the body of a reply."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"} | headers
    request = urllib.request.Request(f"{base_url}{path}", content, sent)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=100) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def chat(base_url: str, key: str, messages: list[Any], **options: Any) -> dict[str, Any]:
    """Return the message of a reply.

    Raises:
        RuntimeError: The call is refused.
    """
    status, reply = post(base_url, key, "/chat/completions", {"messages": messages} | options)
    if status != 200:
        raise RuntimeError(f"status {status}: {reply.decode()}")
    return json.loads(reply)["choices"][0]["message"]


async def scripted(task: Prompt, base_url: str, api_key: str, workdir: Path) -> AgentOutcome:
    """The conversation of `tests.unit.test_multi_turn.Scripted`: three responses, rewarded by their words."""
    messages: list[Any] = list(task.messages or [{"role": "user", "content": task.text}])
    reward = 0.0
    for says in ("t1 t2", "t3", None):
        said = chat(base_url, api_key, messages)
        reward += len(said["content"].split())
        messages += [said, {"role": "user", "content": says}]
    return AgentOutcome(reward, {"turns": 3.0})


async def stopping(task: Prompt, base_url: str, api_key: str, workdir: Path) -> float:
    """Three responses, sampled with the options in the prompt's answer (JSON)."""
    messages: list[Any] = list(task.messages or [])
    for says in ("t1 t2", "t3", None):
        said = chat(base_url, api_key, messages, **json.loads(task.answer))
        messages += [said, {"role": "user", "content": says}]
    return 1.0


async def forking(task: Prompt, base_url: str, api_key: str, workdir: Path) -> AgentOutcome:
    """Two calls in parallel, a second turn after each, a branch, another root, and a retry."""
    first = [{"role": "user", "content": "t5"}]
    both = await asyncio.gather(*(asyncio.to_thread(chat, base_url, api_key, first) for _ in range(2)))
    for said in both:
        chat(base_url, api_key, [*first, said, {"role": "user", "content": "t1"}])
    chat(base_url, api_key, [*first, both[0], {"role": "user", "content": "t2 t3"}], max_tokens=2)
    body = json.dumps({"messages": [{"role": "user", "content": "t9"}]}).encode()
    replies = {post(base_url, api_key, "/chat/completions", body)[1]}
    replies |= {
        post(base_url, api_key, "/chat/completions", body, **{"x-stainless-retry-count": str(n)})[1]
        for n in (1, 2)
    }
    return AgentOutcome(0.5, {"replies": float(len(replies))})


async def misbehaving(task: Prompt, base_url: str, api_key: str, workdir: Path) -> float | None:
    """Fail in the way that the prompt's answer names, after one call or none."""
    kind = task.answer
    if kind != "silent":
        chat(base_url, api_key, [{"role": "user", "content": "t5"}])
    if kind == "leaves":  # with a call in flight
        arguments = (base_url, api_key, [{"role": "user", "content": "t6"}])
        threading.Thread(target=chat, args=arguments, daemon=True).start()
    if kind == "raises":
        raise ValueError("no reason")
    if kind == "hangs":
        time.sleep(1000)
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "words":
        return "many"  # type: ignore[return-value]
    if kind == "endless":
        while True:
            chat(base_url, api_key, [{"role": "user", "content": "t5"}])
    return 1.0


async def posting(task: Prompt, base_url: str, api_key: str, workdir: Path) -> None:
    """Post the reward, and write down the episode's URL and key, to try the key after the end."""
    chat(base_url, api_key, [{"role": "user", "content": "t5"}])
    refused = post(base_url, api_key, "/reward", {"reward": "nan"})[0]
    assert refused == 400, refused
    assert post(base_url, api_key, "/reward", {"reward": 0.25, "info": {"seen": 3}})[0] == 200
    Path(task.answer).write_text(json.dumps([base_url, api_key]))


async def adding(task: Prompt, base_url: str, api_key: str, workdir: Path) -> float:
    """Ask for a sum, give the result of each tool call, and reward a second response that repeats it."""
    messages: list[Any] = list(task.messages or [{"role": "user", "content": task.text}])
    said = chat(base_url, api_key, messages, tools=[ADD])
    calls = said.get("tool_calls") or [{"id": "call_none"}]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": task.answer} for call in calls]
    final = chat(base_url, api_key, [*messages, said, *results], tools=[ADD])
    return float(task.answer in (final["content"] or ""))


async def branching(task: Prompt, base_url: str, api_key: str, workdir: Path) -> float:
    """Give two results of one tool call, each with a response, and ask for a title."""
    messages: list[Any] = list(task.messages or [{"role": "user", "content": task.text}])
    said = chat(base_url, api_key, messages, tools=[ADD])
    chat(base_url, api_key, messages)
    finals = [
        chat(base_url, api_key, [*messages, said, {"role": "user", "content": result}], tools=[ADD])
        for result in (task.answer, "3")
    ]
    return float(sum(task.answer in (final["content"] or "") for final in finals))


async def branching_unscored(task: Prompt, base_url: str, api_key: str, workdir: Path) -> None:
    """Give two results of one tool call, each with a response, and ask for a title of another text."""
    messages: list[Any] = list(task.messages or [{"role": "user", "content": task.text}])
    said = chat(base_url, api_key, messages, tools=[ADD])
    chat(base_url, api_key, [{"role": "user", "content": "0 0"}])
    for result in (task.answer, "3 3"):
        chat(base_url, api_key, [*messages, said, {"role": "user", "content": result}], tools=[ADD])


def not_asynchronous(task: Prompt, base_url: str, api_key: str, workdir: Path) -> float:
    """No `async def`."""
    return 1.0
