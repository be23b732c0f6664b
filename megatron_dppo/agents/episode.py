"""One episode: its calls, their parents, its limits and its clock.

All of it belongs to the sampler's event loop.
"""

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from megatron_dppo.agents.chat import Chat, RefusedError, Reply, parse_response
from megatron_dppo.agents.harness import AgentOutcome
from megatron_dppo.agents.rendering import Rendering
from megatron_dppo.agents.tree import Node, Said, Trees, conversation, leaves_of, num_forks_of, with_call_ids
from megatron_dppo.engines.base import (
    KEYS_APART,
    Ask,
    Request,
    SamplingParams,
    give_up,
    input_tokens,
    num_tokens_before,
    shortened,
    with_observation,
)
from megatron_dppo.engines.growth import TokenIds
from megatron_dppo.environments import Episode as EpisodeResult
from megatron_dppo.errors import DataError
from megatron_dppo.types import CallKind, Sample

_WHILE_CALLING_S = 1.0  # between two looks at the clock while a call is sampled


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of one episode."""

    episode_timeout_s: float
    call_timeout_s: float
    max_calls: int
    train: Trees
    max_prompt_tokens: int  # of a root
    max_turn_tokens: int | None  # of a response


@dataclass(eq=False)
class Episode:
    """An episode between its first call and its end.

    Attributes:
        ended: Set once the engine cannot go on: to the aborted completion, or to the engine's error.
    """

    request: Request  # of the group, which names the prompt
    params: SamplingParams
    ask: Ask
    rendering: Rendering
    limits: EpisodeLimits
    posted: AgentOutcome = field(default_factory=AgentOutcome)
    is_sealed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Sample] = self.loop.create_future()
        self._nodes, self._root = list[Node](), Said()
        self._tools = list[tuple[Mapping[str, Any], ...]]()  # different ones
        self._native_ids = dict[str, str]()  # of tool calls, by the ids that clients have
        self._calls = dict[bytes, asyncio.Task[Reply]]()  # the latest call with each body
        self._tasks = set[asyncio.Task[Reply]]()
        self._turn = asyncio.Lock()  # the engine samples one call of an episode at a time
        self._read, self._unread = set[int](), set[int]()  # nodes whose replies were sent, or had no client
        self._is_cut, self._num_calling = False, 0
        self._idle_s = 0.0
        self._idle_since: float | None = None  # None before the harness runs, and while it calls
        assert self.request.prompt is not None, "requests of groups name their prompts"
        self._arguments = self.request.prompt.template_arguments or {}

    def begin(self) -> None:
        """Start the clock: the harness runs."""
        if not self._num_calling and self._idle_since is None:
            self._idle_since = time.monotonic()

    def seconds_left(self) -> float:
        """Return how long the harness may still work without a call; its calls cost no time."""
        if self._idle_since is None:
            return _WHILE_CALLING_S
        idle_s = time.monotonic() - self._idle_since
        return min(self.limits.call_timeout_s - idle_s, self.limits.episode_timeout_s - self._idle_s - idle_s)

    async def call(self, chat: Chat, body: bytes, *, is_retry: bool) -> Reply:
        """Return the next response of a chat; a retry gets the reply of the call that it repeats.

        Raises:
            RefusedError: The episode is over or at a limit, or the chat cannot be rendered or sampled.
        """
        self.require_open()
        digest = hashlib.blake2b(body).digest()
        task = self._calls.get(digest) if is_retry else None
        if task is None:
            task = self._calls[digest] = asyncio.create_task(self._call(chat))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)  # a client that disconnects does not end it
        except asyncio.CancelledError:
            self.require_open()
            raise

    def require_open(self) -> None:
        """Refuse what comes after the end.

        Raises:
            RefusedError: The episode is over.
        """
        if self.is_sealed:
            raise RefusedError(409, "this episode is over", "episode_over")

    def note(self, node: int, *, is_read: bool) -> None:
        """Note whether a reply reached its client; one that never did does not train."""
        (self._read if is_read else self._unread).add(node)

    def post(self, outcome: AgentOutcome) -> None:
        """Keep an outcome that the harness posts; RefusedError after the end."""
        self.require_open()
        self.posted = outcome

    def seal(self) -> None:
        """End the episode: nothing that comes later changes it."""
        self.is_sealed = True
        for task in self._tasks:
            task.cancel()

    async def _call(self, chat: Chat) -> Reply:
        if self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
        self._num_calling, self._idle_since = self._num_calling + 1, None
        try:
            async with self._turn:
                return await self._sample(chat)
        finally:
            self._num_calling -= 1
            if not self._num_calling:
                self._idle_since = time.monotonic()

    async def _sample(self, chat: Chat) -> Reply:
        if len(self._nodes) == self.limits.max_calls:
            raise self._cut(f"found {self.limits.max_calls} calls; expected at most rollout.agent.max_calls")
        chat = self._known(chat)
        alike = self._alike(chat)
        parent = self._parent_of(chat, alike)
        request = self._continue(parent, chat) if parent is not None else None
        kind = self._kind(chat, alike, parent, can_continue=request is not None)
        if request is None:
            parent, request = None, self._open(chat)
        params, start = self._params(chat), num_tokens_before(request)
        try:
            completion = await self.ask(request, params)
        except Exception as error:
            if not self.ended.done():
                self.ended.set_exception(error)
            raise RefusedError(500, "the engine failed", "engine_failed") from error
        if completion.finish_reason == "abort":
            if not self.ended.done():
                self.ended.set_result(completion)
            raise RefusedError(503, "the engine gave this call up", "aborted")
        return self._add(chat, alike[0][-1], kind, parent, request, completion, start)

    def _cut(self, found: str) -> RefusedError:
        """Return the refusal of a call above a limit; a harness that then fails has an episode that is cut."""
        self._is_cut = True
        return RefusedError(400, found, "context_length_exceeded")

    def _params(self, chat: Chat) -> SamplingParams:
        most = [limit for limit in (chat.max_tokens, self.limits.max_turn_tokens) if limit is not None]
        return replace(self.params, max_turn_tokens=min(most)) if most else self.params

    def _known(self, chat: Chat) -> Chat:
        """Return the chat with the ids of tool calls that the policy sampled, where its format has some."""
        messages = tuple(with_call_ids(message, self._native_ids) for message in chat.messages)
        if chat.tools not in self._tools:
            self._tools.append(chat.tools)
        return replace(chat, messages=messages, tools=self._tools[self._tools.index(chat.tools)])

    def _alike(self, chat: Chat) -> tuple[list[Said], list[Node]]:
        """Return the known messages at the beginning of the chat, and the nodes whose paths it begins with."""
        said, messages = self._root.follow(chat.messages), chat.messages
        nodes = [node for each in said for node in each.responses]
        for each in said[: len(messages)]:
            if each.has_stops:
                nodes += each.extended(messages[each.number])
        return said, nodes

    def _parent_of(self, chat: Chat, alike: tuple[list[Said], list[Node]]) -> Node | None:
        """Return the node whose path the chat continues: the longest one, preferably one that its ids name."""
        found = [
            each for each in alike[1] if each.tools is chat.tools and each.said.number < len(chat.messages)
        ]
        longest = max((node.said.number for node in found), default=0)

        def rank(node: Node) -> tuple[int, int]:
            return sum(each.number in chat.handles for each in node.path), node.number

        return max((node for node in found if node.said.number == longest), key=rank, default=None)

    def _kind(
        self, chat: Chat, alike: tuple[list[Said], list[Node]], parent: Node | None, *, can_continue: bool
    ) -> CallKind:
        """Return how a call relates to the earlier ones."""
        if not self._nodes:
            return "first"
        if parent is not None and can_continue:
            return "branch" if any(node.parent is parent for node in self._nodes) else "continues"
        if parent is not None:
            return "template"
        said, nodes = alike
        if nodes:
            return "tools"
        if len(said) > len(chat.messages) and (same := said[-1].answers):
            return "repeats" if any(node.tools is chat.tools for node in same) else "tools"
        common = chat.messages[: said[-1].number]
        return "edited" if any(message.get("role") != "system" for message in common) else "another"

    def _noise_key(self, parent: Node | None) -> tuple[int, int, int]:
        """Return the parent's noise key for its first child, and a new one for a fork."""
        seed, rollout, sample = (parent.request if parent is not None else self.request).noise_key
        is_fork = any(node.parent is parent for node in self._nodes)
        return seed, rollout, sample % KEYS_APART + KEYS_APART * len(self._nodes) if is_fork else sample

    def _opening(self, chat: Chat) -> tuple[int, ...]:
        try:
            return self.rendering.opening(chat.messages, chat.tools, self._arguments)
        except DataError as error:
            raise RefusedError(400, str(error)) from error

    def _open(self, chat: Chat) -> Request:
        tokens = self._opening(chat)
        if len(tokens) > self.limits.max_prompt_tokens:
            found, most = f"found a prompt of {len(tokens)} tokens", self.limits.max_prompt_tokens
            raise self._cut(f"{found}; expected at most data.max_prompt_tokens = {most}")
        return replace(self.request, prompt_tokens=tokens, noise_key=self._noise_key(None))

    def _between(self, parent: Node, chat: Chat) -> Tensor | None:
        """Return the tokens of new messages after a response, or None if they cannot be appended."""
        number, tokens, start = parent.said.number, parent.completion.tokens, parent.start
        prompt, response = TokenIds(parent.request.prompt_tokens, tokens[:start]), tokens[start:].tolist()
        path, sent, new = chat.messages[: number - 1], chat.messages[number - 1], chat.messages[number:]
        added = parent.addition(sent) or ""
        return self.rendering.continuation(prompt, response, path, added, new, chat.tools, self._arguments)

    def count(self, chat: Chat) -> int:
        """Return the number of tokens of the prompt that a call with this chat would have.

        Raises:
            RefusedError: The episode is over, or the chat cannot be rendered.
        """
        self.require_open()
        chat = self._known(chat)
        parent = self._parent_of(chat, self._alike(chat))
        between = self._between(parent, chat) if parent is not None else None
        if parent is None or between is None:
            return len(self._opening(chat))
        return len(parent.request.prompt_tokens) + parent.completion.tokens.numel() + between.numel()

    def _continue(self, parent: Node, chat: Chat) -> Request | None:
        """Return the request for the response after new messages, or None if they cannot be appended."""
        between = self._between(parent, chat)
        if between is None:
            return None
        num_tokens = parent.completion.tokens.numel() + between.numel()
        if num_tokens >= self.params.max_response_tokens:
            found = f"found {num_tokens} tokens after the first prompt"
            most = self.params.max_response_tokens
            raise self._cut(f"{found}; expected fewer than rollout.max_response_tokens = {most}")
        partial = with_observation(parent.completion, between)
        return replace(parent.request, noise_key=self._noise_key(parent), partial=partial)

    def _add(
        self,
        chat: Chat,
        said: Said,
        kind: CallKind,
        parent: Node | None,
        request: Request,
        completion: Sample,
        start: int,
    ) -> Reply:
        """Add the response, which ends with the client's first stop string, and return what the client sees."""
        number, ids = len(self._nodes), completion.tokens[start:].tolist()
        num_kept, shown, stop = self.rendering.ended(ids, chat.stops)
        if stop is not None:
            completion = replace(shortened(completion, start + num_kept), finish_reason="stop")
        if stop is None:
            given, options = input_tokens(request), (number, chat.tools, self._arguments)
            message = self.rendering.read(ids, given, *options, may_call=chat.may_call)
        else:
            message = parse_response(shown, number, may_call=chat.may_call)
        for call in message.get("tool_calls", ()):
            self._native_ids |= {call["id"]: call.pop("native_id", call["id"])}
        for each in chat.messages[said.number :]:
            said = said.add(each)
        said.has_stops |= stop is not None
        said = said.add(message)
        request, self._is_cut = replace(request, partial=None), False
        node = Node(
            number,
            kind,
            parent,
            request,
            completion,
            said,
            tools=chat.tools,
            text=self.rendering.text(ids[:num_kept]),
            start=start,
            stop=stop,
            num_dropped=len(ids) - num_kept,
        )
        node.share_rows()
        self._nodes.append(node)
        said.responses.append(node)
        reason = "tool_calls" if "tool_calls" in message and completion.finish_reason == "stop" else None
        counts = len(request.prompt_tokens) + start, num_kept
        reason, now = reason or completion.finish_reason, int(time.time())
        return Reply(message, number, self.request.id, now, reason, counts, stop)

    def _heard(self) -> list[Node]:
        """Return the nodes without responses that nobody got and nobody continued."""
        lost, continued, heard = self._unread - self._read, set[int](), list[Node]()
        for node in reversed(self._nodes):  # children come after their parents
            if node.number not in lost or node.number in continued:
                heard.append(node)
                continued |= {node.parent.number} if node.parent is not None else set()
        return heard[::-1]

    def result(self, outcome: AgentOutcome | str) -> Sample:
        """Return the conversation that trains, with the episode's result and the further ones that train.

        It is the path of a chosen tree with the most sampled tokens. Each other leaf is one more conversation.

        Args:
            outcome: What the harness returned, or why it failed.
        """
        if self.ended.done():
            return replace(self.ended.result(), id=self.request.id)
        leaves = leaves_of(self._heard(), self.limits.train)
        trained = max(leaves, key=lambda leaf: (leaf.num_sampled, -leaf.number), default=None)
        if trained is None:
            said = outcome if isinstance(outcome, str) else "the harness ended without a call that was answered"
            fault = EpisodeResult("", 0, fault=said, failed="harness")
            return replace(give_up(self.request), episode=fault)
        given, failed = (AgentOutcome(), outcome) if isinstance(outcome, str) else (outcome, None)
        done = set[int]()
        order = [trained, *(leaf for leaf in leaves if leaf is not trained)]
        completion, *branches = [conversation(leaf, done) for leaf in order]
        num_trained = sum(int(each.loss_mask.sum()) for each in (completion, *branches))
        result = EpisodeResult(
            trained.text,
            len(trained.path),
            self.posted.reward if given.reward is None else given.reward,
            {**self.posted.info, **given.info},
            None if self._is_cut else failed,
            failed="harness",
            calls=tuple(node.call(is_trained=node.number in done) for node in self._nodes),
            num_forks=num_forks_of(self._nodes),
            num_untrained_tokens=sum(node.num_own + node.num_dropped for node in self._nodes) - num_trained,
        )
        finish_reason = "length" if self._is_cut else completion.finish_reason
        return replace(completion, finish_reason=finish_reason, episode=result, branches=tuple(branches))
