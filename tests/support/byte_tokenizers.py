"""Tokenizers of bytes, with the special tokens and chat templates of models that templates are for."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
QWEN3_TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
ASKED_TO_THINK_TEMPLATE = QWEN3_TEMPLATE.replace("is defined and enable_thinking is false", "is not defined")
TOOLS_TEMPLATE = (  # as Qwen's: other roles are left out without a word
    "{%- for t in tools or [] %}{{ '<|im_start|>tool\n' + (t | tojson) + '<|im_end|>\n' }}{%- endfor %}"
    "{%- for m in messages if m.role in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) }}{%- endfor %}"
    "{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)


def byte_tokenizer(
    special: Sequence[str],
    chat_template: str | None = None,
    *,
    added: Sequence[str] = (),
    around: str | None = None,
    bos: str | None = None,
    eos: str | None = None,
) -> PreTrainedTokenizerFast:
    """A token for each byte, special tokens, and added tokens that are not special.

    `around` is a template for every text, such as "<s> $A </s>". A tokenizer with BOS puts that token
    before it.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", *special)])
    bytes_only.add_tokens([AddedToken(token, special=False) for token in added])
    if BOS in special:
        bos, around = BOS, f"{BOS} $A"
    if around is not None:
        tokens = [(token, bytes_only.token_to_id(token)) for token in special if token in around.split()]
        bytes_only.post_processor = processors.TemplateProcessing(single=around, special_tokens=tokens)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, pad_token="<pad>", bos_token=bos, eos_token=eos
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def qwen3_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of a chat model that thinks unless an argument turns it off."""
    return byte_tokenizer(("<|im_start|>", "<|im_end|>"), QWEN3_TEMPLATE)


def tools_tokenizer(*, thinks_in_special_tokens: bool = False) -> PreTrainedTokenizerFast:
    """Chats with tools, ends turns with <|im_end|>, and thinks unless an argument turns that off."""
    special, thoughts = ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), ("<think>", "</think>")
    if thinks_in_special_tokens:
        special, thoughts = (*special, *thoughts), ()
    return byte_tokenizer(special, TOOLS_TEMPLATE, added=thoughts, eos="<|im_end|>")


def llama_tokenizer(around: str = "<s> $A", chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Puts <s> before every text, or uses the template `around`."""
    return byte_tokenizer(("<s>", "</s>"), chat_template, around=around, bos="<s>", eos="</s>")


def r1_tokenizer() -> PreTrainedTokenizerFast:
    """As DeepSeek-R1-Distill's: full-width special tokens, and a BOS before every text."""
    return byte_tokenizer((BOS, USER, ASSISTANT))


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """The folder, with the tokenizer in it."""
    tokenizer.save_pretrained(folder)
    return folder
