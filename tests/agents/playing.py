"""Plays an episode of a harness with scripted responses, and checks its calls and tokens."""

import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_dppo.agents.agents import Agents
from megatron_dppo.agents.tree import Trees
from megatron_dppo.config.rollout import AgentConfig, RolloutConfig
from megatron_dppo.config.sections import DataConfig
from megatron_dppo.engines.base import Request, SamplingParams, mask_of
from megatron_dppo.environments import Episode
from megatron_dppo.runtime.concurrency import run_loop
from megatron_dppo.types import CallKind, Prompt, Sample
from tests.support.byte_tokenizers import tools_tokenizer
from tests.support.scripted_policy import ScriptedPolicy

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/agents.md"
END = "<|im_end|>"
THOUGHT = "<think>\nwell\n</think>\n\n"
WITHOUT_TOOLS = "In short."  # the response to a chat without tools, such as a title or a summary
CONTINUED: tuple[CallKind, ...] = ("first", "continues")


def call(name: str, arguments: str) -> str:
    """Return a response with a tool call."""
    return f'I do it.\n<tool_call>\n{{"name":  "{name}", "arguments": {arguments}}}\n</tool_call>'


def tool_result(pattern: str) -> str:
    """Return a pattern of the text between a response with a tool call and the next response."""
    begin, end = (re.escape(text) for text in ("\n<|im_start|>tool\n", f"{END}\n<|im_start|>assistant\n"))
    return f"{begin}{pattern}{end}"


@dataclass(frozen=True)
class Harness:
    """A harness, the policy's responses, and the expected episode.

    Attributes:
        packages: The harness and its client.
        what: Protocol, and which agent of the harness.
        texts: Responses in the order of the calls, without those to chats without tools if there are both.
        between: Patterns of the text before each response that continues another one.
        trained: Text of each sample that trains.
        is_parallel: Whether a call without tools is made at the same time, so that the order is not fixed.
    """

    packages: tuple[str, ...]
    what: str
    command: tuple[str, ...]
    texts: tuple[str, ...]
    kinds: tuple[CallKind, ...]
    between: tuple[str, ...]
    trained: tuple[str, ...]
    train: Trees = "main"
    is_parallel: bool = False
    max_response_tokens: int = 40_000
    prompt_id: str = "0"

    @property
    def name(self) -> str:
        """Name of the test."""
        return f"{self.packages[0]} {self.what}"

    @property
    def num_without_tools(self) -> int:
        """Number of calls without tools, if others have some."""
        return len(self.kinds) - len(self.texts)


class Policy(ScriptedPolicy):
    """Answers by script if a chat has tools, else with `WITHOUT_TOOLS`."""

    async def ask(self, request: Request, params: SamplingParams) -> Sample:
        if not self.tokenizer.decode(request.prompt_tokens).startswith("<|im_start|>tool"):
            self.texts.insert(0, WITHOUT_TOOLS)
        return await super().ask(request, params)


def check_episode(harness: Harness, command: tuple[str, ...], pins: Mapping[str, str]) -> Episode:
    """Play an episode; compare its calls, its tokens and its row in the reference with what is expected."""
    scripted = Policy if harness.num_without_tools else ScriptedPolicy
    policy = scripted(tools_tokenizer(), *harness.texts)
    completion = episode_of(harness, command, policy)
    episode, parts = completion.episode, (completion, *completion.branches)
    assert episode is not None and episode.fault is None, episode and episode.fault
    assert not policy.texts and len(policy.asked) == len(episode.calls)
    order = sorted if harness.is_parallel else tuple
    assert order(call.kind for call in episode.calls) == order(harness.kinds)
    continued = [number for number, call in enumerate(episode.calls) if call.parent is not None]
    assert episode.num_forks == len(harness.kinds) - 1 - len(continued)
    for number, pattern in zip(continued, harness.between, strict=True):
        parent = episode.calls[number].parent
        assert parent is not None
        first = episode.calls[parent].response
        before = f"{policy.input_of(parent)}{first}{'' if '</code>' in first else END}"
        head, between = policy.input_of(number)[: len(before)], policy.input_of(number)[len(before) :]
        assert head == before
        assert re.fullmatch(pattern, between, re.DOTALL), between
    trained = [part.tokens[mask_of(part)].tolist() for part in parts]
    assert trained == [policy.ids(text) for text in harness.trained]
    for part in parts:
        log_probs = torch.where(mask_of(part), part.tokens / -100, 0)
        assert torch.equal(part.log_probs * mask_of(part), log_probs)
    texts = [*harness.texts, *[WITHOUT_TOOLS] * harness.num_without_tools]
    num_sampled = sum(len(policy.ids(text + END)) for text in texts)
    assert episode.num_untrained_tokens == num_sampled - sum(map(len, trained))
    num_trained = sum(call.is_trained for call in episode.calls)
    assert row_of(harness, pins, episode.num_forks, num_trained) in PAGE.read_text("utf-8").splitlines()
    return episode


def episode_of(harness: Harness, command: tuple[str, ...], policy: ScriptedPolicy) -> Sample:
    """Play one episode."""
    agent = AgentConfig(command=command, call_timeout_s=300.0, train=harness.train)
    prompt = Prompt(harness.prompt_id, "5", "test", messages=({"role": "user", "content": "What is 2 + 3?"},))
    request = Request("0", (), (0, 0, 0), prompt=prompt, is_chat=True)
    params = SamplingParams(harness.max_response_tokens)
    data = DataConfig(reward="x", max_prompt_tokens=150_000)
    with closing(Agents(RolloutConfig(agent=agent), data)) as agents:
        return run_loop(agents.converse(policy.tokenizer)(request, params, policy.ask))


def row_of(harness: Harness, pins: Mapping[str, str], num_forks: int, num_trained: int) -> str:
    """Return the harness's row in the reference's table."""
    versions = ", ".join(f"{name} {pins[name]}" for name in harness.packages)
    kinds = ", ".join(f"`{kind}`" for kind in harness.kinds)
    return f"| {versions} | {harness.what} | {kinds} | {num_forks} | {num_trained} of {len(harness.kinds)} |"
