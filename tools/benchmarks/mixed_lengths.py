"""Makes the quickstart's model and task with responses of mixed length: 17 to 256 tokens, most of them short.

A quarter of the prompts name one of the task's 256 filler words, and the teacher counts down from it before the
answer: the response to `<bos> w3 2 1 * 4 3 =` is `w2 w1 w0 -` and the answer. The count is geometric with a
mean of 60. The reward ignores the words before the answer. A few more steps of supervised training on this
teacher give the quickstart's model these lengths. Reinforcement learning does not change them.
"""

import hashlib
import inspect
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from tqdm import trange
from transformers import AutoModelForCausalLM

from megatron_dppo.data.prompts import sanity_task
from megatron_dppo.data.prompts.sanity_task import VOCABULARY
from megatron_dppo.runtime.files import write_jsonl

LONGEST, LONGEST_PROMPT = 256, sanity_task.PROMPT_LENGTH + 1
COUNTING, MEAN_COUNT = 0.25, 60
LARGEST_COUNT = LONGEST - sanity_task.RESPONSE_LENGTH - 1  # the minus sign takes one token
STEPS, BATCH, LR = 300, 48, 2e-3
IGNORED = -100  # label that the cross-entropy ignores
RECORD = "mixed_lengths.json"


def make_mixed_model(start: Path, out: Path) -> None:
    """Train the quickstart's model on the counting teacher, unless the result already exists.

    Args:
        start: Folder written by `examples/quickstart/make_model.py`.
        out: Hugging Face folder to write, with the same tokenizer, and with prompts that name words.
    """
    source = inspect.getsource(sys.modules[__name__]) + (start / "warm_start.json").read_text()
    fingerprint = hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
    record = out / RECORD
    if record.is_file() and json.loads(record.read_text()) == {"hash": fingerprint}:
        return
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(start, out)
    write_prompts(start / "prompts.jsonl", out / "prompts.jsonl")
    model: Any = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32, trust_remote_code=False)
    model.config.max_position_embeddings = 2 * LONGEST
    train(model)
    model.save_pretrained(out)
    record.write_text(json.dumps({"hash": fingerprint}) + "\n")
    typer.echo(f"saved {out}")


def write_prompts(start: Path, out: Path) -> None:
    """Write the quickstart's prompts, a quarter of them with a filler word."""
    generator = torch.Generator().manual_seed(0)
    rows = [json.loads(line) for line in start.read_text().splitlines()]
    for row in rows:
        if torch.rand((), generator=generator) < COUNTING:
            count = int(torch.empty(()).geometric_(1 / MEAN_COUNT, generator=generator))
            row["prompt"] = row["prompt"].replace("<bos>", f"<bos> w{min(count, LARGEST_COUNT)}")
    write_jsonl(out, rows)


def train(model: Any) -> None:
    """Train the model in place on response tokens of the teacher."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    model.train()
    for step in trange(STEPS, desc="responses of mixed length", unit="step"):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 20, 1.1 - step / STEPS)
        tokens, labels = teacher_batch(BATCH, generator)
        output = model(input_ids=tokens, use_cache=False, output_router_logits=True)
        logits, expected = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = F.cross_entropy(logits, expected, ignore_index=IGNORED)
        (loss + 0.01 * output.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()


def teacher_batch(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tokens [batch, width] of prompts and responses, and labels [batch, width] that ignore prompts."""
    tokens, labels = list[Tensor](), list[Tensor]()
    for prompt, answer in zip(*sanity_task.teacher_batch(batch, generator, 0.08), strict=True):
        response = answer
        if torch.rand((), generator=generator) < COUNTING:
            count = int(torch.randint(1, LARGEST_COUNT + 1, (), generator=generator))
            words = torch.arange(count, -1, -1) + VOCABULARY["w0"]
            prompt = torch.cat([prompt[:1], words[:1], prompt[1:]])
            response = torch.cat([words[1:], torch.tensor([VOCABULARY["-"]]), answer])
        tokens.append(torch.cat([prompt, response]))
        labels.append(torch.cat([torch.full_like(prompt, IGNORED), response]))
    return padded(tokens, VOCABULARY[sanity_task.PAD]), padded(labels, IGNORED)


def padded(rows: list[Tensor], value: int) -> Tensor:
    """Return rows [n] of different lengths as one tensor, [batch, width]."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
