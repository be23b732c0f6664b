"""How a problem is put to a model: templates by name, and the tokens that a prompt becomes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from megatron_dppo.data.rows import fault
from megatron_dppo.types import Message

_BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
_R1_USER, _R1_ASSISTANT = "<｜User｜>", "<｜Assistant｜>"

Asked = str | tuple[Message, ...]
"""What a model is asked: text, or the messages of a chat."""


def _base(problem: str) -> Asked:
    return f"{problem}\n{_BOXED}"


def _r1_distill(problem: str) -> Asked:
    return f"{_R1_USER}{problem} {_BOXED}\n{_R1_ASSISTANT}<think>\n"


def _thinking(problem: str) -> Asked:
    return (Message(role="user", content=f"{problem}\n{_BOXED}"),)


def _dapo(problem: str) -> Asked:
    return (Message(role="user", content=f"{_DAPO_BEFORE}{problem}{_DAPO_AFTER}"),)


TEMPLATES: Mapping[str, Callable[[str], Asked]] = {
    "base": _base,
    "r1_distill": _r1_distill,
    "thinking": _thinking,
    "dapo": _dapo,
}


def without_dapo_instruction(text: str) -> str:
    """The problem alone, where DAPO's instruction stands around it; else the text as it is."""
    if text.startswith(_DAPO_BEFORE) and text.endswith(_DAPO_AFTER):
        return text[len(_DAPO_BEFORE) : -len(_DAPO_AFTER)]
    return text


def prompt_tokens(tokenizer: Any, text: str | None, messages: Sequence[Message] | None) -> tuple[int, ...]:
    """Token ids of text, with the special tokens that the tokenizer adds, or of messages, by its chat template.

    Args:
        tokenizer: A transformers tokenizer.
        text: What is asked, or none.
        messages: What is asked as a chat, or none.
    """
    if text is not None:
        tokens = tokenizer.encode(text, add_special_tokens=True)
    else:
        assert messages is not None, "a prompt is either text or messages"
        tokens = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    return tuple(cast(list[int], tokens))


def require_tokenizer(template: str, tokenizer: Any) -> None:
    """See that a template means to this tokenizer what it should.

    Raises:
        DataError: `r1_distill` without DeepSeek's special tokens or a BOS; `thinking` or `dapo` without a chat
            template; `thinking` with one that does not think unless it is told to.
    """
    name = str(tokenizer.name_or_path)
    if template == "r1_distill":
        _require_r1_tokens(name, tokenizer)
    if template in ("thinking", "dapo"):
        require_chat_template(tokenizer)
    if template == "thinking":
        asked = list(cast(tuple[Message, ...], _thinking("1 + 1?")))
        options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False}
        plain = tokenizer.apply_chat_template(asked, **options)
        if plain != tokenizer.apply_chat_template(asked, **options, enable_thinking=True):
            found = f"a chat template that asks for thinking only with enable_thinking, in {name}"
            action = "Training gives a template no options: set its default in the tokenizer's chat_template."
            raise fault("--template thinking", found, "one that does so by itself", action)


def require_chat_template(tokenizer: Any) -> None:
    """See that messages can become tokens.

    Raises:
        DataError: The tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        action = "Choose --template base, or the tokenizer of a model that chats."
        where = str(tokenizer.name_or_path)
        raise fault(where, "a tokenizer without a chat template", "one, for prompts of messages", action)


def _require_r1_tokens(name: str, tokenizer: Any) -> None:
    wrong: list[str] = []
    for token in (_R1_USER, _R1_ASSISTANT):
        num_tokens = len(cast(list[int], tokenizer.encode(token, add_special_tokens=False)))
        if num_tokens != 1:
            wrong.append(f"{token} as {num_tokens} tokens")
    begin = cast(list[int], tokenizer.encode("1", add_special_tokens=True))[0]
    if tokenizer.bos_token_id is None or begin != tokenizer.bos_token_id:
        wrong.append("no BOS before a text")
    if wrong:
        expected = f"{_R1_USER} and {_R1_ASSISTANT} as one token each, after a BOS that the tokenizer adds"
        action = "Give --tokenizer the folder of a DeepSeek-R1-Distill model, or choose another --template."
        raise fault(f"--template r1_distill with {name}", "; ".join(wrong), expected, action)
