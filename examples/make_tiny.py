"""Make the tiny models and prompts that examples/tiny.toml names.

    python examples/make_tiny.py runs/tiny

One random model of each family in Hugging Face form, with the quickstart's tokenizer and prompts; one for
examples/tiny_gem.toml, all of whose words but `<unk>` are answers to tasks of the Gem library; one that has a
chat template and writes digits and `####`; and one that calls a tool.
"""

import argparse
import copy
import itertools
import runpy
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_dppo.architectures import registry
from megatron_dppo.data.prompts import sanity_task
from megatron_dppo.runtime.files import make_readable, write_jsonl

FAMILIES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}
"""Folder of each tiny model, and its architecture."""
_SIZES: dict[str, Any] = {
    "vocab_size": len(sanity_task.TOKENS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.5,
    "eos_token_id": sanity_task.VOCABULARY[sanity_task.EOS],
}
_EXPERTS, _TOP_K = 8, 2
_SIGMOID: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": _EXPERTS,
    "num_experts_per_tok": _TOP_K,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-6,  # as transformers norms latents, whatever config.json says
}
_LATENT: dict[str, Any] = _SIGMOID | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_SHARED: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_experts": _EXPERTS,
    "num_experts_per_tok": _TOP_K,
}
_LINEAR: dict[str, Any] = {
    "full_attention_interval": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {
        "moe_intermediate_size": 16,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": _TOP_K,
        "norm_topk_prob": True,
    },
    "Qwen2MoeForCausalLM": {
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": _TOP_K,
    },
    "MixtralForCausalLM": {"num_local_experts": _EXPERTS, "num_experts_per_tok": _TOP_K},
    "MiniMaxM2ForCausalLM": {
        "num_local_experts": _EXPERTS,
        "num_experts_per_tok": _TOP_K,
        "rotary_dim": 8,
    },
    "GptOssForCausalLM": {
        "num_local_experts": _EXPERTS,
        "num_experts_per_tok": _TOP_K,
        "sliding_window": 4,  # shorter than the sequences
        "swiglu_limit": 3.0,  # which small activations reach
        "rope_parameters": {key: value for key, value in YARN.items() if "mscale" not in key}
        | {"truncate": False},
    },
    "Qwen3NextForCausalLM": _LINEAR | _SHARED,
    "Qwen3_5ForCausalLM": _LINEAR,
    "Qwen3_5MoeForCausalLM": _LINEAR | _SHARED,
    "Glm4MoeForCausalLM": _SIGMOID | {"attention_bias": True, "rope_parameters": HALF},
    "DeepseekV3ForCausalLM": _LATENT | {"n_group": 2, "topk_group": 1, "rope_parameters": YARN},
    "Glm4MoeLiteForCausalLM": {key: value for key, value in _LATENT.items() if key != "first_k_dense_replace"},
}
"""What a tiny model of an architecture has beside or instead of the sizes that all have, in tests too."""


def main() -> None:
    """Write everything to the folder of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write to")
    write_tiny(parser.parse_args().out)


def write_tiny(folder: Path) -> None:
    """Write a folder for each of `FAMILIES`, `gem`, `chat` and `tools`, and files of prompts."""
    quickstart = runpy.run_path(str(Path(__file__).parent / "quickstart" / "make_model.py"))
    tokenizer = quickstart["make_tokenizer"]()
    derived = {"head_dim": _SIZES["hidden_size"] // _SIZES["num_attention_heads"]}
    for name, architecture in FAMILIES.items():
        is_derived = registry.FAMILIES[architecture].sglang.derives_head_dim  # whatever head_dim says
        write_model(folder / name, architecture, **derived if is_derived else {})
        tokenizer.save_pretrained(folder / name)
    sanity_task.write_prompts(folder / "prompts.jsonl", 64, seed=0)
    sanity_task.write_prompts(folder / "held_out.jsonl", 4, seed=0, split="held_out")
    chat = chat_tokenizer()
    own = {"vocab_size": len(chat), "eos_token_id": chat.eos_token_id, "initializer_range": 0.1}
    write_model(folder / "chat", "Qwen3MoeForCausalLM", **own)
    chat.save_pretrained(folder / "chat")
    write_tool_model(folder / "tools")
    gem = gem_tokenizer()
    write_model(folder / "gem", "Qwen3ForCausalLM", vocab_size=len(gem), max_position_embeddings=1024)
    gem.save_pretrained(folder / "gem")
    write_jsonl(folder / "gem.jsonl", [{"id": f"{n}", "prompt": "Solve:", "answer": ""} for n in range(64)])


def gem_tokenizer() -> PreTrainedTokenizerFast:
    """Every answer to Acre and every move of the small Sudoku is a token of its own; other words are one."""
    moves = (" ".join(move) for move in itertools.product("1234", repeat=3))
    answers = [rf"\boxed{{{answer}}}" for answer in ("on", "off", "undetermined", *moves)]
    gem = word_tokenizer()
    gem.backend_tokenizer.add_tokens([AddedToken(answer, normalized=False) for answer in answers])
    return gem


def word_tokenizer(*names: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with these words, separated by spaces; all others are `<unk>`."""
    ids = {name: id for id, name in enumerate(("<pad>", "<bos>", "<eos>", "<unk>", *names))}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Digits and `####` are tokens, and all other words are one; every message ends with `<eos>`.

    The template writes the names of the tools first, and calls after the text of their message.
    """
    chat = word_tokenizer("####", *"0123456789")
    chat.chat_template = (
        "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
        "{% for message in messages %}{{ message['content'] }} "
        "{% for call in message['tool_calls'] or [] %}"
        "<tool_call>{{ call['function'] | tojson(separators=(',', ':')) }}</tool_call> {% endfor %}"
        "<eos> {% endfor %}"
        "{% if add_generation_prompt %}<bos>{% endif %}"
    )
    return chat


def write_tool_model(folder: Path) -> None:
    """Save a random model that can learn to call a tool, with tied embeddings: it tends to repeat words."""
    tokenizer = tool_tokenizer()
    own = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "initializer_range": 0.25}
    write_model(folder, "Qwen3MoeForCausalLM", tie_word_embeddings=True, **own)
    tokenizer.save_pretrained(folder)


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """Digits are tokens, and so are the calls of the tool `look_up` with key 0 and with key 1.

    The template writes the names of the tools first. Only responses end with `<eos>`.
    """
    call = '<tool_call>{{"name":"look_up","arguments":{{"key":{key}}}}}</tool_call>'
    calls = (call.format(key=key) for key in (0, 1))
    tools = word_tokenizer("look_up", *"0123456789", *calls)
    tools.chat_template = (
        "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
        "{% for message in messages %}{{ message['content'] }} "
        "{% for call in message['tool_calls'] or [] %}"
        "<tool_call>{{ call['function'] | tojson(separators=(',', ':')) }}</tool_call> {% endfor %}"
        "{% if message['role'] == 'assistant' %}<eos> {% endif %}{% endfor %}"
    )
    return tools


def write_model(folder: Path, architecture: str, **changes: Any) -> None:
    """Save a random model whose distributions and routers are far from flat."""
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(tiny_config(architecture, _SIZES, **changes))
    model.save_pretrained(folder)
    make_readable(folder)


def tiny_config(architecture: str, sizes: dict[str, Any], **changes: Any) -> Any:
    """Return transformers' config of `sizes`, of what the architecture has instead, and of changes."""
    own = OWN_SIZES.get(architecture, {})
    settings = copy.deepcopy(sizes | own | changes)  # transformers adds keys to tables
    if "kv_lora_rank" in own:  # their head_dim is another name of another size
        del settings["head_dim"]
    return getattr(transformers, architecture).config_class(**settings)


if __name__ == "__main__":
    main()
