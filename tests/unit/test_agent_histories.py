"""Awkward histories of agents. Each sampled token is found in one sample at most, with its own log-prob.

The scripted policy numbers the tokens that it samples: the log-prob of the n-th one is -n. So a sample shows
which tokens of which call it trains on, and they are compared with what the policy got and returned.
"""

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dppo.agents import messages, responses
from megatron_dppo.agents.agents import AgentServer
from megatron_dppo.agents.chat import RefusedError, read_chat
from megatron_dppo.agents.harness import AgentOutcome
from megatron_dppo.agents.tree import Trees
from megatron_dppo.engines.base import Request, SamplingParams, input_tokens, mask_of, num_tokens_before
from megatron_dppo.runtime.concurrency import run_loop
from megatron_dppo.types import Sample
from tests.support.byte_tokenizers import byte_tokenizer
from tests.unit.test_episodes import ASKS, CALL, THINKING_TEMPLATE, TOOLS, Played

SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = "<think>\nwell\n</think>\n\n"
CALLING = f"{THOUGHT}I add.{CALL}"


class Numbered(Played):
    """Numbers the tokens that it samples.

    Attributes:
        sampled: Call, place in it, and id of each token, by its number.
        inputs: Token ids that each call's request had.
    """

    gate: asyncio.Event | None = None  # calls wait for it

    def __init__(self, *texts: str, **options: Any) -> None:
        super().__init__(*texts, **options)
        self.sampled, self.inputs = list[tuple[int, int, int]](), list[list[int]]()

    async def ask(self, request: Request, params: SamplingParams) -> Sample:
        completion, start = await super().ask(request, params), num_tokens_before(request)
        new = completion.tokens[start:].tolist()
        numbers = torch.arange(len(self.sampled), len(self.sampled) + len(new))
        self.sampled += [(len(self.inputs), place, token) for place, token in enumerate(new)]
        self.inputs.append(input_tokens(request).tolist())
        if self.gate is not None:
            await self.gate.wait()
        log_probs = torch.cat([completion.log_probs[:start], -numbers.float()])
        return replace(completion, rollout_log_probs=log_probs)

    def account(self, outcome: AgentOutcome | None = None) -> list[Sample]:
        """Return the samples of the episode; what trains and what does not is all that was sampled."""
        result = self.episode.result(outcome or AgentOutcome(1.0))
        assert result.episode is not None
        parts, done = [result, *result.branches], set[int]()
        for part in parts:
            whole = [*(part.prompt_tokens or ()), *part.tokens.tolist()]
            numbers = (-part.log_probs[mask_of(part)]).long().tolist()
            places = mask_of(part).nonzero().flatten().tolist()
            for number, place in zip(numbers, places, strict=True):
                call, place_in_call, token = self.sampled[number]
                at = len(part.prompt_tokens or ()) + place
                assert whole[at] == token
                assert whole[: at - place_in_call] == self.inputs[call], "the tokens that the policy was sent"
                assert any(span.start <= place < span.stop for span in part.weight_versions)
            assert done.isdisjoint(numbers)
            done.update(numbers)
        assert len(done) + result.episode.num_untrained_tokens == len(self.sampled)
        return parts


def played(play: Callable[[], Coroutine[Any, Any, Numbered]]) -> Numbered:
    return run_loop(play())


def kinds_of(each: Numbered) -> list[str]:
    episode = each.episode.result(AgentOutcome(1.0)).episode
    assert episode is not None
    return [call.kind for call in episode.calls]


def result_of(said: dict[str, Any], content: str = "5") -> dict[str, Any]:
    """A result of the first tool call of a message."""
    return {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": content}


def summary(chat: Sequence[Any], turn: int) -> list[Any]:
    return [*chat[:2], {"role": "user", "content": f"So far: {turn} steps."}]


def last_turn(chat: Sequence[Any], turn: int) -> list[Any]:
    return [*chat[:2], *chat[-2:]]


def other_task(chat: Sequence[Any], turn: int) -> list[Any]:
    return [{"role": "user", "content": f"Go on after {turn} steps."}]


def rolled_back(chat: Sequence[Any], turn: int) -> list[Any]:
    """The chat up to its third response, as it was sampled, then a summary."""
    return [*chat[:8], {"role": "user", "content": f"So far: {turn} steps."}]


@pytest.mark.parametrize(
    ("compact", "kind"),
    [(summary, "edited"), (last_turn, "edited"), (other_task, "another"), (rolled_back, "branch")],
)
@pytest.mark.parametrize("train", ["main", "tools"])
def test_a_history_of_many_turns_is_compacted(compact: Any, kind: str, train: Trees) -> None:
    """A harness compacts its history whenever it is refused for its length."""
    num_turns = 177

    async def play() -> Numbered:
        texts = [f"{THOUGHT}Step {turn}.{CALL}" for turn in range(num_turns)]
        each = Numbered(*texts, max_response_tokens=2500, max_prompt_tokens=1000, max_calls=500, train=train)
        chat: list[Any] = [SYSTEM, ASKS]
        for turn in range(num_turns):
            try:
                said = await each.say(*chat, tools=TOOLS)
            except RefusedError as refused:
                assert refused.is_too_long
                chat = compact(chat, turn)
                said = await each.say(*chat, tools=TOOLS)
            chat += [said, result_of(said)]
        return each

    each = played(play)
    parts, kinds = each.account(), kinds_of(each)
    num_compactions = kinds.count(kind)
    assert num_compactions >= 5 and kinds == ["first", *(each for each in kinds[1:] if each != "first")]
    assert kinds.count("continues") == num_turns - 1 - num_compactions
    assert parts[0].finish_reason == "stop", "refusals that the harness handles do not cut the episode"
    trains_all = train == "tools" or kind == "branch"
    assert len(parts) == (num_compactions + 1 if trains_all else 1)
    assert sum(int(mask_of(part).sum()) for part in parts) == len(each.sampled) or not trains_all


def test_an_edited_last_response_branches_after_the_one_before_it() -> None:
    async def play() -> Numbered:
        each = Numbered(CALLING, "It is 5.", "It is 6.", "Sorry.")
        first = await each.say(ASKS, tools=TOOLS)
        chat = [ASKS, first, result_of(first)]
        second = await each.say(*chat, tools=TOOLS)
        await each.say(*chat, second, {"role": "user", "content": "Sure?"}, tools=TOOLS)
        edited = second | {"content": "It is five."}
        await each.say(*chat, edited, {"role": "user", "content": "Sure?"}, tools=TOOLS)
        return each

    each = played(play)
    longest, branch = each.account()
    assert kinds_of(each) == ["first", "continues", "continues", "branch"]
    text = each.tokenizer.decode(branch.tokens)
    assert text.startswith(f"{CALLING}<|im_end|>") and "It is five.<|im_end|>" in text, "context, not trained"
    assert branch.tokens[mask_of(branch)].tolist() == each.ids("Sorry.<|im_end|>")
    assert longest.tokens[mask_of(longest)].tolist() == each.ids(
        f"{CALLING}<|im_end|>It is 5.<|im_end|>It is 6.<|im_end|>"
    )


def test_sub_agent_between_two_turns_gets_a_separate_tree() -> None:
    """Two sub-agents run in parallel and each uses a tool; then their parent continues."""

    async def sub(each: Numbered, task: str) -> str:
        chat: list[Any] = [SYSTEM, {"role": "user", "content": task}]
        said = await each.say(*chat, tools=TOOLS)
        final = await each.say(*chat, said, result_of(said, task), tools=TOOLS)
        return str(final["content"])

    async def play() -> Numbered:
        each = Numbered(CALLING, CALLING, CALLING, "left", "right", "Both.", train="tools")
        said = await each.say(SYSTEM, ASKS, tools=TOOLS)
        found = await asyncio.gather(sub(each, "Look left."), sub(each, "Look right."))
        await each.say(SYSTEM, ASKS, said, result_of(said, " ".join(found)), tools=TOOLS)
        return each

    each = played(play)
    parts = each.account()
    assert kinds_of(each) == ["first", "another", "another", "continues", "continues", "continues"]
    ends = {each.tokenizer.decode(part.tokens[mask_of(part)]).rpartition(CALL)[2] for part in parts}
    assert ends == {f"<|im_end|>{text}<|im_end|>" for text in ("left", "right", "Both.")}
    assert sum(int(mask_of(part).sum()) for part in parts) == len(each.sampled)


def _messages_body(chat: Sequence[Any], turn: int) -> dict[str, Any]:
    """A request as Claude Code sends it: `cache_control` is at the last content alone, in a list of blocks."""
    sent: list[Any] = json.loads(json.dumps(chat))
    for place, message in enumerate(sent):
        if message["role"] == "user" and isinstance(message["content"], str) and (place + turn) % 2:
            message["content"] = [{"type": "text", "text": message["content"]}]
    last: Any = sent[-1]["content"]
    if isinstance(last, str):
        last = sent[-1]["content"] = [{"type": "text", "text": last}]
    last[-1]["cache_control"] = {"type": "ephemeral", "ttl": "5m"}
    system: list[Any] = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    extra = {
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": []},
        "metadata": {"user_id": "u"},
    }
    tool = {"name": "add", "input_schema": {}, "cache_control": {"type": "ephemeral"}} if turn % 2 else {
        "name": "add", "input_schema": {}}  # fmt: skip
    return {"messages": sent, "system": system, "tools": [tool], "max_tokens": 99, **extra}


@pytest.mark.parametrize("keeps_thinking", [True, False])
def test_moved_cache_control_and_dropped_thinking_continue_the_conversation(keeps_thinking: bool) -> None:
    async def play() -> Numbered:
        each = Numbered(*[f"{THOUGHT}Step {turn}.{CALL}" for turn in range(6)])
        chat: list[Any] = [{"role": "user", "content": "2 + 3?"}]
        for turn in range(6):
            body = json.dumps(_messages_body(chat, turn)).encode()
            read = messages.read_messages(body)
            reply = await each.episode.call(read, body, is_retry=False)
            blocks = json.loads(messages.body_of(reply, read))["content"]
            assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
            kept = blocks if keeps_thinking else blocks[1:]
            result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "5"}
            chat += [{"role": "assistant", "content": kept}, {"role": "user", "content": [result]}]
        return each

    each = played(play)
    (part,) = each.account()
    assert kinds_of(each) == ["first", *["continues"] * 5]
    assert int(mask_of(part).sum()) == len(each.sampled), "thinking trains, whether it is sent again or not"


@pytest.mark.parametrize("drops", [("reasoning",), ("reasoning", "message"), ()])
def test_dropped_reasoning_items_continue_the_conversation(drops: tuple[str, ...]) -> None:
    """By the Responses protocol. A client that drops the text next to a call has changed the response."""

    async def play() -> Numbered:
        each = Numbered(*[CALLING] * 3, train="tools")
        items: list[Any] = [{"role": "user", "content": "2 + 3?"}]
        for _ in range(3):
            tool = {"type": "function", "name": "add", "parameters": {}}
            body = json.dumps({"input": items, "tools": [tool], "store": False}).encode()
            read = responses.read_responses(body)
            reply = await each.episode.call(read, body, is_retry=False)
            output = json.loads(responses.body_of(reply, read))["output"]
            items += [item for item in output if item["type"] not in drops]
            called = output[-1]["call_id"]
            items.append({"type": "function_call_output", "call_id": called, "output": "5"})
        return each

    each = played(play)
    parts = each.account()
    is_edited = "message" in drops
    assert kinds_of(each) == ["first", *["edited" if is_edited else "continues"] * 2]
    assert len(parts) == (3 if is_edited else 1)


@pytest.mark.parametrize(
    "sent",
    [
        '{"b":3,"a":2}',
        '{ "a" : 2 , "b" : 3 }',
        '{"a":2.0,"b":3}',
        '{"a": 2e0, "b": 3.00}',
        '{"\\u0061":2,"b":3}',
    ],
)
def test_arguments_that_are_serialised_again_are_the_same(sent: str) -> None:
    """A client's language may write a number in another way."""

    async def play() -> Numbered:
        each = Numbered(CALLING.replace('": 2', '":  2.0'), "It is 5.")
        said = await each.say(ASKS, tools=TOOLS)
        said["tool_calls"][0]["function"]["arguments"] = sent
        await each.say(ASKS, said, result_of(said), tools=TOOLS)
        return each

    each = played(play)
    each.account()
    assert kinds_of(each) == ["first", "continues"]
    assert '":  2.0' in each.input_of(1), "the sampled tokens"


@pytest.mark.parametrize("sent", ['{"a":3,"b":2}', '{"a":true,"b":3}', '{"a":"2","b":3}', '{"a":2}', "2, 3"])
def test_other_arguments_are_another_response(sent: str) -> None:
    async def play() -> Numbered:
        each = Numbered(CALLING, "It is 5.", train="tools")
        said = await each.say(ASKS, tools=TOOLS)
        said["tool_calls"][0]["function"]["arguments"] = sent
        await each.say(ASKS, said, result_of(said), tools=TOOLS)
        return each

    each = played(play)
    assert len(each.account()) == 2 and kinds_of(each) == ["first", "edited"]


def test_thinking_that_the_template_leaves_out_trains_with_the_turn_that_sampled_it() -> None:
    tokenizer = byte_tokenizer(("<|im_start|>", "<|im_end|>"), THINKING_TEMPLATE, eos="<|im_end|>")

    async def play(thinking: Any) -> Numbered:
        each = Numbered(
            *[f"{THOUGHT}{n}" for n in range(3)], tokenizer=tokenizer, thinking=thinking, train="all"
        )
        chat: list[Any] = [ASKS]
        for _ in range(3):
            said = await each.say(*chat)
            said.pop("reasoning_content")
            chat += [said, {"role": "user", "content": "Sure?"}]
        return each

    kept, cut = (run_loop(play(thinking)) for thinking in ("keep", "template"))
    assert len(kept.account()) == 1 and len(cut.account()) == 3
    assert [len(kinds) - kinds.count("template") for kinds in map(kinds_of, (kept, cut))] == [3, 1]


def test_a_storm_of_retries_samples_once() -> None:
    """Over HTTP: retries of a call in flight, of which half disconnect, and late ones after the next turn."""

    async def send(client: httpx.AsyncClient, number: int, *chat: Any) -> bytes:
        headers = {"x-stainless-retry-count": str(number)}
        reply = await client.post("/chat/completions", json={"messages": chat}, headers=headers)
        assert reply.status_code == 200
        return reply.content

    async def play(server: AgentServer) -> Numbered:
        each = Numbered("5", "Yes.", "6")
        each.gate = asyncio.Event()
        key = {"Authorization": f"Bearer {server.open(each.episode)}"}
        async with httpx.AsyncClient(base_url=server.base_url, headers=key, timeout=600.0) as client:
            storm = [asyncio.create_task(send(client, 0, ASKS))]
            while not each.inputs:
                await asyncio.sleep(0.001)
            storm += [asyncio.create_task(send(client, number, ASKS)) for number in range(1, 31)]
            await asyncio.sleep(0.05)
            for task in storm[::2]:  # with the first one
                task.cancel()
            each.gate.set()
            (body,) = {await task for task in storm[1::2]}
            said = json.loads(body)["choices"][0]["message"]
            chat = [ASKS, said, {"role": "user", "content": "Sure?"}]
            nexts = {
                await send(client, number, *chat) for number in (2, 3)
            }  # its first try was lost on its way
            assert len(nexts) == 1 and await send(client, 31, ASKS) == body
            assert await send(client, 0, ASKS) != body, "not marked as a retry"
        return each

    server = AgentServer()
    server.start()
    with closing(server):
        each = run_loop(play(server))
    assert len(each.inputs) == 3 and kinds_of(each) == ["first", "continues", "repeats"]
    each.account()


MOVES = ("continue", "branch", "repeat", "edit", "other", "tools", "retry", "stop")


@given(
    moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 99)), min_size=1, max_size=14),
    train=st.sampled_from(["main", "tools", "all"]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_sampled_token_of_any_episode_is_accounted_for(
    moves: list[tuple[str, int]], train: Trees
) -> None:
    async def play() -> Numbered:
        each = Numbered(*[f"{THOUGHT}Say {n}." for n in range(15)], train=train, max_calls=99)
        ends = list[tuple[list[Any], dict[str, Any]]]()
        bodies: list[bytes] = []

        async def ask(chat: list[Any], options: dict[str, Any], body: bytes | None = None) -> None:
            body = body or json.dumps({"messages": chat} | options).encode()
            reply = await each.episode.call(read_chat(body), body, is_retry=body in bodies)
            if body not in bodies:
                bodies.append(body)
                said = json.loads(reply.json())["choices"][0]["message"]
                ends.append(([*chat, said], options))

        await ask([ASKS], {})
        for move, number in moves:
            chat, options = ends[number % len(ends)]
            says = {"role": "user", "content": f"{move} {number}"}
            match move:
                case "continue":
                    chat, options = ends[-1]
                    await ask([*chat, says], options)
                case "branch":
                    await ask([*chat, says], options)
                case "repeat":
                    await ask(chat[:-1], options | {"seed": number})
                case "edit":
                    await ask([*chat[:-1], chat[-1] | {"content": "No."}, says], options)
                case "other":
                    await ask([says], options)
                case "tools":
                    await ask([*chat, says], options | {"tools": [*options.get("tools", []), *TOOLS]})
                case "retry":
                    await ask([], {}, bodies[number % len(bodies)])
                case _:
                    await ask([*chat, says], options | {"stop": ["Say"]})
        return each

    each = played(play)
    parts = each.account()
    assert train != "all" or sum(int(mask_of(part).sum()) for part in parts) + _num_dropped(each) == len(
        each.sampled
    )


def _num_dropped(each: Numbered) -> int:
    return sum(node.num_dropped for node in each.episode._nodes)


def test_the_order_of_calls_is_random_and_each_has_its_parent() -> None:
    """Sixteen conversations of one episode in parallel, whose calls come in any order."""

    async def talk(each: Numbered, name: str, order: random.Random) -> None:
        chat: list[Any] = [SYSTEM, {"role": "user", "content": name}]
        for _ in range(4):
            await asyncio.sleep(order.random() / 100)
            said = await each.say(*chat, tools=TOOLS)
            chat += [said, {"role": "user", "content": f"And {name}?"}]

    async def play() -> Numbered:
        each, order = Numbered(*map(str, range(64)), train="tools", max_calls=99), random.Random(5)
        await asyncio.gather(*(talk(each, f"t{n}", order) for n in range(16)))
        return each

    each = played(play)
    prompts = map(each.input_of, range(64))
    names = [prompt.split("<|im_start|>user\n")[1].partition("<|im_end|>")[0] for prompt in prompts]
    assert sorted(set(names)) == sorted(f"t{n}" for n in range(16)) and names != sorted(names)
    assert all(names.count(name) == 4 for name in names)
    latest = dict[str, int]()
    for node, name in zip(each.episode._nodes, names, strict=True):
        assert (node.parent and node.parent.number) == latest.get(name), "the conversation's previous call"
        latest[name] = node.number
    parts = each.account()
    assert len(parts) == 16 and all(part.episode is None for part in parts[1:])
    for part in parts:
        names = set(
            each.tokenizer.decode([*(part.prompt_tokens or ()), *part.tokens.tolist()]).split("And ")[1:]
        )
        assert len({name.partition("?")[0] for name in names}) == 1
