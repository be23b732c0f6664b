"""Make the tiny models and prompts that examples/tiny.toml names.

    python examples/make_tiny.py runs/tiny

One random model of each family in Hugging Face form, with the quickstart's tokenizer and prompts; and one for
examples/tiny_gem.toml, all of whose words but `<unk>` are answers to tasks of the Gem library.
"""

import argparse
import itertools
import runpy
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_dppo.data.prompts import sanity_task
from megatron_dppo.runtime.jsonl import write_jsonl

FAMILIES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
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
_EXPERT_SIZES = {
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def main() -> None:
    """Write everything to the folder of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write to")
    write_tiny(parser.parse_args().out)


def write_tiny(folder: Path) -> None:
    """Write a folder for each of `FAMILIES`, `prompts.jsonl` and `held_out.jsonl`."""
    quickstart = runpy.run_path(str(Path(__file__).parent / "quickstart" / "make_model.py"))
    tokenizer = quickstart["make_tokenizer"]()
    for name, architecture in FAMILIES.items():
        write_model(folder / name, architecture)
        tokenizer.save_pretrained(folder / name)
    sanity_task.write_prompts(folder / "prompts.jsonl", 64, seed=0)
    sanity_task.write_prompts(folder / "held_out.jsonl", 4, seed=0, split="held_out")
    gem = gem_tokenizer()
    write_model(folder / "gem", "Qwen3ForCausalLM", vocab_size=len(gem), max_position_embeddings=1024)
    gem.save_pretrained(folder / "gem")
    write_jsonl(folder / "gem.jsonl", [{"id": f"{n}", "prompt": "Solve:", "answer": ""} for n in range(64)])


def gem_tokenizer() -> PreTrainedTokenizerFast:
    """Every answer to Acre and every move of the small Sudoku is a token of its own; other words are one."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    moves = (" ".join(move) for move in itertools.product("1234", repeat=3))
    answers = [rf"\boxed{{{answer}}}" for answer in ("on", "off", "undetermined", *moves)]
    words.add_tokens([AddedToken(answer, normalized=False) for answer in answers])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def write_model(folder: Path, architecture: str, **changes: Any) -> None:
    """Save a random model whose distributions and routers are far from flat."""
    model_class = getattr(transformers, architecture)
    config_class = model_class.config_class
    has_experts = hasattr(config_class(), "num_experts")
    torch.manual_seed(0)
    model = model_class(config_class(**_SIZES | (_EXPERT_SIZES if has_experts else {}) | changes))
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
