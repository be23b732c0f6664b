"""Tokenizers of whole words: one of the sanity task's words, with a chat template."""

from collections.abc import Mapping

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_dppo.data.prompts.sanity_task import VOCABULARY


def word_tokenizer(vocabulary: Mapping[str, int], template: str, **special: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer that splits at white space, with a chat template and special tokens."""
    words = Tokenizer(models.WordLevel(dict(vocabulary)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = word_tokenizer(
    VOCABULARY,
    "<bos> {% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}={% endif %}",
    pad_token="<pad>",
    bos_token="<bos>",
    eos_token="<eos>",
)
