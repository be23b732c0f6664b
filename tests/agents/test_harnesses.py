"""Agents that somebody else wrote play a task with a tool; the policy's responses are scripted."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from megatron_dppo.agents.tree import Trees
from tests.agents.playing import CONTINUED, END, THOUGHT, Harness, call, check_episode, tool_result
from tools.versions import read_pins

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "agents"
PYTHON = os.environ.get("AGENTS_PYTHON", str(ROOT / ".venv-agents" / "bin" / "python"))
PINS = read_pins(FOLDER / "requirements.txt")

ADD = call("add", '{"a":  2, "b": 3}')  # no template writes two spaces
SHELL = call("bash", '{"command":  "echo $((2 + 3))"}')
SUBMIT = call("bash", '{"command": "printf \'COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\\\\nIt is 5.\'"}')
FINISH = call("final_answer", '{"answer": 5}')
CODE, FINISH_CODE = "I do it.\n<code>\nprint(add(2, 3))\n</code>", "<code>\nfinal_answer(5)\n</code>"
FUNCTION = "{'name': 'python_interpreter', 'arguments': 'print(add(2, 3))'}"
CALLED = f"[{{'id': 'call_1', 'type': 'function', 'function': {FUNCTION}}}]"
OBSERVED = "Observation:\nExecution logs:\n5\nLast output from code snippet:\nNone"


def adding(packages: tuple[str, ...], what: str, *command: str) -> Harness:
    """A harness that sends the response with a tool call again as it got it."""
    trained = f"{THOUGHT}{ADD}{END}It is 5.{END}"
    return Harness(
        packages, what, command, (THOUGHT + ADD, "It is 5."), CONTINUED, (tool_result("5"),), (trained,)
    )


def calling_tools(what: str, trained: tuple[str, ...], train: Trees) -> Harness:
    """An agent that writes its tool calls as text when it sends them again."""
    command, texts = ("smolagents_tools.py", "ToolCallingAgent"), (THOUGHT + ADD, FINISH)
    return Harness(("smolagents", "openai"), what, command, texts, ("first", "edited"), (), trained, train)


HARNESSES = (
    adding(("openai-agents", "openai"), "chat", "openai_agents.py", "chat_completions"),
    adding(("openai-agents", "openai"), "responses", "openai_agents.py", "responses"),
    adding(("langgraph", "langchain-openai"), "chat", "langgraph_tools.py"),
    adding(("pydantic-ai-slim", "openai"), "chat", "pydantic_agents.py", "openai-chat:policy"),
    adding(("pydantic-ai-slim", "anthropic"), "messages", "pydantic_agents.py", "anthropic:policy"),
    Harness(
        ("mini-swe-agent", "litellm"),
        "chat",
        ("mini_swe_agent.py",),
        (THOUGHT + SHELL, SUBMIT),
        CONTINUED,
        (tool_result(re.escape('{\n  "returncode": 0,\n  "output": "5\\n"\n}')),),
        (f"{THOUGHT}{SHELL}{END}{SUBMIT}{END}",),
    ),
    Harness(
        ("smolagents", "openai"),
        "chat, `CodeAgent`",
        ("smolagents_tools.py", "CodeAgent"),
        (f"{THOUGHT}{CODE}\nObservation: 6", FINISH_CODE),
        CONTINUED,
        (
            re.escape(
                f"\nCalling tools:\n{CALLED}{END}\n<|im_start|>user\n{OBSERVED}{END}\n<|im_start|>assistant\n"
            ),
        ),
        (f"{THOUGHT}{CODE}{FINISH_CODE}",),
    ),
    calling_tools("chat, `ToolCallingAgent`", (f"{THOUGHT}{ADD}{END}",), "main"),
    calling_tools(
        'chat, `ToolCallingAgent`, `train = "tools"`', (f"{THOUGHT}{ADD}{END}", f"{FINISH}{END}"), "tools"
    ),
)


def test_the_environment_has_the_pinned_versions() -> None:
    read = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    found = subprocess.run([PYTHON, "-c", read], capture_output=True, text=True, check=True).stdout.split()
    assert {f"{name}=={version}" for name, version in PINS.items()} <= set(found)


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda each: each.name)
def test_an_episode_has_the_expected_calls_and_exact_tokens(harness: Harness) -> None:
    program, *arguments = harness.command
    command = (PYTHON, str(FOLDER / "harnesses" / program), "{prompt}", *arguments)
    check_episode(harness, command, PINS)
