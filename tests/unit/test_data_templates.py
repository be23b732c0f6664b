"""The text of each template, character for character, and the tokenizers that it is refused with."""

import pytest

from megatron_dppo.data.prompts.templates import (
    TEMPLATES,
    prompt_tokens,
    require_tokenizer,
    without_dapo_instruction,
)
from megatron_dppo.errors import DataError
from tests.support.byte_tokenizers import (
    ASKED_TO_THINK_TEMPLATE,
    BOS,
    byte_tokenizer,
    qwen3_tokenizer,
    r1_tokenizer,
)
from tests.support.math_problems import DAPO_AFTER, DAPO_BEFORE

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
SHOWN = {
    "base": f"1 + 1?\n{BOXED}",
    "r1_distill": f"<｜begin▁of▁sentence｜><｜User｜>1 + 1? {BOXED}\n<｜Assistant｜><think>\n",
    "thinking": f"<|im_start|>user\n1 + 1?\n{BOXED}<|im_end|>\n<|im_start|>assistant\n",
    "dapo": f"<|im_start|>user\n{DAPO_BEFORE}1 + 1?{DAPO_AFTER}<|im_end|>\n<|im_start|>assistant\n",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompt_text_of_each_template(template: str) -> None:
    tokenizer = r1_tokenizer() if template == "r1_distill" else qwen3_tokenizer()
    require_tokenizer(template, tokenizer)
    asked = TEMPLATES[template]("1 + 1?")
    is_text = isinstance(asked, str)
    tokens = prompt_tokens(tokenizer, asked if is_text else None, None if is_text else asked)
    assert tokenizer.decode(list(tokens)) == SHOWN[template]
    if template == "r1_distill":
        assert tokens.count(tokenizer.convert_tokens_to_ids(BOS)) == 1


def test_dapos_instruction_comes_off() -> None:
    assert without_dapo_instruction(f"{DAPO_BEFORE}1 + 1?{DAPO_AFTER}") == "1 + 1?"
    assert without_dapo_instruction(f"{DAPO_BEFORE}1 + 1?") == f"{DAPO_BEFORE}1 + 1?"


def test_tokenizers_that_a_template_is_refused_with() -> None:
    with pytest.raises(DataError, match=r"r1_distill .*\d+ tokens.*BOS.*DeepSeek-R1-Distill"):
        require_tokenizer("r1_distill", qwen3_tokenizer())
    with pytest.raises(DataError, match="no BOS before a text"):
        require_tokenizer("r1_distill", byte_tokenizer(("<｜User｜>", "<｜Assistant｜>")))
    for template in ("thinking", "dapo"):
        with pytest.raises(DataError, match="without a chat template"):
            require_tokenizer(template, r1_tokenizer())
    with pytest.raises(DataError, match="enable_thinking"):
        require_tokenizer("thinking", byte_tokenizer(("<|im_start|>", "<|im_end|>"), ASKED_TO_THINK_TEMPLATE))
    require_tokenizer("base", r1_tokenizer())
    require_tokenizer("none", r1_tokenizer())
