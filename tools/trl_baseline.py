"""TRL's GRPOTrainer on the quickstart's model and task; started by benchmark_trl.py, in TRL's own environment.

Same checkpoint, prompts, precision (float32), batch, learning rate, clip and reward as our run. It prints one
JSON line per rollout and imports nothing of this package.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]


def main() -> None:
    """Train, and print what each rollout took and earned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rollouts", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="grouped_mm"
    )
    rows = [json.loads(line) for line in (options.model / "prompts.jsonl").read_text().splitlines()]
    rows = rows[: 64 * options.rollouts]
    data = Dataset.from_dict({"prompt": [r["prompt"] for r in rows], "answer": [r["answer"] for r in rows]})
    watch = Watch()

    def reward(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in completion_ids]
        rewards = [score(text, wanted) for text, wanted in zip(texts, answer, strict=True)]
        watch.reward = sum(rewards) / len(rewards)
        watch.num_tokens = sum(map(len, completion_ids))
        return rewards

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings(options.rollouts, options.seed),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[watch],
    )
    trainer.train()


def score(text: str, answer: str) -> float:
    """As rewards/arithmetic.py: little-endian digits between '#' and the end of the sequence."""
    words = text.split()
    if "#" not in words or words[-1] != "<eos>":
        return 0.0
    digits = words[words.index("#") + 1 : -1]
    is_number = bool(digits) and all(len(d) == 1 and d.isdigit() for d in digits)
    return float(is_number and int("".join(reversed(digits))) == int(answer))


class Watch(TrainerCallback):
    """Prints a line after every fourth gradient step: one rollout."""

    def __init__(self) -> None:
        self.reward, self.num_tokens, self.started = 0.0, 0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first rollout starts here; set-up is not counted."""
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report a rollout whose four gradient steps are done."""
        if state.global_step % 4 == 0:
            elapsed = time.perf_counter() - self.started
            row = {"elapsed_s": elapsed, "reward": self.reward, "num_tokens": self.num_tokens}
            sys.stdout.write("ROLLOUT " + json.dumps(row) + "\n")
            sys.stdout.flush()


def settings(rollouts: int, seed: int) -> Any:
    """GRPO with 64 prompts x 8 samples and 4 gradient steps per rollout; TRL's defaults for the rest."""
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=100000,
        disable_tqdm=True,
        seed=seed,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        per_device_train_batch_size=128,
        gradient_accumulation_steps=1,
        steps_per_generation=4,
        num_generations=8,
        max_steps=4 * rollouts,
        learning_rate=4e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=20,
        adam_beta2=0.999,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="none",
        loss_type="dapo",
        router_aux_loss_coef=0.0,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_completion_length=18,
    )


if __name__ == "__main__":
    main()
