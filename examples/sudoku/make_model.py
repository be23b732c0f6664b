"""Make the sudoku's model: a tiny Qwen3-MoE that answers every board with a digit, right or wrong.

    python examples/sudoku/make_model.py --out runs/sudoku/model

The folder is an ordinary Hugging Face checkpoint with its tokenizer, and prompts.jsonl beside it: each row is a
puzzle. A few seconds of supervised training on random digits teach the form of an answer, so that a quarter of
the digits are right; which digit a board asks for is left to reinforcement learning.
"""

import argparse
import logging
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_dppo.environments import Sudoku
from megatron_dppo.runtime.files import make_readable, write_jsonl
from megatron_dppo.types import Prompt

log = logging.getLogger("make_model")

WORDS = ("<pad>", "<bos>", "<eos>", "/", ".", "?", "1", "2", "3", "4")
IDS = {word: place for place, word in enumerate(WORDS)}
NUM_EMPTY, NUM_PROMPTS, BATCH = 2, 2048, 32


def main() -> None:
    """Train, and save."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--steps", type=int, default=100, metavar="N", help="gradient steps (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model()
    warm_start(model, options.steps)
    model.save_pretrained(options.out)
    make_readable(options.out)
    make_tokenizer().save_pretrained(options.out)
    rows = [{"id": f"board{i}", "prompt": "<bos>", "answer": str(NUM_EMPTY)} for i in range(NUM_PROMPTS)]
    write_jsonl(options.out / "prompts.jsonl", rows)
    log.info("saved %s: %s parameters, %d puzzles", options.out, f"{model.num_parameters():,}", NUM_PROMPTS)


def make_model() -> Qwen3MoeForCausalLM:
    """A freshly initialised model; projections keep the variance of what goes in, at width 64."""
    config = Qwen3MoeConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,  # pyright: ignore[reportCallIssue]
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.125,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=IDS["<pad>"],
        bos_token_id=IDS["<bos>"],
        eos_token_id=IDS["<eos>"],
    )
    return Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words separated by spaces."""
    words = Tokenizer(models.WordLevel(IDS))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def warm_start(model: Qwen3MoeForCausalLM, steps: int) -> None:
    """Train in place on conversations whose answers are any digits; only they and what ends them count."""
    generator = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        games = [conversation(generator) for _ in range(BATCH)]
        tokens = torch.tensor([[IDS[word] for word, _ in game] for game in games])
        learns = torch.tensor([[is_response for _, is_response in game] for game in games])[:, 1:]
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits[learns], tokens[:, 1:][learns])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 20 == 0:
            log.info("step %3d of %d  loss %.3f (random digits: 0.693)", step + 1, steps, loss.item())


def conversation(generator: random.Random) -> list[tuple[str, bool]]:
    """Return the words of a game with random digits, and a mask of the policy's words."""
    game = Sudoku()
    opening = game.reset(Prompt("", str(NUM_EMPTY), "", text="<bos>"), generator.getrandbits(31))
    said, words = opening.text, list[tuple[str, bool]]()
    while said is not None:
        digit = generator.choice("1234")
        words += [(word, False) for word in said.split()] + [(digit, True), ("<eos>", True)]
        said = game.step(digit, "stop").observation
    return words


if __name__ == "__main__":
    main()
