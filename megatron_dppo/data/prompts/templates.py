"""Prompt templates by name, the tokenisation of prompts, and a check that chat templates write all of them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from megatron_dppo.data.prompts.messages import Asked
from megatron_dppo.data.prompts.rows import fault
from megatron_dppo.errors import DataError
from megatron_dppo.types import AnswerForm, Message, Prompt

_BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
_R1_USER, _R1_ASSISTANT = "<｜User｜>", "<｜Assistant｜>"


PROBLEM = "{problem}"


@dataclass(frozen=True)
class Template:
    """The words around a problem."""

    text: str  # with PROBLEM in it
    asks_for: AnswerForm
    is_chat: bool = False  # whether the prompt is a message of the user, not text

    def __call__(self, problem: str) -> Asked:
        """Return the prompt with this problem."""
        text = self.text.replace(PROBLEM, problem)
        return (Message(role="user", content=text),) if self.is_chat else text


TEMPLATES: Mapping[str, Template] = {
    "base": Template(f"{PROBLEM}\n{_BOXED}", "boxed"),
    "r1_distill": Template(f"{_R1_USER}{PROBLEM} {_BOXED}\n{_R1_ASSISTANT}<think>\n", "boxed"),
    "thinking": Template(f"{PROBLEM}\n{_BOXED}", "boxed", is_chat=True),
    "dapo": Template(f"{_DAPO_BEFORE}{PROBLEM}{_DAPO_AFTER}", "answer_line", is_chat=True),
}


def with_instruction(problem: str, instruction: str) -> str:
    """Insert the problem at `{problem}` of the instruction, or else append the instruction as a line."""
    return instruction.replace(PROBLEM, problem) if PROBLEM in instruction else f"{problem}\n{instruction}"


_ASKS_FOR_LINE = re.compile(r"""(?:the form|on its own line)[^\n]{0,20}Answer:""", re.IGNORECASE)


def asked_form(prompt: Prompt, template: str | None) -> AnswerForm | None:
    """Return the answer form that a prompt's template or its words ask for, or `None` if neither does."""
    if template is not None and template in TEMPLATES:
        return TEMPLATES[template].asks_for
    text = prompt.text or "\n".join(message["content"] for message in prompt.messages or ())
    if r"\boxed" in text:
        return "boxed"
    return "answer_line" if _ASKS_FOR_LINE.search(text) else None


def without_dapo_instruction(text: str) -> str:
    """Return the problem without DAPO's instruction around it, or any other text unchanged."""
    if text.startswith(_DAPO_BEFORE) and text.endswith(_DAPO_AFTER):
        return text[len(_DAPO_BEFORE) : -len(_DAPO_AFTER)]
    return text


def prompt_tokens(
    tokenizer: Any,
    text: str | None,
    messages: Sequence[Message] | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Tokenise a text prompt with the tokenizer's special tokens, or messages with its chat template."""
    if messages is not None:
        require_chat_template(tokenizer)
        return tuple(
            cast(list[int], apply_chat_template(tokenizer, messages, tools, template_arguments, tokenize=True))
        )
    assert text is not None, "a prompt is either text or messages"
    return _encode(tokenizer, text)


def apply_chat_template(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    *,
    tokenize: bool = False,
    add_generation_prompt: bool = True,
) -> Any:
    """Apply the chat template to messages. Return text, or a list of token ids with `tokenize`."""
    arguments = dict(template_arguments or {}) | ({"tools": list(tools)} if tools else {})
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=add_generation_prompt,
            tokenize=tokenize,
            return_dict=False,
            **arguments,
        )
    except Exception as error:  # tokenizers and chat templates raise whatever they like
        raise _refusal(tokenizer, list(messages), error) from error


def _encode(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Return the token ids of text."""
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except Exception as error:  # tokenizers raise whatever they like
        raise _refusal(tokenizer, text, error) from error


def _refusal(tokenizer: Any, what: object, error: Exception) -> DataError:
    asked = repr(what)
    found = f"{asked if len(asked) <= 60 else asked[:60] + '...'} ({type(error).__name__}: {error})"
    action = "Correct or remove the prompt, or use the tokenizer that it was made for."
    return fault(f"the tokenizer in {tokenizer.name_or_path}", found, "a prompt that it encodes", action)


def require_tokenizer(template: str, tokenizer: Any) -> None:
    """Check that a template works with this tokenizer."""
    name = str(tokenizer.name_or_path)
    if template == "r1_distill":
        _require_r1_tokens(name, tokenizer)
    if template in ("thinking", "dapo", "chat"):
        require_chat_template(tokenizer)
    if template == "thinking":
        asked = list(cast(tuple[Message, ...], TEMPLATES["thinking"]("1 + 1?")))
        options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False}
        plain = tokenizer.apply_chat_template(asked, **options)
        if plain != tokenizer.apply_chat_template(asked, **options, enable_thinking=True):
            found = f"a chat template that asks for thinking only with enable_thinking, in {name}"
            action = (
                "Set its default in the tokenizer's chat_template, or give the source a column "
                'chat_template_kwargs with {"enable_thinking": true}, and take --template chat.'
            )
            raise fault("--template thinking", found, "one that does so by default", action)


def require_chat_template(tokenizer: Any) -> None:
    """Check that the tokenizer has a chat template."""
    if not tokenizer.chat_template:
        action = "Make text prompts (megatron-dppo prepare-data --template base), or use a chat model."
        where = f"the tokenizer in {tokenizer.name_or_path}"
        raise fault(where, "one without a chat template", "a chat template for prompts of messages", action)


def _require_r1_tokens(name: str, tokenizer: Any) -> None:
    wrong: list[str] = []
    for token in (_R1_USER, _R1_ASSISTANT):
        try:
            num_tokens = len(_encode(tokenizer, token, add_special_tokens=False))
        except DataError:
            num_tokens = 0
        wrong += [f"{token} as {num_tokens} tokens"] * (num_tokens != 1)
    if tokenizer.bos_token_id is None or prompt_tokens(tokenizer, "1", None)[0] != tokenizer.bos_token_id:
        wrong.append("no BOS before a text")
    if wrong:
        expected = f"{_R1_USER} and {_R1_ASSISTANT} as one token each, after a BOS that the tokenizer adds"
        action = "Give --tokenizer the folder of a DeepSeek-R1-Distill model, or choose another --template."
        raise fault(f"--template r1_distill with {name}", "; ".join(wrong), expected, action)


_MARK = "the-response-stands-here"


def whole_tokens(tokenizer: Any, prompt: Prompt) -> tuple[int, ...]:
    """Return the token ids of a prompt as in a rollout, after a check that no part of the prompt is missing."""
    options = (prompt.tools, prompt.template_arguments)
    tokens = prompt_tokens(tokenizer, prompt.text, prompt.messages, *options)
    if prompt.messages is not None:
        action = "Correct or remove the row, or use the chat template that the row was made for."
        require_whole(tokenizer, prompt.messages, *options, action)
    return tokens


def require_whole(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    template_arguments: Mapping[str, Any] | None,
    action: str,
) -> None:
    """Check that the chat template writes all of a chat, see `unwritten`.

    Args:
        tokenizer: Tokenizer with the chat template.
        messages: Messages of the chat.
        tools: Tools of the chat.
        template_arguments: Arguments of the chat template.
        action: What to do if it does not.
    """
    missing = [
        *unwritten(tokenizer, messages, tools, template_arguments),
        *_unread_arguments(tokenizer, tools, template_arguments),
    ]
    if missing:
        where = f"the chat template in {tokenizer.name_or_path}"
        raise fault(where, "; ".join(missing), "one that writes all of the prompt", action)


def unwritten(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    template_arguments: Mapping[str, Any] | None,
    num_last: int | None = None,
) -> list[str]:
    """Return which messages, tool calls, thoughts and tools of a chat the chat template omits.

    The chat is written with a mark in place of each text, so that no text is found in another message. The
    template may omit an assistant's text next to tool calls. It may omit thoughts unless it reads
    `reasoning_content` and they come after the last message of a user.

    Args:
        tokenizer: Tokenizer with the chat template.
        messages: Messages of the chat.
        tools: Tools of the chat.
        template_arguments: Arguments of the chat template.
        num_last: Number of messages at the end that are searched for; by default all of them and the tools.
    """
    marked = [_marked(message, number) for number, message in enumerate(messages)]
    text = cast(str, apply_chat_template(tokenizer, marked, tools, template_arguments))
    first = 0 if num_last is None else len(messages) - num_last
    users = (number for number, message in enumerate(messages) if message["role"] == "user")
    turn = max(users, default=-1) if "reasoning_content" in _source(tokenizer, tools) else len(messages)
    found = list(dict.fromkeys(_unwritten_messages(text, messages, marked, first, turn)))
    if num_last is None:
        found += _missing_tools(tokenizer, text, marked, tools, template_arguments)
    return found


def _marked(message: Message, number: int) -> Message:
    """Return a message with marks in place of its text, its thoughts, and the names in its tool calls."""
    fields: dict[str, Any] = dict(message)
    if message["content"].strip() or message["role"] == "tool":
        fields["content"] = f"text-{number}-of-the-chat"
    if fields.get("reasoning_content"):
        fields["reasoning_content"] = f"thought-{number}-of-the-chat"
    calls = list[Mapping[str, Any]]()
    for place, call in enumerate(_calls_of(message)):
        function = {**call.get("function", call), "name": f"call-{number}-{place}-of-the-chat"}
        calls.append({**call, "function": function} if "function" in call else function)
    return cast(Message, fields | ({"tool_calls": calls} if calls else {}))


def _calls_of(message: Message) -> Sequence[Mapping[str, Any]]:
    return cast(Mapping[str, Any], message).get("tool_calls") or ()


def _unwritten_messages(
    text: str, messages: Sequence[Message], marked: Sequence[Message], first: int, turn: int
) -> Iterator[str]:
    for number in range(first, len(messages)):
        message, marks = messages[number], cast(Mapping[str, Any], marked[number])
        calls, thought = _calls_of(message), marks.get("reasoning_content", "")
        if marks["content"].strip() not in text and not (calls and message["role"] == "assistant"):
            yield f"no message of {message['role']!r}"
        if number > turn and thought not in text:
            yield f"no 'reasoning_content' of {message['role']!r}"
        for call, written in zip(calls, _calls_of(marked[number]), strict=True):
            if written.get("function", written)["name"] not in text:
                yield f"no call of {call.get('function', call)['name']!r}"


def _missing_tools(
    tokenizer: Any,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    template_arguments: Mapping[str, Any] | None,
) -> Iterator[str]:
    if not tools:
        return
    names = [str(tool.get("function", tool).get("name", "")) for tool in tools]
    if text == cast(str, apply_chat_template(tokenizer, messages, None, template_arguments)):
        yield "no tools"
    else:
        yield from (f"no tool {name!r}" for name in names if name not in text)


def _unread_arguments(
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] | None,
    template_arguments: Mapping[str, Any] | None,
) -> Iterator[str]:
    if not template_arguments:
        return
    source = _source(tokenizer, tools)
    for name in template_arguments:
        if re.search(rf"\b{re.escape(name)}\b", source) is None:
            yield f"nothing that reads {name!r} of chat_template_kwargs"


def _source(tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None) -> str:
    return str(tokenizer.get_chat_template(tools=list(tools) if tools else None))


def turn_ends(tokenizer: Any) -> list[int]:
    """Return the first added token after an assistant message, in the middle and at the end of a chat."""
    question, response = Message(role="user", content="?"), Message(role="assistant", content=_MARK)
    chats = ([question, response, question], [question, response])
    texts = [cast(str, apply_chat_template(tokenizer, chat, add_generation_prompt=False)) for chat in chats]
    rests = [text.partition(_MARK)[2] for text in texts]
    added = set(cast(Mapping[int, Any], tokenizer.added_tokens_decoder))
    ids = [cast(list[int], tokenizer.encode(rest, add_special_tokens=False)) for rest in rests]
    firsts = [next((token for token in each if token in added), None) for each in ids]
    return list(dict.fromkeys(token for token in firsts if token is not None))
