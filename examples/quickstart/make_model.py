"""Make the quickstart's model: a tiny Qwen3-MoE that knows two-digit multiplication but lacks confidence.

    python examples/quickstart/make_model.py --out runs/quickstart/model

The folder is an ordinary Hugging Face checkpoint with its tokenizer, beside the task's prompts.jsonl (training)
and eval.jsonl (held out). Supervised training on a teacher that slips leaves a model that is right when it
decodes greedily and wrong more often than not when it samples: what is left to learn is confidence, which
reinforcement learning adds within minutes. The same recipe and sources give the folder once; asked again, the
script says so and leaves. `warm_start.json` in the folder holds the recipe, its hash and what was measured.
"""

import argparse
import hashlib
import inspect
import json
import logging
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_dppo.data.prompts import prompts, sanity_task
from megatron_dppo.rewards import text as arithmetic
from megatron_dppo.runtime import files as jsonl
from megatron_dppo.runtime.files import make_readable

log = logging.getLogger("make_model")

RECORD = "warm_start.json"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "prompts.jsonl", "eval.jsonl")
EVALUATION_PROMPTS = 512


@dataclass(frozen=True)
class Recipe:
    """All that decides the folder; the defaults are the quickstart.

    What routing replay fixes is routers that choose other experts once a rollout engine rounds its weights to
    bfloat16 and fp8. Two layers of 32 experts, four to a token, are the smallest model tried that learns the
    task in a minute and flips more than 5 % of expert sets in each layer; replay then lowers the paired KL by
    34 to 58 % from run to run. Three layers flip 11 % and more, and make the effect plain. A slip of 0.08
    leaves about 0.4 of sampled responses right.
    """

    steps: int = 650
    batch: int = 128
    lr: float = 5e-3
    warmup: int = 100
    aux_loss: float = 0.01
    slip_probability: float = 0.08
    layers: int = 3
    experts: int = 32
    experts_per_token: int = 4
    seed: int = 0
    prompts: int = 8192


HELP = {
    "steps": "gradient steps; 500 leave the model not knowing the task, 900 leave RL less to find",
    "batch": "teacher demonstrations per step",
    "lr": "peak learning rate of AdamW (linear warm-up, cosine to a tenth)",
    "warmup": "steps of warm-up",
    "aux_loss": "weight of the router's load-balancing loss",
    "slip_probability": "how often the teacher writes a random digit; 0 makes a sure model, and RL pointless",
    "layers": "decoder layers, all of them MoE",
    "experts": "experts per layer; the more, the closer their scores, and the more routes a bf16 rollout flips",
    "experts_per_token": "experts that each token visits (top-k)",
    "seed": "seeds weights, demonstrations and prompt order",
    "prompts": "training prompts in prompts.jsonl (the task has 8986; 1014 more are held out)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the folder unless it is there already; returns the process's exit status."""
    out, threads, recipe = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    fingerprint = content_hash(recipe)
    if is_made(out, fingerprint):
        log.info("%s is up to date (hash %s): nothing to do. Remove it to build it again.", out, fingerprint)
        return 0
    if out.exists() and not (out / RECORD).exists() and any(out.iterdir()):
        log.error(
            "%s: found a folder with other files in it; expected a new folder or one made by this script. "
            "Choose another --out, or remove it yourself.",
            out,
        )
        return 2
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    transformers.utils.logging.disable_progress_bar()
    # SIGTERM then unwinds like Ctrl-C, and the unfinished folder goes away.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        build(out, recipe, fingerprint)
    except KeyboardInterrupt:
        log.error("interrupted: nothing was written to %s", out)
        return 130
    return 0


def parse(arguments: Sequence[str] | None) -> tuple[Path, int, Recipe]:
    """The folder, the number of CPU threads, and the recipe that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    threads = "CPU threads; the matrices are so small that a second gains little (default: %(default)s)"
    parser.add_argument("--threads", type=int, default=1, help=threads, metavar="N")
    recipe = parser.add_argument_group("recipe", "Change these and the folder is built again.")
    for field in fields(Recipe):
        flag = "--" + field.name.replace("_", "-")
        text = f"{HELP[field.name]} (default: %(default)s)"
        recipe.add_argument(flag, type=type(field.default), default=field.default, metavar="N", help=text)
    options = vars(parser.parse_args(arguments))
    return options.pop("out"), options.pop("threads"), Recipe(**options)


def content_hash(recipe: Recipe) -> str:
    """Changes whenever the folder would come out differently: recipe, sources, or library versions."""
    sources = [inspect.getsource(m) for m in (sys.modules[__name__], sanity_task, jsonl, arithmetic)]
    versions = [torch.__version__, transformers.__version__]
    text = json.dumps([asdict(recipe), sources, versions], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def is_made(out: Path, fingerprint: str) -> bool:
    """Whether the folder holds what this recipe makes, all of it."""
    try:
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    is_same = isinstance(record, dict) and record.get("hash") == fingerprint
    return is_same and all((out / name).is_file() for name in FILES)


def build(out: Path, recipe: Recipe, fingerprint: str) -> None:
    """Train, measure and save into a temporary folder, then put it in place of `out` in one move."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    replaced = out.with_name(f".{out.name}.{os.getpid()}.old")
    try:
        unfinished.mkdir()
        start = time.perf_counter()
        model, tokenizer = make_model(recipe), make_tokenizer()
        log.info("warm start: %s parameters, %d steps", f"{model.num_parameters():,}", recipe.steps)
        warm_start(model, recipe)
        sanity_task.write_prompts(unfinished / "prompts.jsonl", recipe.prompts, recipe.seed)
        sanity_task.write_prompts(unfinished / "eval.jsonl", EVALUATION_PROMPTS, recipe.seed, "held_out")
        sampled = pass_rate(model, tokenizer, unfinished / "eval.jsonl", is_greedy=False)
        greedy = pass_rate(model, tokenizer, unfinished / "eval.jsonl", is_greedy=True)
        model.save_pretrained(unfinished)
        make_readable(unfinished)
        tokenizer.save_pretrained(unfinished)
        seconds = time.perf_counter() - start
        measured = {"pass_rate_sampled": sampled, "pass_rate_greedy": greedy, "seconds": round(seconds, 1)}
        record = {"hash": fingerprint, "recipe": asdict(recipe), "measured": measured}
        (unfinished / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if out.exists():
            out.rename(replaced)
        unfinished.rename(out)
    finally:
        if replaced.exists() and not out.exists():
            replaced.rename(out)
        for folder in (unfinished, replaced):
            shutil.rmtree(folder, ignore_errors=True)
    log.info("held-out pass rate: %.3f sampled at temperature 1, %.3f greedy", sampled, greedy)
    log.info("saved %s in %.0f s", out, seconds)


def make_model(recipe: Recipe) -> Qwen3MoeForCausalLM:
    """A freshly initialised model; sizes not in the recipe are the task's."""
    config = Qwen3MoeConfig(
        vocab_size=len(sanity_task.TOKENS),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=recipe.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,  # pyright: ignore[reportCallIssue]
        num_experts=recipe.experts,
        num_experts_per_tok=recipe.experts_per_token,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=128,
        tie_word_embeddings=False,
        router_aux_loss_coef=recipe.aux_loss,
        pad_token_id=sanity_task.VOCABULARY[sanity_task.PAD],
        bos_token_id=sanity_task.VOCABULARY[sanity_task.BOS],
        eos_token_id=sanity_task.VOCABULARY[sanity_task.EOS],
    )
    torch.manual_seed(recipe.seed)
    model = Qwen3MoeForCausalLM._from_config(
        config, attn_implementation="sdpa", experts_implementation="grouped_mm", dtype=torch.float32
    )
    initialise(model)
    return model


@torch.no_grad()
def initialise(model: Qwen3MoeForCausalLM) -> None:
    """Unit-variance projections, halved into the residual stream; the usual 0.02 is too small at width 64."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif "embed" in name:
            parameter.normal_(0, 0.05)
        else:
            is_output = any(part in name for part in ("o_proj", "down_proj", "lm_head"))
            parameter.normal_(0, parameter.shape[-1] ** -0.5 * (0.5 if is_output else 1.0))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words separated by spaces; text outside the vocabulary is an error, not an unknown token."""
    words = Tokenizer(models.WordLevel(sanity_task.VOCABULARY))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=sanity_task.PAD,
        bos_token=sanity_task.BOS,
        eos_token=sanity_task.EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def warm_start(model: Qwen3MoeForCausalLM, recipe: Recipe) -> None:
    """Train in place on teacher demonstrations; only response tokens count."""
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    model.train()
    start = time.perf_counter()
    for step in range(recipe.steps):
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * step / recipe.steps))
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * min(1.0, (step + 1) / max(recipe.warmup, 1)) * cosine
        questions, answers = sanity_task.teacher_batch(recipe.batch, generator, recipe.slip_probability)
        tokens = torch.cat([questions, answers], dim=1)[:, :-1]
        output = model(input_ids=tokens, use_cache=False, output_router_logits=True)
        logits = output.logits[:, questions.shape[1] - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        (loss + recipe.aux_loss * output.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0 or step + 1 == recipe.steps:
            elapsed = time.perf_counter() - start
            log.info("step %4d of %d  loss %.3f  %3.0f s", step + 1, recipe.steps, loss.item(), elapsed)
    model.eval()


@torch.no_grad()
def pass_rate(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path, *, is_greedy: bool
) -> float:
    """Share of a prompt file's questions that one response each answers, by the reward that RL will use."""
    questions = prompts.load_prompts(path, "prompt", "answer")
    tokens = torch.tensor([tokenizer.encode(question.text or "") for question in questions])
    torch.manual_seed(0)
    sampling = {"do_sample": False} if is_greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
    limit = sanity_task.RESPONSE_LENGTH + 2
    everywhere = torch.ones_like(tokens)
    output = cast(Any, model).generate(tokens, attention_mask=everywhere, max_new_tokens=limit, **sampling)
    responses = output[:, tokens.shape[1] :]
    has_ended = (responses == tokenizer.eos_token_id).any(dim=1).tolist()
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    values = [
        arithmetic.arithmetic_reward(question, text, "stop" if ended else "length").value
        for question, text, ended in zip(questions, texts, has_ended, strict=True)
    ]
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
