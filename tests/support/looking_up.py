"""The task of the guide "Train your agent", with the client `openai`: look a digit up, and repeat it."""

import json
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from megatron_dppo.types import Prompt

KEY = {"type": "object", "properties": {"key": {"type": "integer"}}, "required": ["key"]}
LOOK_UP = {"name": "look_up", "description": "Return the digit of a key.", "parameters": KEY}
TOOLS: Any = [{"type": "function", "function": LOOK_UP}]


async def run(task: Prompt, base_url: str, api_key: str, workdir: Path) -> float:
    """Reward a call with the prompt's key by 0.5, and then a response that begins with the result by 1."""
    messages: list[Any] = list(task.messages or ())
    key, digit = messages[-1]["content"], task.answer
    plain = DefaultAsyncHttpxClient(verify=False)  # certificates take most of an episode's time
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=plain) as client:
        create = client.chat.completions.create
        said = (await create(model="policy", messages=messages, tools=TOOLS)).choices[0].message
        calls: Any = said.tool_calls or []
        if [str(json.loads(call.function.arguments)["key"]) for call in calls][:1] != [key]:
            return 0.0
        results = [{"role": "tool", "tool_call_id": call.id, "content": digit} for call in calls]
        messages += [said, *results]
        final = await create(model="policy", messages=messages, tools=TOOLS)
    return 1.0 if (final.choices[0].message.content or "").split()[:1] == [digit] else 0.5
