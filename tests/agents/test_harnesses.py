"""Agents that somebody else wrote play a task with a tool; the policy's responses are scripted."""

import os
import subprocess
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron_dppo.agents.agents import Agents
from megatron_dppo.agents.tree import Trees
from megatron_dppo.config.schema import AgentConfig, RolloutConfig
from megatron_dppo.config.sections import DataConfig
from megatron_dppo.engines.base import Completion, Request, SamplingParams, mask_of
from megatron_dppo.runtime.concurrency import run_loop
from megatron_dppo.types import CallKind, Prompt
from tests.support.byte_tokenizers import tools_tokenizer
from tests.support.scripted_policy import ScriptedPolicy
from tools.versions import read_pins

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "agents"
README = ROOT / "megatron_dppo" / "agents" / "README.md"
PYTHON = os.environ.get("AGENTS_PYTHON", str(ROOT / ".venv-agents" / "bin" / "python"))
PINS = read_pins(FOLDER / "requirements.txt")
END = "<|im_end|>"
THOUGHT = "<think>\nwell\n</think>\n\n"


def call(name: str, arguments: str) -> str:
    return f'I do it.\n<tool_call>\n{{"name":  "{name}", "arguments": {arguments}}}\n</tool_call>'


ADD = call("add", '{"a":  2, "b": 3}')  # no template writes two spaces
SHELL = call("bash", '{"command":  "echo $((2 + 3))"}')
SUBMIT = call("bash", '{"command": "printf \'COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\\\\nIt is 5.\'"}')
FINISH = call("final_answer", '{"answer": 5}')
CODE, FINISH_CODE = "I do it.\n<code>\nprint(add(2, 3))\n</code>", "<code>\nfinal_answer(5)\n</code>"
FUNCTION = "{'name': 'python_interpreter', 'arguments': 'print(add(2, 3))'}"
CALLED = f"[{{'id': 'call_1', 'type': 'function', 'function': {FUNCTION}}}]"
OBSERVED = "Observation:\nExecution logs:\n5\nLast output from code snippet:\nNone"


def tool_result(text: str) -> str:
    """What the chat template writes between a response with a tool call and the next response."""
    return f"\n<|im_start|>tool\n{text}{END}\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Harness:
    """A harness, the policy's responses, and what is expected of its episode.

    Attributes:
        packages: The harness and its client.
        what: Protocol, and which agent of the harness.
        between: Text between the first response and the next one; None if that begins a new conversation.
        trained: Text of each sample that trains.
    """

    packages: tuple[str, ...]
    what: str
    command: tuple[str, ...]
    texts: tuple[str, ...]
    kinds: tuple[CallKind, ...]
    between: str | None
    trained: tuple[str, ...]
    train: Trees = "main"

    @property
    def name(self) -> str:
        return f"{self.packages[0]} {self.what}"


CONTINUED: tuple[CallKind, ...] = ("first", "continues")


def adding(packages: tuple[str, ...], what: str, *command: str) -> Harness:
    """A harness that sends the response with a tool call again as it got it."""
    trained = f"{THOUGHT}{ADD}{END}It is 5.{END}"
    return Harness(
        packages, what, command, (THOUGHT + ADD, "It is 5."), CONTINUED, tool_result("5"), (trained,)
    )


def calling_tools(what: str, trained: tuple[str, ...], train: Trees) -> Harness:
    """An agent that writes its tool calls as text when it sends them again."""
    command, texts = ("smolagents_tools.py", "ToolCallingAgent"), (THOUGHT + ADD, FINISH)
    return Harness(("smolagents", "openai"), what, command, texts, ("first", "edited"), None, trained, train)


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
        tool_result('{\n  "returncode": 0,\n  "output": "5\\n"\n}'),
        (f"{THOUGHT}{SHELL}{END}{SUBMIT}{END}",),
    ),
    Harness(
        ("smolagents", "openai"),
        "chat, `CodeAgent`",
        ("smolagents_tools.py", "CodeAgent"),
        (f"{THOUGHT}{CODE}\nObservation: 6", FINISH_CODE),
        CONTINUED,
        f"\nCalling tools:\n{CALLED}{END}\n<|im_start|>user\n{OBSERVED}{END}\n<|im_start|>assistant\n",
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
    policy = ScriptedPolicy(tools_tokenizer(), *harness.texts)
    completion = episode_of(harness, policy)
    episode, parts = completion.episode, (completion, *completion.branches)
    assert episode is not None and episode.fault is None, episode and episode.fault
    assert not policy.texts and len(policy.asked) == len(harness.texts)
    assert tuple(call.kind for call in episode.calls) == harness.kinds
    is_forked = harness.between is None
    assert episode.num_forks == is_forked
    if not is_forked:
        first = episode.calls[0].response
        ending = "" if "</code>" in first else END
        assert policy.input_of(1) == f"{policy.input_of(0)}{first}{ending}{harness.between}"
    trained = [part.tokens[mask_of(part)].tolist() for part in parts]
    assert trained == [policy.ids(text) for text in harness.trained]
    for part in parts:
        log_probs = torch.where(mask_of(part), part.tokens / -100, 0)
        assert torch.equal(part.log_probs * mask_of(part), log_probs)
    num_sampled = sum(len(policy.ids(text + END)) for text in harness.texts)
    assert episode.num_untrained_tokens == num_sampled - sum(map(len, trained))
    num_trained = sum(call.is_trained for call in episode.calls)
    assert row_of(harness, episode.num_forks, num_trained) in README.read_text("utf-8").splitlines()


def episode_of(harness: Harness, policy: ScriptedPolicy) -> Completion:
    program, *arguments = harness.command
    command = (PYTHON, str(FOLDER / "harnesses" / program), "{prompt}", *arguments)
    agent = AgentConfig(command=command, call_timeout_s=300.0, train=harness.train)
    prompt = Prompt("0", "5", "test", messages=({"role": "user", "content": "What is 2 + 3?"},))
    request, params = Request("0", (), (0, 0, 0), prompt=prompt, is_chat=True), SamplingParams(20_000)
    data = DataConfig(reward="x", max_prompt_tokens=30_000)
    with closing(Agents(RolloutConfig(agent=agent), data)) as agents:
        return run_loop(agents.converse(policy.tokenizer)(request, params, policy.ask))


def row_of(harness: Harness, num_forks: int, num_trained: int) -> str:
    """The harness's row in the README's table."""
    versions = ", ".join(f"{name} {PINS[name]}" for name in harness.packages)
    kinds = ", ".join(f"`{kind}`" for kind in harness.kinds)
    return f"| {versions} | {harness.what} | {kinds} | {num_forks} | {num_trained} of {len(harness.kinds)} |"
