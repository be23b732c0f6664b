"""The messages and the responses of an episode as trees, and the conversations of it that train.

A node is one response. Its completion has all tokens after the root's prompt, with log-probs, Top-K, routes and
weight versions as the engine returned them. It shares them with its parent: see `engines.growth`. The memory of
an episode grows with its tokens and messages, not with their product with its calls.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch

from megatron_dppo.agents.chat import ChatMessage
from megatron_dppo.engines.base import Request
from megatron_dppo.types import AgentCall, CallKind, RolloutTopK, Sample

Trees = Literal["main", "tools", "all"]
"""Which trees of an episode train."""


def canonical(message: ChatMessage) -> str:
    """Return what clients keep of a message when they send it again: not ids, reasoning or outer spaces."""
    calls = [_with_whole_numbers(call["function"]) for call in message.get("tool_calls", ())]
    kept = [message["role"], message["content"].strip(), message.get("name") or "", calls]
    return json.dumps(kept, sort_keys=True)


def is_same(message: ChatMessage, other: ChatMessage) -> bool:
    """Return whether two messages are one object, or equal in canonical form without calls."""
    if message is other:
        return True
    if message.get("tool_calls") or other.get("tool_calls") or message["content"] != other["content"]:
        return False
    return (message["role"], message.get("name")) == (other["role"], other.get("name"))


def _with_whole_numbers(value: Any) -> Any:
    """Return a JSON value with 2.0 as 2: JavaScript's clients write it so."""
    if isinstance(value, dict):
        return {key: _with_whole_numbers(each) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_with_whole_numbers(each) for each in cast("list[Any]", value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def with_call_ids(message: ChatMessage, ids: Mapping[str, str]) -> ChatMessage:
    """Return a message with other ids of tool calls.

    Args:
        message: A client's message.
        ids: New ids by those that replies in the format of chats have.
    """
    if "tool_calls" not in message and "tool_call_id" not in message:
        return message
    calls = [call | {"id": _renamed(call.get("id"), ids)} for call in message.get("tool_calls", ())]
    result = {"tool_call_id": _renamed(message["tool_call_id"], ids)} if "tool_call_id" in message else {}
    return message | ({"tool_calls": calls} if calls else {}) | result


def _renamed(found: Any, ids: Mapping[str, str]) -> Any:
    return ids.get(str(found).replace("toolu_", "call_"), found)


@dataclass(eq=False)
class Said:
    """A message of an episode, after the messages before it. Calls that begin alike share these."""

    message: ChatMessage = field(default_factory=ChatMessage)  # as it came first
    number: int = 0  # of messages up to this one; 0 before the first message
    responses: "list[Node]" = field(default_factory=list["Node"])  # that this message is
    has_stops: bool = False  # whether a client's stop string ended a response

    def __post_init__(self) -> None:
        self._next = dict[str, Said]()  # by canonical form
        self._latest: Said | None = None

    def add(self, message: ChatMessage) -> "Said":
        """Return the node of the next message: the existing one, or a new one."""
        found = self._find(message)
        if found is None:
            found = self._next[canonical(message)] = Said(message, self.number + 1)
        self._latest = found
        return found

    def follow(self, messages: Sequence[ChatMessage]) -> "list[Said]":
        """Return this and the messages after it that are the first ones of a chat."""
        path: list[Said] = [self]
        for message in messages:
            found = path[-1]._find(message)
            if found is None:
                break
            path.append(found)
        return path

    @property
    def answers(self) -> "list[Node]":
        """The responses to the messages up to this one."""
        return [node for each in self._next.values() for node in each.responses]

    def extended(self, message: ChatMessage) -> "list[Node]":
        """Return the responses after this message that a client sends with their stop string or more."""
        return [node for node in self.answers if node.addition(message) is not None]

    def _find(self, message: ChatMessage) -> "Said | None":
        if self._latest is not None and is_same(self._latest.message, message):
            return self._latest
        return self._next.get(canonical(message))


@dataclass(eq=False)
class Node:
    """One response, at the end of the path from its root."""

    number: int
    kind: CallKind
    parent: "Node | None"
    request: Request  # with the root's prompt
    completion: Sample  # of the path, whose rows it shares with its parent and children
    said: Said  # the response as a message
    tools: tuple[Mapping[str, Any], ...]
    text: str  # of the response
    start: int  # tokens of the path before the response
    stop: str | None = None  # the client's string that ended the response
    num_dropped: int = 0  # tokens that were sampled after it

    @property
    def path(self) -> list["Node"]:
        """The nodes from the root to this one."""
        nodes: list[Node] = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]

    @property
    def num_own(self) -> int:
        """Number of sampled tokens of the response."""
        return self.completion.tokens.numel() - self.start

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens of the path."""
        return int(self.completion.loss_mask.sum())

    def share_rows(self) -> None:
        """Free the memory of this path's earlier nodes whose rows this one has too."""
        last = self.parent and _memory_of(self.parent.completion)
        if last != _memory_of(self.completion):
            for node in self.path[:-1]:
                node.completion = sharing_rows(node.completion, self.completion)

    def addition(self, sent: ChatMessage) -> str | None:
        """Return what a client added after the response's stop string, or None if it sends something else."""
        response = self.said.message
        if self.stop is None or canonical(sent | {"content": response["content"]}) != canonical(response):
            return None
        whole, text = (response["content"] + self.stop).lstrip(), sent["content"].lstrip()
        return text.removeprefix(whole).rstrip() if text.startswith(whole) else None

    def call(self, *, is_trained: bool) -> AgentCall:
        """Return the record of the call."""
        return AgentCall(
            self.kind,
            self.parent and self.parent.number,
            len(self.request.prompt_tokens) + self.start,
            self.num_own,
            is_trained,
            self.text,
        )


def _memory_of(completion: Sample) -> tuple[int, ...]:
    """Return the addresses of the memory of a completion's rows."""
    topk, routes = completion.topk, completion.routed_experts
    rows = [completion.tokens, completion.rollout_log_probs]
    rows += [] if topk is None else [topk.ids, topk.log_probs]
    rows += [] if routes is None else [routes.indices]
    return tuple(each.untyped_storage().data_ptr() for each in rows)


def sharing_rows(response: Sample, longer: Sample) -> Sample:
    """Return a response with the memory of a longer one that begins with it, so that its own can be freed."""
    topk, routes, num_tokens = response.topk, response.routed_experts, response.tokens.numel()
    if topk is not None and longer.topk is not None:
        topk = RolloutTopK(longer.topk.ids[:num_tokens], longer.topk.log_probs[:num_tokens])
    if routes is not None and longer.routed_experts is not None:
        indices = longer.routed_experts.indices[: routes.indices.shape[0]]
        routes = replace(routes, indices=indices)
    return replace(
        response,
        tokens=longer.tokens[:num_tokens],
        rollout_log_probs=longer.rollout_log_probs[:num_tokens],
        topk=topk,
        routed_experts=routes,
        loss_mask=longer.loss_mask[:num_tokens],
    )


def leaves_of(nodes: Sequence[Node], train: Trees) -> list[Node]:
    """Return the ends of the conversations that train, in order."""
    trees: dict[tuple[Any, ...], list[Node]] = {}  # by the first prompt
    for node in nodes:
        tools = json.dumps(node.tools, sort_keys=True)
        trees.setdefault((node.request.prompt_tokens, tools), []).append(node)
    with_tools = [tree for tree in trees.values() if tree[0].tools]
    chosen = with_tools or list(trees.values())
    if train == "main":
        chosen = sorted(chosen, key=lambda tree: -sum(node.num_own for node in tree))[:1]
    elif train == "all":
        chosen = list(trees.values())
    inner = {node.parent.number for node in nodes if node.parent is not None}
    return [node for tree in chosen for node in tree if node.number not in inner]


def conversation(leaf: Node, done: set[int]) -> Sample:
    """Return the path to a leaf, in which responses that are `done` are context; adds the others to it."""
    mask = torch.zeros(leaf.completion.tokens.numel(), dtype=torch.bool)
    for node in leaf.path:
        if node.number not in done:
            mask[node.start : node.start + node.num_own] = True
    done.update(node.number for node in leaf.path)
    return replace(leaf.completion, prompt_tokens=leaf.request.prompt_tokens, loss_mask=mask)


def num_forks_of(nodes: Sequence[Node]) -> int:
    """Return the number of nodes that are not their parent's first child, or not the first root."""
    return len(nodes) - len({node.parent and node.parent.number for node in nodes})
