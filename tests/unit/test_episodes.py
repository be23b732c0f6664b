"""The tree of an episode: parents, forks, limits, time and refusals, with a scripted engine."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_dppo.agents.chat import Chat, RefusedError, parse_response, read_chat
from megatron_dppo.agents.episode import Episode, EpisodeLimits
from megatron_dppo.agents.harness import AgentOutcome, checked_outcome
from megatron_dppo.agents.rendering import Rendering, Thinking
from megatron_dppo.agents.tree import Node, Said
from megatron_dppo.engines.base import Request, SamplingParams, mask_of, num_tokens_before, response_alone
from megatron_dppo.runtime.concurrency import run_loop
from megatron_dppo.types import FinishReason, Prompt, Sample
from tests.support.byte_tokenizers import TOOLS_TEMPLATE, byte_tokenizer, tools_tokenizer
from tests.support.scripted_policy import ScriptedPolicy

LIMITS = EpisodeLimits(600.0, 60.0, 9, "main", 2000, None)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
ASKS = {"role": "user", "content": "2 + 3?"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
THINKING_TEMPLATE = (  # as Qwen3's: earlier thinking is written only after the last message of a user
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{ m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
LATEST_TEMPLATE = (  # tools stand before the last message, so earlier text moves
    "{%- for m in messages %}{%- if loop.last %}[TOOLS]{%- endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
TOKENIZER = tools_tokenizer()

SYSTEM_TEMPLATES = {  # of what they do with a system message that is not the first message
    "raises": THINKING_TEMPLATE.replace(
        "{{ '<|im_start|>'",
        "{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system') }}{%- endif %}"
        "{{ '<|im_start|>'",
    ),
    "drops": TOOLS_TEMPLATE.replace(
        "for m in messages if m.role in ['system', 'user', 'assistant', 'tool']",
        "for m in messages if m.role != 'system' or m == messages[0]",
    ),
    "moves": "{%- for m in messages if m.role == 'system' %}{{ m.content }}{%- endfor %}"
    + TOOLS_TEMPLATE.replace("['system', ", "["),
}


class Played(ScriptedPolicy):
    """An episode whose responses are given texts."""

    def __init__(
        self,
        *texts: str,
        tokenizer: Any = TOKENIZER,
        thinking: Thinking = "keep",
        finish_reason: FinishReason = "stop",
        rendering: Rendering | None = None,
        **limits: Any,
    ) -> None:
        super().__init__(tokenizer, *texts, finish_reason=finish_reason)
        row = Prompt("0", "5", "test", messages=({"role": "user", "content": "?"},))
        request = Request("rollout0/0/0+0", (1, 2), (3, 4, 5), prompt=row, is_chat=True)
        most = limits.pop("max_response_tokens", 1000)
        rendering = rendering or Rendering(tokenizer, thinking)
        self.episode = Episode(request, SamplingParams(most), self.ask, rendering, replace(LIMITS, **limits))

    async def say(self, *messages: Any, **options: Any) -> dict[str, Any]:
        """Return the message of a reply."""
        body = json.dumps({"messages": messages} | options).encode()
        reply = await self.episode.call(read_chat(body), body, is_retry=False)
        return json.loads(reply.json())["choices"][0]["message"]


def played(play: Callable[[], Coroutine[Any, Any, Played]]) -> Played:
    return run_loop(play())


@pytest.mark.parametrize(
    ("posted", "returned", "expected"), [(1.0, 0.0, 0.0), (0.0, None, 0.0), (1.0, None, 1.0), (None, 0.0, 0.0)]
)
def test_a_reward_of_0_is_a_reward(posted: float | None, returned: float | None, expected: float) -> None:
    """What the harness returns wins over what it posted, and either is 0 or absent."""

    async def play() -> Played:
        each = Played("It is 5.")
        await each.say(ASKS)
        return each

    each = played(play)
    each.episode.posted = checked_outcome(posted)
    assert each.episode.result(checked_outcome(returned)).episode.reward == expected  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("changed", ["content", "tools", "system"])
def test_a_history_that_was_not_sampled_begins_a_new_conversation(changed: str) -> None:
    async def play() -> Played:
        each = Played(f"I add.{CALL}", "5", "6")
        said = await each.say(ASKS, tools=TOOLS)
        chat, tools = [ASKS, said, {"role": "tool", "tool_call_id": "call_0_0", "content": "5"}], TOOLS
        if changed == "content":
            said["content"] = "I subtract."
        elif changed == "tools":
            tools = [*TOOLS, *TOOLS]
        else:
            chat = [{"role": "system", "content": "Be brief."}, *chat]
        await each.say(*chat, tools=tools)
        return each

    each = played(play)
    assert each.asked[1].partial is None and each.asked[1].noise_key != each.asked[0].noise_key
    result = each.episode.result(AgentOutcome(1.0))
    assert result.episode is not None and result.episode.num_forks == 1
    assert result.tokens.tolist() == each.ids(f"I add.{CALL}<|im_end|>"), "the one with most sampled tokens"
    assert result.episode.num_untrained_tokens == len(each.ids("5<|im_end|>"))


def test_ids_of_tool_calls_distinguish_equal_responses() -> None:
    async def play() -> Played:
        each = Played(CALL, CALL, "first", "second")
        said = [await each.say(ASKS, tools=TOOLS) for _ in range(2)]
        for one in said:
            answer = {"role": "tool", "tool_call_id": one["tool_calls"][0]["id"], "content": "5"}
            await each.say(ASKS, one, answer, tools=TOOLS)
        return each

    each = played(play)
    keys = [request.noise_key for request in each.asked]
    assert keys[0] != keys[1] and keys[2:] == keys[:2]


@pytest.mark.parametrize(
    ("template", "thinking", "is_continued"),
    [
        (THINKING_TEMPLATE, "keep", True),
        (THINKING_TEMPLATE, "template", False),
        (LATEST_TEMPLATE, "keep", False),
    ],
)
def test_conversation_continues_only_if_the_template_appends(
    template: str, thinking: Thinking, is_continued: bool
) -> None:
    tokenizer = byte_tokenizer(("<|im_start|>", "<|im_end|>"), template, eos="<|im_end|>")

    async def play() -> Played:
        each = Played("<think>\nwell\n</think>\n\n5", "6", tokenizer=tokenizer, thinking=thinking)
        said = await each.say(ASKS)
        await each.say(ASKS, said, {"role": "user", "content": "Sure?"})
        return each

    each = played(play)
    assert (each.asked[1].partial is not None) == is_continued
    episode = each.episode.result(AgentOutcome(0.0)).episode
    assert episode is not None and episode.calls[1].kind == ("continues" if is_continued else "template")
    assert ("well" in each.input_of(1)) == is_continued, "a new one is what the template writes"


@pytest.mark.parametrize("template", SYSTEM_TEMPLATES)
def test_every_system_message_is_written_and_a_later_one_is_appended(template: str) -> None:
    tokenizer = byte_tokenizer(("<|im_start|>", "<|im_end|>"), SYSTEM_TEMPLATES[template], eos="<|im_end|>")
    first, second, third = ({"role": "system", "content": text} for text in ("Be brief.", "Use tools.", "Now!"))

    async def play() -> Played:
        each = Played("5", "6", tokenizer=tokenizer)
        said = await each.say(first, second, ASKS, third)
        await each.say(first, second, ASKS, third, said, third)
        return each

    each = played(play)
    assert "Be brief.\n\nUse tools." in each.input_of(0)
    later = "<|im_start|>user\nNow!<|im_end|>\n<|im_start|>assistant\n"
    assert each.input_of(0).endswith(later) and each.input_of(1).endswith(f"<|im_end|>\n{later}")
    assert [node.kind for node in each.episode._nodes] == ["first", "continues"]


def test_a_retry_gets_the_same_bytes_and_another_equal_call_gets_a_new_response() -> None:
    body = json.dumps({"messages": [ASKS], "stream": True}).encode()

    async def play() -> Played:
        each, chat = Played("1", "2"), read_chat(body)
        first = asyncio.create_task(each.episode.call(chat, body, is_retry=False))
        await asyncio.sleep(0)
        first.cancel()  # the client is gone
        again = [await each.episode.call(chat, body, is_retry=True) for _ in range(2)]
        assert len({reply.stream(has_usage=True) for reply in again}) == 1
        assert [reply.message["content"] for reply in again] == ["1", "1"]
        assert (await each.episode.call(chat, body, is_retry=False)).message["content"] == "2"
        return each

    assert len(played(play).asked) == 2


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("added", ["", "</code>", "</code>\nI called it.", "</Code>"])
def test_a_response_ends_with_the_token_that_completes_a_stop_string(thinks: bool, added: str) -> None:
    thought = "<think>\nwell\n</think>\n\n" * thinks
    kept, dropped = f"{thought}add(2, 3) \n</code>", "Observation: 6<|im_end|>"

    async def play() -> Played:
        each = Played(f"{kept}Observation: 6", "It is 5.")
        said = await each.say(ASKS, stop=["Observation:", "</code>"])
        assert said["content"].rstrip() == "add(2, 3)"
        said["content"] += added
        await each.say(ASKS, said, {"role": "user", "content": "5"}, stop="Observation:")
        return each

    each = played(play)
    result = each.episode.result(AgentOutcome(1.0))
    assert result.episode is not None
    counts = [len(each.ids(text)) for text in (kept, "It is 5.<|im_end|>", dropped)]
    assert [call.num_tokens for call in result.episode.calls] == counts[:2]
    if added == "</Code>":
        assert result.episode.calls[1].kind == "edited"
        return
    assert result.episode.calls[0].response == kept and result.episode.calls[1].kind == "continues"
    end = added.removeprefix("</code>") + "<|im_end|>\n<|im_start|>user\n5<|im_end|>\n<|im_start|>assistant\n"
    assert each.input_of(1) == each.input_of(0) + kept + end
    assert result.tokens[mask_of(result)].tolist() == each.ids(f"{kept}It is 5.<|im_end|>")
    assert torch.equal(result.log_probs, torch.where(mask_of(result), result.tokens / -100, 0))
    spans = [(span.start, span.stop) for span in result.weight_versions]
    assert spans == [(0, counts[0]), (result.tokens.numel() - counts[1], result.tokens.numel())]
    assert result.episode.num_untrained_tokens == counts[2], "sampled, and after the end"


def test_a_response_that_a_limit_cut_ends_with_a_stop_string_before_it() -> None:
    async def play() -> Played:
        each = Played("5. I am sure.", finish_reason="length")
        for stop, reason in ((None, "length"), (["."], "stop"), (["?"], "length")):
            body = json.dumps({"messages": [ASKS], "stop": stop}).encode()
            each.texts.append("5. I am sure.")
            reply = await each.episode.call(read_chat(body), body, is_retry=False)
            assert reply.finish_reason == reason
        assert [node.completion.finish_reason for node in each.episode._nodes] == ["length", "stop", "length"]
        return each

    played(play)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_calls": 1}, "max_calls"),
        ({"max_response_tokens": 30}, "max_response_tokens"),
        ({"max_prompt_tokens": 40}, "max_prompt_tokens"),
    ],
)
def test_calls_above_a_limit_are_refused_and_a_harness_that_then_fails_is_cut(
    limits: dict[str, Any], said: str
) -> None:
    async def play() -> Played:
        each = Played("1", **limits)
        first = await each.say(ASKS)
        more = [first, {"role": "user", "content": "Sure? " * 9}]
        chat = [ASKS, *more] if said != "max_prompt_tokens" else [more[1]]
        with pytest.raises(RefusedError, match=said) as refused:
            await each.say(*chat)
        assert refused.value.status == 400 and refused.value.code == "context_length_exceeded"
        return each

    result = played(play).episode.result("the harness raised BadRequestError")
    assert result.episode is not None and result.episode.fault is None and result.finish_reason == "length"


def test_an_episode_that_is_over_replies_to_nothing() -> None:
    async def play() -> Played:
        each = Played("1")
        call = asyncio.create_task(each.say(ASKS))
        await asyncio.sleep(0)
        each.episode.seal()
        for late in (call, each.say(ASKS)):
            with pytest.raises(RefusedError) as refused:
                await late
            assert refused.value.status == 409
        return each

    result = played(play).episode.result(AgentOutcome(1.0))
    assert result.episode is not None and result.episode.fault is not None


def test_the_clock_runs_only_while_the_harness_works() -> None:
    async def play() -> Played:
        each = Played("1", episode_timeout_s=50.0, call_timeout_s=90.0)
        assert each.episode.seconds_left() == 1.0, "the worker starts"
        each.episode.begin()
        assert 0 < each.episode.seconds_left() <= 50.0
        call = asyncio.create_task(each.say(ASKS))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert each.episode.seconds_left() == 1.0, "a call is sampled"
        await call
        assert 0 < each.episode.seconds_left() <= 50.0
        short = Played("1", episode_timeout_s=50.0, call_timeout_s=1e-9)
        short.episode.begin()
        assert short.episode.seconds_left() <= 0
        return each

    played(play)


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 2},
        {"logit_bias": {"3": 1.0}},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"stop": ["x", ""]},
        {"stop": {"x": 1}},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"logprobs": True},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"content": "1"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    ],
)
def test_options_that_a_rollout_cannot_have_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as refused:
        read_chat(json.dumps({"messages": [ASKS]} | changes).encode())
    assert refused.value.status == 400 and "found" in refused.value.body["error"]["message"]


def test_options_that_change_no_token_are_accepted() -> None:
    chat = read_chat(
        json.dumps(
            {
                "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}, ASKS],
                **{"n": 1, "stop": [], "response_format": {"type": "text"}, "tool_choice": "required"},
                **{"temperature": 0.3, "top_p": 0.5, "seed": 1, "tools": TOOLS},
                **{"max_tokens": 9, "max_completion_tokens": 7},
            }
        ).encode()
    )
    assert isinstance(chat, Chat) and chat.max_tokens == 7 and chat.may_call and not chat.is_stream
    assert chat.messages[0] == {"role": "system", "content": "a"}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{1}</tool_call>",
        '<tool_call>["add"]</tool_call>',
        "<tool_call>{}",
        '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": 3.5}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": Infinity}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "{"}}</tool_call>'.replace('"{"', "{" * 5000),
        '<think>I call <tool_call>{"name": "add", "arguments": {}}</tool_call>',
    ],
)
def test_a_tool_call_that_does_not_parse_is_text(text: str) -> None:
    assert parse_response(text, 0, may_call=True) == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "found",
    [
        {"name": "add", "arguments": {"a": 2}},
        {"name": "add", "arguments": '{"a": 2}'},
        {"name": "add", "parameters": {"a": 2}},
    ],
)
def test_arguments_are_an_object(found: dict[str, Any]) -> None:
    text = f"<tool_call>{json.dumps(found)}</tool_call>"
    (call,) = parse_response(f"done</think>{text}", 0, may_call=True)["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 2}}
    assert "tool_calls" not in parse_response(text, 0, may_call=True, is_thinking=True)


def test_a_thought_that_the_prompt_opens_hides_calls() -> None:
    opening = TOOLS_TEMPLATE.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    assert opening != TOOLS_TEMPLATE
    tokenizer = byte_tokenizer(("<|im_start|>", "<|im_end|>"), opening)

    async def play() -> Played:
        each = Played(CALL, f"no</think>{CALL}", tokenizer=tokenizer)
        said = [await each.say(ASKS, tools=TOOLS) for _ in range(2)]
        assert [len(message.get("tool_calls", ())) for message in said] == [0, 1]
        return each

    played(play)


def test_each_call_has_the_kind_of_its_match() -> None:
    brief, other = ({"role": "system", "content": text} for text in ("Be brief.", "Be exact."))

    def asks(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    async def play() -> Played:
        each = Played(*"abcdefgh", train="tools")
        first = await each.say(brief, ASKS)
        await each.say(brief, ASKS, first, asks("a"))
        await each.say(brief, ASKS, first, asks("b"))
        await each.say(brief, ASKS)
        await each.say(brief, ASKS, first, asks("c"), tools=TOOLS)
        await each.say(brief, ASKS, {"role": "assistant", "content": "I mean no."}, asks("d"))
        await each.say(brief, asks("Look."))
        await each.say(other, ASKS)
        return each

    each = played(play)
    episode = each.episode.result(AgentOutcome(0.0)).episode
    assert episode is not None
    kinds = ("first", "continues", "branch", "repeats", "tools", "edited", "another", "another")
    assert tuple(call.kind for call in episode.calls) == kinds
    assert [call.parent for call in episode.calls] == [None, 0, 0, *[None] * 5]
    assert [call.is_trained for call in episode.calls] == [number == 4 for number in range(8)], "with tools"
    assert "".join(call.response for call in episode.calls) == "abcdefgh"
    for call, asked in zip(episode.calls, each.asked, strict=True):
        assert call.num_prompt_tokens == len(asked.prompt_tokens) + num_tokens_before(asked)
        assert call.num_tokens == len(each.ids(f"{call.response}<|im_end|>"))


def test_a_path_may_be_longer_than_the_recursion_limit() -> None:
    request = Request("0", (), (0, 0, 0))
    completion = response_alone("0", torch.tensor([1]), torch.zeros(1), "stop", None, None, ())
    node = None
    for number in range(3000):
        node = Node(number, "continues", node, request, completion, Said(), (), "", 0)
    assert node is not None and [each.number for each in node.path] == list(range(3000))


def trained_text(each: Played, completion: Sample) -> str:
    """Return the text of the tokens that train."""
    return each.tokenizer.decode(completion.tokens[mask_of(completion)])


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ("main", ["sum five<|im_end|>"]),
        ("tools", ["sum five<|im_end|>", "sub<|im_end|>"]),
        ("all", ["sum five<|im_end|>", "a title of many words<|im_end|>", "sub<|im_end|>"]),
    ],
)
def test_each_tree_that_is_chosen_trains(train: Any, expected: list[str]) -> None:
    """A longer title without tools, the task, and a sub-agent with tools."""

    async def play() -> Played:
        each = Played("a title of many words", "sum five", "sub", train=train)
        await each.say({"role": "user", "content": "Name it."})
        await each.say(ASKS, tools=TOOLS)
        await each.say({"role": "user", "content": "Look."}, tools=TOOLS)
        return each

    each = played(play)
    result = each.episode.result(AgentOutcome(0.0))
    parts = [result, *result.branches]
    assert sorted(trained_text(each, part) for part in parts) == sorted(expected)
    assert len({part.prompt_tokens for part in parts}) == len(parts) and result.episode is not None
    num_sampled = len(each.ids("a title of many words<|im_end|>sum five<|im_end|>sub<|im_end|>"))
    num_trained = sum(int(mask_of(part).sum()) for part in parts)
    assert result.episode.num_untrained_tokens == num_sampled - num_trained
