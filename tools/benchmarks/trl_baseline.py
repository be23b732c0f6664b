"""Trains a model with TRL's GRPOTrainer. trl_comparison.py runs this program in TRL's environment.

    python -m tools.benchmarks.trl_baseline --model FOLDER --prompts PROMPTS.jsonl --settings SETTINGS.json

The settings are arguments of GRPOConfig, derived from our config. Under torchrun, training is data-parallel.
The program prints START at the first rollout's start, and a line ROLLOUT {...} at each rollout's end. TRL's
environment has only TRL's dependencies, so this program does not import megatron_dppo.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import torch.distributed as dist
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

DIGITS = frozenset("0123456789")


def main() -> None:
    """Train, and print the reward of each rollout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument(
        "--prompts", type=Path, required=True, help="rows with prompt (text or messages) and answer"
    )
    parser.add_argument("--settings", type=Path, required=True, help="JSON object: arguments of GRPOConfig")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each process (default: 2)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    folder = options.model
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    of_model: Any = dict(dtype=torch.float32, attn_implementation="sdpa")
    if "num_experts" in json.loads((folder / "config.json").read_text()):
        of_model |= dict(experts_implementation="grouped_mm")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **of_model)
    rows = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    data = Dataset.from_dict({"prompt": [r["prompt"] for r in rows], "answer": [r["answer"] for r in rows]})
    settings = json.loads(options.settings.read_text())
    watch = Watch(settings["steps_per_generation"] // settings["gradient_accumulation_steps"])

    def reward(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        has_ended = [tokenizer.eos_token_id in ids for ids in completion_ids]
        rewards = list(map(arithmetic, texts, has_ended, answer))
        watch.totals = torch.tensor([sum(rewards), len(rewards), sum(map(len, completion_ids))])
        return rewards

    with tempfile.TemporaryDirectory() as unused:
        arguments = GRPOConfig(output_dir=unused, **settings)
        parts = dict(args=arguments, train_dataset=data, processing_class=tokenizer, callbacks=[watch])
        GRPOTrainer(model=model, reward_funcs=reward, **parts).train()
    if dist.is_initialized():
        dist.destroy_process_group()


def arithmetic(text: str, has_ended: bool, answer: str) -> float:
    """Return 1 if the number after `#`, lowest digit first, is right. Copies rewards/text.py."""
    words = text.split()
    digits = words[words.index("#") + 1 :] if "#" in words else []
    has_answer = bool(digits) and DIGITS.issuperset(digits) and has_ended
    return float(has_answer and "".join(reversed(digits)).lstrip("0") == answer.lstrip("0"))


class Watch(TrainerCallback):
    """Prints a line when training starts, and when all gradient steps of a rollout are done."""

    def __init__(self, steps_per_rollout: int) -> None:
        self.steps_per_rollout = steps_per_rollout
        self.totals = torch.zeros(3)  # this process's sum of rewards, samples and response tokens

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report that the set-up is complete and the first rollout starts."""
        if state.is_world_process_zero:
            print("START", flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report a rollout after its last gradient step."""
        if state.global_step % self.steps_per_rollout:
            return
        if dist.is_initialized():
            dist.all_reduce(self.totals)
        rewards, num_samples, num_tokens = self.totals.tolist()
        if state.is_world_process_zero:
            row = {"reward": rewards / num_samples, "num_samples": num_samples, "num_tokens": num_tokens}
            print("ROLLOUT " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
