"""Agents with a renderer of the library `renderers`: formats of families other than Qwen's."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from megatron_dppo.agents.rendering import (
    LibraryRendering,
    RendererError,
    Rendering,
    Thinking,
    problem_with_renderer,
)
from megatron_dppo.engines.base import mask_of
from tests.support.byte_tokenizers import byte_tokenizer, tools_tokenizer
from tests.unit.test_agent_histories import Numbered, kinds_of, played, result_of

ASKS = {"role": "user", "content": "2 + 3?"}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": NUMBERS}}]


@dataclass(frozen=True)
class Family:
    """A renderer, its models' special tokens and chat template, and a response with a call.

    Attributes:
        ends: Token that ends the response with a call, and one that ends the last response.
        between: Text from the response's end to the beginning of the next one.
        call_id: Id of the call in the response, if it has one.
    """

    name: str
    special: tuple[str, ...]
    template: str
    response: str
    ends: tuple[str, str]
    between: str
    thinks: bool = True
    call_id: str | None = None
    added: tuple[str, ...] = field(default=("<think>", "</think>"))


def turns(before: str, after: str, last: str, start: str = "") -> str:
    """A chat template that writes tools, and each message between two texts, `{role}` in the first one."""
    head = " + m.role + ".join(repr(part) for part in before.split("{role}"))
    called = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    return (
        f"{{{{ {start!r} }}}}{{% for t in tools or [] %}}{{{{ t | tojson }}}}{{% endfor %}}"
        f"{{% for m in messages %}}{{{{ {head} + m.content }}}}{called}{{{{ {after!r} }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {last!r} }}}}{{% endif %}}"
    )


FAMILIES = (
    Family(
        "glm-4.5",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        turns("<|{role}|>\n", "", "<|assistant|>", "[gMASK]<sop>"),
        "\n<think>well</think>\nI add.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value> 2</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        ("<|observation|>", "<|user|>"),
        "\n<tool_response>\n5\n</tool_response><|assistant|>",
        added=(
            *("<think>", "</think>", "<tool_call>", "</tool_call>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
    ),
    Family(
        "kimi-k2",
        (
            *(
                "<|im_user|>",
                "<|im_assistant|>",
                "<|im_system|>",
                "<|im_middle|>",
                "<|im_end|>",
                "[BOS]",
                "[EOS]",
            ),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        turns("<|im_{role}|>{role}<|im_middle|>", "<|im_end|>", "<|im_assistant|>assistant<|im_middle|>"),
        "I add.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:7<|tool_call_argument_begin|>"
        '{"a":  2, "b": 3}<|tool_call_end|><|tool_calls_section_end|>',
        ("<|im_end|>", "<|im_end|>"),
        "<|im_system|>tool<|im_middle|>## Return of functions.add:7\n5<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>",
        thinks=False,
        call_id="functions.add:7",
    ),
    Family(
        "minimax-m2",
        ("]~!b[", "]~b]", "[e~["),
        turns("]~b]{role}\n", "[e~[\n", "]~b]ai\n<think>\n", "]~!b["),
        'well\n</think>\n\nI add.\n<minimax:tool_call>\n<invoke name="add">\n'
        '<parameter name="b">3</parameter>\n<parameter name="a"> 2</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        ("[e~[", "[e~["),
        "\n]~b]tool\n<response>5</response>[e~[\n]~b]ai\n<think>\n",
        added=("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    Family(
        "qwen3",
        ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        turns("<|im_start|>{role}\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
        '<think>\nwell\n</think>\n\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a":  2, "b": 3}}\n'
        "</tool_call>",
        ("<|im_end|>", "<|im_end|>"),
        "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        added=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ),
)
BY_NAME = {family.name: family for family in FAMILIES}


def tokenizer_of(family: Family) -> Any:
    return byte_tokenizer(family.special, family.template, added=family.added, eos=family.ends[1])


class Rendered(Numbered):
    """An episode with a renderer."""

    def __init__(self, family: Family, *texts: str, thinking: Thinking = "keep", **options: Any) -> None:
        tokenizer = tokenizer_of(family)
        self.end = ""
        rendering = LibraryRendering(tokenizer, thinking, family.name)
        super().__init__(*texts, tokenizer=tokenizer, rendering=rendering, **options)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.name)
def test_a_tool_call_is_read_and_its_result_written_as_the_family_does(family: Family) -> None:
    call, last = family.ends

    async def play() -> Rendered:
        each = Rendered(family, f"{family.response}{call}", f"It is 5.{last}")
        said = await each.say(ASKS, tools=TOOLS)
        assert said["content"].strip() == "I add." and said.get("reasoning_content") == (
            "well" if family.thinks else None
        )
        (called,) = said["tool_calls"]
        assert called["id"] == "call_0_0" and set(called) == {"id", "type", "function"}
        assert called["function"]["name"] == "add"
        assert json.loads(called["function"]["arguments"]) == {"a": 2, "b": 3}
        said.pop("reasoning_content", None)
        final = await each.say(ASKS, said, result_of(said), tools=TOOLS)
        assert final["content"] == "It is 5." and "tool_calls" not in final
        return each

    each = played(play)
    assert each.input_of(1) == f"{each.input_of(0)}{family.response}{call}{family.between}"
    (part,) = each.account()
    assert kinds_of(each) == ["first", "continues"]
    assert int(mask_of(part).sum()) == len(each.sampled)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.name)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_call_that_cannot_be_read_stays_text(family: Family, tools: Any) -> None:
    """Without tools, or with a call that is cut."""
    text = family.response if tools is None else family.response[: -len(family.response) // 5]

    async def play() -> Rendered:
        each = Rendered(family, text, finish_reason="stop" if tools is None else "length")
        said = await each.say(ASKS, **({} if tools is None else {"tools": tools}))
        assert "tool_calls" not in said and said["content"].strip() != ""
        assert "add" in said["content"]
        return each

    played(play).account()


def test_a_later_system_message_that_the_template_refuses_is_a_users() -> None:
    family = BY_NAME["qwen3"]
    refused = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('') }}{% endif %}"
    refusing = family.template.replace("{% for m in messages %}", f"{{% for m in messages %}}{refused}")
    now = {"role": "system", "content": "Now!"}

    async def play() -> Rendered:
        each = Rendered(replace(family, template=refusing), "5<|im_end|>", "6<|im_end|>")
        said = await each.say(ASKS, now)
        await each.say(ASKS, now, said, now)
        return each

    each = played(play)
    later = "<|im_start|>user\nNow!<|im_end|>\n<|im_start|>assistant\n"
    assert each.input_of(0).endswith(later)
    assert each.input_of(1) == f"{each.input_of(0)}5<|im_end|>\n{later}"


@pytest.mark.parametrize(("thinking", "kind"), [("keep", "continues"), ("template", "template")])
def test_thinking_before_a_new_question_is_kept_or_cut(thinking: Thinking, kind: str) -> None:
    """By a renderer whose template leaves out earlier thinking, which a difference of texts cannot append."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    family = BY_NAME["qwen3"]

    async def play() -> Rendered:
        each = Rendered(family, "<think>\nwell\n</think>\n\n5<|im_end|>", "6<|im_end|>", thinking=thinking)
        each.tokenizer.chat_template = template.replace("loop.last", "loop.last and false")
        said = await each.say(ASKS)
        said["content"] = "5"
        each.tokenizer.chat_template = template
        await each.say(ASKS, said, {"role": "user", "content": "Sure?"})
        return each

    each = played(play)
    each.account()
    assert kinds_of(each) == ["first", kind]


def test_ids_that_the_family_samples_are_in_every_prompt_and_ours_are_the_clients() -> None:
    """A branch, and a chat that is rendered from scratch, have the sampled ids, too."""
    family = BY_NAME["kimi-k2"]

    async def play() -> Rendered:
        each = Rendered(family, *[family.response + "<|im_end|>"] * 2, *["no<|im_end|>"] * 3, train="all")
        said = [await each.say(ASKS, tools=TOOLS) for _ in range(2)]
        assert [each["tool_calls"][0]["id"] for each in said] == ["call_0_0", "call_1_0"]
        for one in said:
            await each.say(ASKS, one, result_of(one, one["tool_calls"][0]["id"]), tools=TOOLS)
        edited = said[1] | {"content": "I do."}
        await each.say(ASKS, edited, result_of(edited), tools=TOOLS)
        return each

    each = played(play)
    assert len(each.account()) == 3
    assert kinds_of(each) == ["first", "repeats", "continues", "continues", "edited"]
    for number, node in ((2, 0), (3, 1)):
        assert f"## Return of functions.add:7\ncall_{node}_0" in each.input_of(number)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("glm-4.5", "another way"),
        ("nothing", "nothing"),
        ("minimax-m2", "minimax-m2"),
        ("deepseek-v3", "deepseek-v3"),
    ],
)
def test_a_renderer_that_does_not_fit_is_refused(name: str, found: str) -> None:
    family = BY_NAME["glm-4.5"]
    tokenizer = tokenizer_of(family)
    assert problem_with_renderer(tokenizer, "glm-4.5") is None
    if name == "glm-4.5":
        tokenizer.chat_template = turns("{role}: ", "\n", "assistant: ")
    problem = problem_with_renderer(tokenizer, name)
    assert problem is not None and problem.where == "rollout.agent.renderer" and found in problem.found
    if name != "glm-4.5":
        with pytest.raises(RendererError):
            LibraryRendering(tokenizer, "keep", name)


def test_arguments_of_the_template_reach_the_renderer() -> None:
    family = BY_NAME["qwen3"]
    rendering = LibraryRendering(tokenizer_of(family), "keep", "qwen3")
    new, response = [{"role": "user", "content": "Sure?"}], rendering._tokenizer.encode("5<|im_end|>")
    loud, quiet = (
        rendering.continuation([1], response, [ASKS], "", new, (), arguments)
        for arguments in ({}, {"enable_thinking": False})
    )
    assert loud is not None and quiet is not None
    added = rendering._tokenizer.decode(quiet[loud.numel() :])
    assert added == "<think>\n\n</think>\n\n"
    with pytest.raises(RendererError):
        rendering.continuation([1], response, [ASKS], "", new, (), {"unknown": 1})


def test_check_knows_whether_a_template_appends() -> None:
    moving = turns("<|im_start|>{role}\n", "<|im_end|>\n", "<|im_start|>assistant\n").replace(
        "+ m.content", "+ ('!' if loop.last else '') + m.content"
    )
    assert Rendering(tools_tokenizer(), "keep").appends()
    assert not Rendering(byte_tokenizer(("<|im_start|>", "<|im_end|>"), moving), "keep").appends()
    family = BY_NAME["qwen3"]
    tokenizer = byte_tokenizer(family.special, moving, added=family.added)
    assert LibraryRendering(tokenizer, "keep", "qwen3").appends(), "the renderer does"
