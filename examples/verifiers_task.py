"""Plays a task of a `verifiers` environment as rollout.agent.command: see guides/train_your_agent.md.

python verifiers_task.py prompts ENVIRONMENT >prompts.jsonl
python verifiers_task.py play ENVIRONMENT TASK.JSON
"""

# pyright: basic, reportMissingImports=false

import asyncio
import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import SubprocessRuntime
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

prepare_by_uv = SubprocessRuntime.prepare_uv_script


async def prepare(self: SubprocessRuntime, script: str, *arguments: Any, **options: Any) -> list[str]:
    """Run the chat program with this Python. It needs no more libraries, and `uv` asks PyPI in each episode."""
    if script != CHAT_PROGRAM_SOURCE:
        return await prepare_by_uv(self, script, *arguments, **options)
    await self.write("chat.py", script.encode())
    return [sys.executable, "chat.py"]


def load(environment: str) -> vf.Env:
    """Return the environment of an installed package; its agent has a chat and the environment's tools."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    return load_environment(resolve_env_config({"taskset": {"id": environment}, "agent": agent}))


def write_prompts(environment: str) -> None:
    """Print a row for each task; its id is the task's position."""
    for place, task in enumerate(load(environment).taskset):
        prompt = [{"role": "user", "content": task.data.prompt_text or "The environment asks."}]
        print(json.dumps({"id": str(place), "prompt": prompt}))


async def play(environment: str, place: int) -> vf.Episode:
    """Play one task with the policy."""
    env = load(environment)
    (slot,) = env.slots(next(islice(env.taskset, place, None)))
    policy = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        return await env.run_slot(slot, vf.ModelContext("policy", policy))


def post(trace: vf.Trace) -> None:
    """Send the reward, and its parts and the metrics by name."""
    rewards = {name: each.score for name, each in trace.rewards.items() if each is not None}
    body = json.dumps({"reward": trace.reward, "info": rewards | dict(trace.metrics)}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = Request(f"{os.environ['OPENAI_BASE_URL']}/reward", body, headers)
    build_opener(ProxyHandler({})).open(request).close()


if __name__ == "__main__":
    command, name, *words = sys.argv[1:]
    SubprocessRuntime.prepare_uv_script = prepare
    if command == "prompts":
        write_prompts(name)
    else:
        (task_file,) = words
        episode = asyncio.run(play(name, int(json.loads(Path(task_file).read_text())["id"])))
        if not episode.ok or len(episode.traces) != 1:
            errors = [*episode.errors, *(error for each in episode.traces for error in each.errors)]
            sys.exit(f"found {len(episode.traces)} agents and the errors {errors}; expected one agent and none")
        post(episode.traces[0])
