"""Tokenizers of bytes, with the special tokens and chat templates of models that templates are for."""

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


def byte_tokenizer(special: tuple[str, ...], chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A token for each byte, and special tokens; one that begins with "<｜begin" is put before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", *special)])
    if BOS in special:
        number = bytes_only.token_to_id(BOS)
        bytes_only.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, number)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, pad_token="<pad>", bos_token=BOS if BOS in special else None
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def qwen3_tokenizer() -> PreTrainedTokenizerFast:
    """Chats, and thinks where it is not told otherwise."""
    return byte_tokenizer(("<|im_start|>", "<|im_end|>"), QWEN3_TEMPLATE)


def r1_tokenizer() -> PreTrainedTokenizerFast:
    """As DeepSeek-R1-Distill's: full-width special tokens, and a BOS before every text."""
    return byte_tokenizer((BOS, USER, ASSISTANT))


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """The folder, with the tokenizer in it."""
    tokenizer.save_pretrained(folder)
    return folder
