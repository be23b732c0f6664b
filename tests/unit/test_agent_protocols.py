"""The three protocols of the agents' endpoint, as `openai`'s and `anthropic`'s own clients call it."""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pytest
from aiohttp import ClientSession
from anthropic import AsyncAnthropic
from anthropic import BadRequestError as AnthropicRefusal
from openai import AsyncOpenAI
from openai import BadRequestError as OpenAIRefusal

from megatron_dppo.agents.agents import AgentServer
from megatron_dppo.agents.chat import Chat, RefusedError, read_chat
from megatron_dppo.agents.harness import AgentOutcome
from megatron_dppo.agents.messages import read_messages
from megatron_dppo.agents.rendering import Rendering
from megatron_dppo.agents.responses import read_responses
from megatron_dppo.engines.base import Request, SamplingParams, mask_of
from megatron_dppo.runtime.concurrency import run_loop
from megatron_dppo.types import Sample
from tests.support.byte_tokenizers import QWEN3_TEMPLATE, TOOLS_TEMPLATE, byte_tokenizer, tools_tokenizer
from tests.unit.test_episodes import CALL, Played

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Add.", "parameters": PARAMETERS}
SYSTEM, QUESTION = "Be brief.", "2 + 3?"
ODD = CALL.replace('": 2', '":  2')  # no template writes it so
SAMPLED = f"<think>\nwell\n</think>\n\nI add.{ODD}"


class Client:
    """A chat with one tool by one protocol, which keeps its history as the client's library gives it."""

    def __init__(self, url: str, key: str, *, is_stream: bool) -> None:
        self.openai: Any = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
        self.anthropic: Any = AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0)
        self.is_stream = is_stream
        self.history: list[Any] = []

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def result(self, call_id: str, text: str) -> None:
        """Append the result of a tool call."""
        raise NotImplementedError

    async def next(self, **options: Any) -> dict[str, Any]:
        """Append the next response; returns its text, thinking, calls by id, finish reason, and counts."""
        raise NotImplementedError


class ChatClient(Client):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.history = [{"role": "system", "content": SYSTEM}]

    def result(self, call_id: str, text: str) -> None:
        self.history.append({"role": "tool", "tool_call_id": call_id, "content": text})

    async def next(self, **options: Any) -> dict[str, Any]:
        calls = {"model": "any", "messages": self.history, "tools": [{"type": "function", "function": TOOL}]}
        if self.is_stream:
            with_usage = {"stream": True, "stream_options": {"include_usage": True}}
            message: Any = {"role": "assistant"}
            reason: Any = None
            usage: Any = None
            async for chunk in await self.openai.chat.completions.create(**calls, **with_usage, **options):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    reason = choice.finish_reason or reason
                    message |= choice.delta.model_dump(exclude_none=True)
            calls = message.get("tool_calls", [])
            assert [call.pop("index") for call in calls] == [*range(len(calls))]
        else:
            reply = await self.openai.chat.completions.create(**calls, **options)
            reason, usage = reply.choices[0].finish_reason, reply.usage
            message = reply.choices[0].message.model_dump(exclude_none=True)
        self.history.append(message)
        called = {c["id"]: json.loads(c["function"]["arguments"]) for c in message.get("tool_calls", [])}
        counts = usage.prompt_tokens, usage.completion_tokens
        return _said(message.get("content"), message.get("reasoning_content"), called, reason, counts)


class MessagesClient(Client):
    def result(self, call_id: str, text: str) -> None:
        block = {"type": "tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": text}]}
        self.history.append({"role": "user", "content": [block]})

    def _arguments(self) -> dict[str, Any]:
        tool = {"name": "add", "description": "Add.", "input_schema": PARAMETERS}
        cached = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
        return {"model": "any", "messages": self.history, "tools": [tool], "system": cached}

    async def count(self) -> int:
        return (await self.anthropic.messages.count_tokens(**self._arguments())).input_tokens

    async def next(self, **options: Any) -> dict[str, Any]:
        arguments = self._arguments() | {"max_tokens": 500} | options
        if self.is_stream:
            async with self.anthropic.messages.stream(**arguments) as stream:
                reply = await stream.get_final_message()
        else:
            reply = await self.anthropic.messages.create(**arguments)
        blocks = [block.model_dump(exclude_none=True) for block in reply.content]
        for block in blocks:
            block.pop("parsed_output", None)
        self.history.append({"role": "assistant", "content": blocks})
        by_kind: dict[str, list[Any]] = {"text": [], "thinking": [], "tool_use": []}
        for block in blocks:
            by_kind[block["type"]].append(block)
        called = {block["id"]: block["input"] for block in by_kind["tool_use"]}
        texts = ["".join(block[kind] for block in by_kind[kind]) for kind in ("text", "thinking")]
        counts = reply.usage.input_tokens, reply.usage.output_tokens
        return _said(texts[0], texts[1], called, reply.stop_reason, counts)


class ResponsesClient(Client):
    def result(self, call_id: str, text: str) -> None:
        self.history.append({"type": "function_call_output", "call_id": call_id, "output": text})

    async def next(self, **options: Any) -> dict[str, Any]:
        tools = [{"type": "function", "strict": False, **TOOL}, {"type": "web_search"}]
        arguments: dict[str, Any] = {
            "model": "any",
            "input": self.history,
            "instructions": SYSTEM,
            "store": False,
        }
        arguments |= {"tools": tools, "include": ["reasoning.encrypted_content"]}
        if self.is_stream:
            async with self.openai.responses.stream(**arguments, **options) as stream:
                reply = await stream.get_final_response()
        else:
            reply = await self.openai.responses.create(**arguments, **options)
        items = [item.model_dump(exclude_none=True) for item in reply.output]
        self.history += items
        thinking = [part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]]
        calls = [item for item in items if item["type"] == "function_call"]
        called = {item["call_id"]: json.loads(item["arguments"]) for item in calls}
        counts = reply.usage.input_tokens, reply.usage.output_tokens
        reason = reply.incomplete_details.reason if reply.incomplete_details else reply.status
        return _said(reply.output_text, "".join(thinking), called, reason, counts)


CLIENTS: dict[str, type[Client]] = {
    "chat": ChatClient,
    "messages": MessagesClient,
    "responses": ResponsesClient,
}
REASONS = {
    "chat": ("tool_calls", "stop", "length"),
    "messages": ("tool_use", "end_turn", "max_tokens"),
    "responses": ("completed", "completed", "max_output_tokens"),
}


def _said(
    text: str | None, thinking: str | None, calls: dict[str, Any], reason: str | None, counts: tuple[int, int]
) -> dict[str, Any]:
    return {"text": text or "", "thinking": thinking or "", "calls": calls, "reason": reason, "counts": counts}


def with_client(
    name: str,
    play: Callable[[Any, Played], Awaitable[None]],
    *texts: str,
    is_stream: bool = False,
    **limits: Any,
) -> Played:
    """Play with a client of an episode whose responses are these texts."""
    server = AgentServer()

    async def run() -> Played:
        each = Played(*texts, **limits)
        key = server.open(each.episode)
        await play(CLIENTS[name](server.base_url, key, is_stream=is_stream), each)
        server.seal(key)
        return each

    server.start()
    with closing(server):
        return run_loop(run())


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_tool_task_continues_what_was_sampled(name: str, is_stream: bool) -> None:
    async def play(client: Client, each: Played) -> None:
        client.ask(QUESTION)
        first = await client.next()
        assert (first["text"], first["thinking"], first["reason"]) == ("I add.", "well", REASONS[name][0])
        ((call_id, arguments),) = first["calls"].items()
        assert arguments == {"a": 2, "b": 3}
        client.result(call_id, "5")
        if isinstance(client, MessagesClient):
            counted = await client.count()
        second = await client.next()
        assert (second["text"], second["calls"], second["reason"]) == ("It is 5.", {}, REASONS[name][1])
        asked = each.asked[1].partial
        assert asked is not None
        assert second["counts"][0] == len(each.asked[1].prompt_tokens) + asked.tokens.numel()
        assert second["counts"][1] == len(each.ids("It is 5.<|im_end|>"))
        if isinstance(client, MessagesClient):
            assert counted == second["counts"][0]

    each = with_client(name, play, SAMPLED, "It is 5.", is_stream=is_stream)
    end = "<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    assert each.input_of(1) == each.input_of(0) + SAMPLED + end
    assert SYSTEM in each.input_of(0) and '"Add."' in each.input_of(0)
    assert each.asked[1].noise_key == each.asked[0].noise_key
    result = each.episode.result(AgentOutcome(1.0))
    trained = result.tokens[mask_of(result)].tolist()
    assert trained == each.ids(f"{SAMPLED}<|im_end|>It is 5.<|im_end|>")
    assert result.prompt_tokens == each.asked[0].prompt_tokens and result.episode is not None
    assert (result.episode.num_turns, result.episode.num_forks) == (2, 0)
    assert (result.episode.response, result.episode.num_untrained_tokens) == ("It is 5.", 0)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("name", CLIENTS)
def test_results_of_parallel_calls_have_the_order_of_the_calls(name: str, is_stream: bool) -> None:
    async def play(client: Client, each: Played) -> None:
        client.ask(QUESTION)
        first, second = (await client.next())["calls"]
        client.result(second, "later")
        client.result("call_8", "unknown")
        client.result(first, "sooner")
        await client.next()

    calls = "".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {n}}}}}</tool_call>' for n in (1, 2))
    each = with_client(name, play, calls, "It is 5.", is_stream=is_stream)
    results = "".join(f"<|im_start|>tool\n{text}<|im_end|>\n" for text in ("sooner", "later", "unknown"))
    assert each.input_of(1) == f"{each.input_of(0)}{calls}<|im_end|>\n{results}<|im_start|>assistant\n"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("name", "option"), [("chat", "stop"), ("messages", "stop_sequences")])
def test_a_response_ends_with_a_stop_string(name: str, option: str, is_stream: bool) -> None:
    async def play(client: Client, each: Played) -> None:
        client.ask(QUESTION)
        first = await client.next(**{option: ["Observation:"]})
        assert (first["text"], first["thinking"]) == ("I add.", "well")
        assert first["reason"] == {"chat": "stop", "messages": "stop_sequence"}[name]
        assert first["counts"][1] == len(each.ids("<think>\nwell\n</think>\n\nI add.\nObservation:"))
        client.ask("5")
        assert (await client.next())["reason"] == REASONS[name][1]

    text = "<think>\nwell\n</think>\n\nI add.\nObservation:"
    each = with_client(name, play, f"{text} 6", "It is 5.", is_stream=is_stream)
    assert each.input_of(1).startswith(f"{each.input_of(0)}{text}<|im_end|>\n")


def test_all_protocols_render_the_same_prompt() -> None:
    async def play(client: Client, each: Played) -> None:
        client.ask(QUESTION)
        await client.next()

    first, *others = (with_client(name, play, "yes").asked[0].prompt_tokens for name in CLIENTS)
    assert others == [first, first]


@pytest.mark.parametrize("name", ["messages", "responses"])
def test_signatures_and_item_ids_distinguish_equal_responses(name: str) -> None:
    async def play(client: Client, each: Played) -> None:
        client.ask(QUESTION)
        before = list(client.history)
        await client.next()
        after_first, client.history = client.history, before
        await client.next()
        client.history = after_first
        client.ask("And now?")
        await client.next()
        path = each.episode._nodes[2].path
        assert [node.number for node in path] == [0, 2]

    with_client(name, play, *["<think>\na\n</think>\n\nyes"] * 2, "no")


@pytest.mark.parametrize("name", CLIENTS)
def test_a_limit_is_an_error_that_clients_know(name: str) -> None:
    async def play(client: Client, each: Played) -> None:
        client.ask(QUESTION)
        await client.next()
        client.ask("word " * 100)
        with pytest.raises((OpenAIRefusal, AnthropicRefusal)) as refused:
            await client.next()
        if name == "messages":
            assert "prompt is too long" in str(refused.value)
        else:
            assert refused.value.code == "context_length_exceeded"  # type: ignore[union-attr]

    with_client(name, play, "yes", max_response_tokens=50)


FORM = {"type": "json_schema", "schema": {"type": "object", "properties": {}, "additionalProperties": False}}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"n": 2}),
    ("messages", {"stop_sequences": [""]}),
    ("messages", {"tool_choice": {"type": "tool", "name": "add"}}),
    ("messages", {"output_config": {"effort": "low", "format": FORM}}),
    ("messages", {"extra_body": {"output_format": FORM}}),
    ("chat", {"extra_body": {"repetition_penalty": 1.1}}),
    ("chat", {"extra_body": {"continue_final_message": True}}),
    ("chat", {"extra_body": {"guided_regex": "[0-9]"}}),
    ("messages", {"extra_body": {"mcp_servers": [{"type": "url", "url": "a"}]}}),
    ("responses", {"background": True}),
    ("responses", {"extra_body": {"min_tokens": 3}}),
    ("responses", {"previous_response_id": "resp_1"}),
    ("responses", {"text": {"format": {"type": "json_object"}}}),
    ("responses", {"tool_choice": {"type": "function", "name": "add"}}),
]


@pytest.mark.parametrize(("name", "options"), REFUSED, ids=str)
def test_options_that_a_rollout_cannot_have_are_refused(name: str, options: dict[str, Any]) -> None:
    async def play(client: Client, each: Played) -> None:
        client.ask(QUESTION)
        with pytest.raises(
            (OpenAIRefusal, AnthropicRefusal), match=next(iter(options.get("extra_body", options)))
        ):
            await client.next(**options)
        assert not each.asked

    with_client(name, play, "never")


PATHS = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}


def post(bodies: Sequence[tuple[str, Any]], *texts: str, **limits: Any) -> tuple[Played, list[tuple[int, str]]]:
    """Send bodies to the paths of protocols; returns the episode, and each status with its body."""
    server, found = AgentServer(), list[tuple[int, str]]()

    async def run() -> Played:
        each = Played(*texts, **limits)
        headers = {"Authorization": f"Bearer {server.open(each.episode)}"}
        async with ClientSession(headers=headers) as http:
            for name, body in bodies:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                async with http.post(f"{server.base_url}/{PATHS[name]}", data=data) as answer:
                    found.append((answer.status, await answer.text()))
        return each

    server.start()
    with closing(server):
        return run_loop(run()), found


USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "t9", "name": "add", "input": {}}]}
_HALF = {"role": "assistant", "content": "It"}
_ASKED = {"role": "user", "content": QUESTION}
UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"messages": [_ASKED, _HALF], "max_tokens": 9}, "at the end") for name in ("chat", "messages")),
    ("responses", {"input": [_ASKED, _HALF]}, "at the end"),
    ("chat", {"messages": [_ASKED, {"role": "function", "name": "add", "content": "5"}]}, "'function'"),
    ("chat", {"messages": [{"role": "judge", "content": "5"}, _ASKED]}, "'judge'"),
    ("messages", {"max_tokens": 9, "messages": [{"role": "tester", "content": "5"}]}, "'tester'"),
    ("responses", {"input": [{"role": "critic", "content": "5"}]}, "'critic'"),
    ("chat", {"messages": [_ASKED, _HALF | {"function_call": {"name": "add"}}, _ASKED]}, "function_call"),
]


@pytest.mark.parametrize(("name", "body", "said"), UNKNOWN, ids=lambda each: str(each)[:40])
def test_messages_that_no_template_writes_are_refused(name: str, body: dict[str, Any], said: str) -> None:
    each, ((status, text),) = post([(name, body)], "never")
    assert status == 400 and said in text and not each.asked


FUNCTION = {"type": "function", "function": TOOL}
FIRST: dict[str, dict[str, Any]] = {
    "chat": {"messages": [_ASKED], "tools": [FUNCTION]},
    "messages": {"messages": [_ASKED], "tools": [{"name": "add", "input_schema": PARAMETERS}], "max_tokens": 9},
    "responses": {"input": [_ASKED], "tools": [{"type": "function", **TOOL}]},
}
"""A first request with a tool by each protocol."""


def omitting(*parts: str) -> Any:
    """Return a tokenizer whose chat template lacks parts of one that writes tools."""
    template = TOOLS_TEMPLATE
    for part in parts:
        assert part in template
        template = template.replace(part, "")
    return byte_tokenizer(("<|im_start|>", "<|im_end|>"), template)


NO_TOOLS, NO_SCHEMAS = "{{ '<|im_start|>tool\n' + (t | tojson) + '<|im_end|>\n' }}", "(t | tojson) + "
NO_CALLS, NO_RESULTS = "{{ '<tool_call>' + (c.function | tojson) }}", ", 'tool'"


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize(("part", "found"), [(NO_TOOLS, "no tools"), (NO_SCHEMAS, "no tool 'add'")])
def test_a_first_call_with_tools_that_the_template_omits_is_refused(name: str, part: str, found: str) -> None:
    tokenizer = omitting(part)
    each, ((status, text),) = post([(name, FIRST[name])], "never", tokenizer=tokenizer)
    assert status == 400 and found in text and "a tokenizer whose chat template writes it" in text
    assert not each.asked
    _, ((status, _),) = post([(name, FIRST[name] | {"tools": []})], "so", tokenizer=tokenizer)
    assert status == 200


@pytest.mark.parametrize(
    ("part", "found"), [(NO_CALLS, "no call of 'add'"), (NO_RESULTS, "no message of 'tool'")]
)
@pytest.mark.parametrize("result", ["2 + 3", ""])
def test_a_history_that_the_template_omits_is_refused(part: str, found: str, result: str) -> None:
    """Although the schemas name the tool, and the question has the result's text."""
    call = {"id": "t9", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "add: 2 + 3?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t9", "content": result},
    ]
    body = {"messages": history, "tools": [FUNCTION]}
    each, ((status, text),) = post([("chat", body)], "never", tokenizer=omitting(part))
    assert status == 400 and found in text and not each.asked
    _, ((status, _),) = post([("chat", body)], "so")
    assert status == 200


def test_a_result_that_the_template_omits_is_refused_after_a_response_too() -> None:
    asked, said = {"role": "user", "content": "5?"}, {"role": "assistant", "content": "I add."}
    later = [asked, said, {"role": "tool", "content": "5", "tool_call_id": "t9"}, asked]
    bodies = [("chat", {"messages": chat}) for chat in ([asked], later)]
    each, ((first, _), (second, text)) = post(bodies, "I add.", "never", tokenizer=omitting(NO_RESULTS))
    assert (first, second, len(each.asked)) == (200, 400, 1) and "no message of 'tool'" in text


@pytest.mark.parametrize(("condition", "status"), [("loop.last", 400), ("loop.index > 2", 200)])
def test_template_that_omits_thoughts_of_this_turn_is_refused(condition: str, status: int) -> None:
    """A template may omit the earlier ones."""
    written = f"{{%- if m.reasoning_content and {condition} %}}{{{{ m.reasoning_content }}}}{{%- endif %}}"
    template = TOOLS_TEMPLATE.replace("{%- for c in", written + "{%- for c in")
    tokenizer = byte_tokenizer(("<|im_start|>", "<|im_end|>"), template)
    thinks = {"role": "assistant", "content": "I add.", "reasoning_content": "2 + 3?"}
    history = [_ASKED, thinks, _ASKED, thinks, {"role": "tool", "content": "5", "tool_call_id": "t9"}]
    _, ((found, text),) = post([("chat", {"messages": history})], "so", tokenizer=tokenizer)
    assert found == status and ("no 'reasoning_content' of 'assistant'" in text) == (status == 400)


@pytest.mark.parametrize("number", ["NaN", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused(number: str) -> None:
    body = json.dumps({"messages": [_ASKED], "metadata": 0}).replace(": 0", f": {number}").encode()
    each, ((status, text),) = post([("chat", body)], "never")
    assert status == 400 and number in text and not each.asked


def test_a_tool_that_failed_without_a_word_is_an_error() -> None:
    failed = [{"type": "tool_result", "tool_use_id": "t9", "is_error": True}]
    tools = [{"name": "add", "input_schema": PARAMETERS}]
    messages = [_ASKED, USED, {"role": "user", "content": failed}]
    each, ((status, _),) = post([("messages", {"max_tokens": 9, "messages": messages, "tools": tools})], "so")
    assert status == 200 and "<|im_start|>tool\nError<|im_end|>" in each.input_of(0)


def test_a_rendering_knows_whether_its_template_writes_tools() -> None:
    tokenizer = byte_tokenizer(("<|im_start|>", "<|im_end|>"), QWEN3_TEMPLATE)
    assert not Rendering(tokenizer, "keep").writes_tools()
    assert Rendering(tools_tokenizer(), "keep").writes_tools()


def test_reply_to_a_client_that_timed_out_is_not_trained_on() -> None:
    """The client asks again, as after its own time-out, and continues the second reply."""
    server = AgentServer()

    async def run() -> Played:
        each = Played("a long reply that nobody got", "5", "yes")
        may_answer, sample = asyncio.Event(), each.episode.ask

        async def ask(request: Request, params: SamplingParams) -> Sample:
            await may_answer.wait()
            return await sample(request, params)

        each.episode.ask = ask
        key = server.open(each.episode)
        async with ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:

            async def say(*messages: Any) -> str:
                body = json.dumps({"messages": messages}).encode()
                async with http.post(f"{server.base_url}/{PATHS['chat']}", data=body) as answer:
                    return (await answer.json())["choices"][0]["message"]["content"]

            first = asyncio.create_task(say(_ASKED))
            while not each.episode._num_calling:
                await asyncio.sleep(0.01)
            first.cancel()
            await asyncio.wait({first})
            async with http.get(f"{server.base_url}/models") as answer:  # the server has seen the end by then
                await answer.read()
            may_answer.set()
            said = await say(_ASKED)
            await say(_ASKED, {"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"})
        server.seal(key)
        return each

    server.start()
    with closing(server):
        each = run_loop(run())
    done = each.episode.result(AgentOutcome(1.0))
    texts = [each.tokenizer.decode(one.tokens[mask_of(one)].tolist()) for one in (done, *done.branches)]
    assert texts == ["5<|im_end|>yes<|im_end|>"]
    assert done.episode is not None and done.episode.response == "yes" and len(done.episode.calls) == 3
    assert done.episode.num_untrained_tokens == len(each.ids("a long reply that nobody got<|im_end|>"))


@pytest.mark.parametrize("name", ["messages", "responses"])
def test_an_image_is_refused(name: str) -> None:
    image = {
        "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        "responses": {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"},
    }[name]

    async def play(client: Client, each: Played) -> None:
        client.history.append({"role": "user", "content": [image]})
        with pytest.raises((OpenAIRefusal, AnthropicRefusal), match="image"):
            await client.next()

    with_client(name, play, "never")


def test_agents_that_connect_together_while_the_server_is_busy_wait_for_it() -> None:
    server, is_free = AgentServer(), threading.Event()
    server.start()
    host, port = server.base_url.split("/")[2].split(":")

    async def hold() -> None:
        is_free.wait(300)

    with ExitStack() as stack:
        stack.callback(server.close)
        holding = threading.Thread(target=server._thread.call, args=(hold(), 600))
        holding.start()
        for _ in range(300):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=0.9))  # no second try
        is_free.set()
        holding.join()


FORMED: dict[str, tuple[Callable[[bytes], Chat], dict[str, Any]]] = {
    "chat": (
        read_chat,
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "name": "ann", "content": [{"type": "text", "text": QUESTION}]},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "well",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "5"},
            ],
            "tools": [{"type": "function", "function": TOOL}],
            "max_tokens": 5,
            "stop": ["x"],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "messages": (
        read_messages,
        {
            "system": [{"type": "text", "text": SYSTEM}],
            "messages": [
                {"role": "user", "content": QUESTION},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "well", "signature": "policy_0"},
                        {"type": "text", "text": "I add."},
                        {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 2}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "5"}],
                },
            ],
            "tools": [{"name": "add", "description": "Add.", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "auto"},
            "max_tokens": 5,
            "stop_sequences": ["x"],
        },
    ),
    "responses": (
        read_responses,
        {
            "instructions": SYSTEM,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
                {"type": "reasoning", "id": "rs_0", "summary": [], "content": []},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "5"},
            ],
            "tools": [{"type": "function", "name": "add", "parameters": PARAMETERS}],
            "max_output_tokens": 5,
            "tool_choice": "auto",
        },
    ),
}


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container of a JSON value, and a key of it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(items):
        yield value, key
        yield from places_in(each)


@pytest.mark.parametrize("name", FORMED)
@pytest.mark.parametrize("odd", [None, 7, 0.5, True, "odd", [], ["x"], {}, {"a": [1]}], ids=repr)
def test_odd_values_in_a_body_are_refused_or_read_as_texts(name: str, odd: Any) -> None:
    """It is the client's fault, with status 400, and never another error."""
    read, body = FORMED[name]
    read(json.dumps(body).encode())
    for container, key in places_in(body):
        whole = container[key]
        container[key] = odd
        try:
            chat = read(json.dumps(body).encode())
        except RefusedError as refusal:
            assert refusal.status == 400
        else:
            calls = [call for message in chat.messages for call in message.get("tool_calls", ())]
            texts = [value for each in chat.messages for key, value in each.items() if key != "tool_calls"]
            texts += [call["function"]["name"] for call in calls]
            texts += [call["id"] for call in calls if call["id"] is not None]
            assert all(isinstance(text, str) for text in texts)
            assert all(isinstance(tool, dict) for tool in chat.tools)
        finally:
            container[key] = whole


@pytest.mark.parametrize("name", FORMED)
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_nesting_without_end_is_refused(name: str, brackets: str) -> None:
    first, last = brackets if brackets == "[]" else ('{"a":', "}")
    with pytest.raises(RefusedError) as refused:
        FORMED[name][0]((first * 50_000 + "1" + last * 50_000).encode())
    assert refused.value.status == 400
