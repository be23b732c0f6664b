"""Runs of the real loop with unequal prompts and a peaked policy, of which both ends are recorded."""

import runpy
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from megatron_dppo.engines.sglang.records import ServerRecord
from megatron_dppo.runtime.files import write_jsonl
from megatron_dppo.runtime.process import Runtime
from tests.distributed.test_training_run import train
from tests.support.ranks import run_ranks
from tests.support.sanity_run import TOKENS, add_task, settings
from tests.support.tiny import write_model
from tests.support.trained_tokens import Found, Recorded, Sampled, recording, require_equal

TEMPERATURE, EPOCHS, PROMPTS, SAMPLES = 0.7, 2, 4, 3
NUM_LAYERS = 3
ALGORITHM = {"epochs_per_rollout": EPOCHS, "ratio_cap": 3.0, "aggregation": "seq_mean_token_mean"}
ENGINES: dict[str, dict[str, Any]] = {
    "embedded": {"transformers": {"weights": "float32"}},
    "servers": {"engine": "sglang", "sglang": {"weight_sync": "disk", "probe_every": 0}},
}
TURNS = {
    "environment": "tests.distributed.seam_rewards:Nodding",
    "max_turns": 3,
    "max_turn_tokens": 5,
    "max_response_tokens": 20,
}
AGENT = {
    "agent": {"harness": "tests.support.harnesses:branching_unscored"},
    "max_turn_tokens": 4,
    "max_response_tokens": 24,
}
_ROOT = Path(__file__).parents[2]


def make_text_task(folder: Path) -> Path:
    """Write a model, and prompts of texts of several lengths."""
    write_model(folder / "model", num_hidden_layers=NUM_LAYERS, max_position_embeddings=512, **TOKENS)
    add_task(folder)
    texts = [" ".join(["<bos>", *str(7 * n + 3) * (1 + n % 4), "="]) for n in range(16)]
    rows = [{"id": str(n), "prompt": text, "answer": "1"} for n, text in enumerate(texts)]
    write_jsonl(folder / "prompts.jsonl", rows)
    _sharpen(folder / "model" / "model.safetensors", TOKENS["eos_token_id"])
    return folder


def make_chat_task(folder: Path) -> Path:
    """Write a model with a chat template, and prompts of chats of several lengths."""
    tokenizer = runpy.run_path(str(_ROOT / "examples" / "make_tiny.py"))["chat_tokenizer"]()
    end = tokenizer.eos_token_id
    write_model(folder / "model", num_hidden_layers=NUM_LAYERS, vocab_size=len(tokenizer), eos_token_id=end)
    tokenizer.save_pretrained(folder / "model")
    contents = [" ".join([str(n % 5), "4", *"123"[: n % 4]]) for n in range(16)]
    rows: list[dict[str, Any]] = [
        {"id": str(n), "prompt": [{"role": "user", "content": content}], "answer": str(n % 5 + 4)}
        for n, content in enumerate(contents)
    ]
    write_jsonl(folder / "prompts.jsonl", rows)
    _sharpen(folder / "model" / "model.safetensors", end)
    return folder


def _sharpen(file: Path, end: int) -> None:
    """Make some tokens certain and others improbable, and responses end at several lengths."""
    tensors = load_file(file)
    tensors["lm_head.weight"] *= 3.0
    tensors["lm_head.weight"][end] *= 1.5
    save_file(tensors, file, metadata={"format": "pt"})


def play(runtime: Runtime, tables: dict[str, Any], stop_after: int | None, keeps_weights: bool) -> Recorded:
    """Run the loop on this rank, and record."""
    with recording(keeps_weights=keeps_weights) as seen:
        train(runtime, tables, stop_after)
    return seen


class Run:
    """A run of two short rollouts with Top-K, R3 and a reward of each response's text."""

    def __init__(self, task: Path, folder: Path, engine: str, **sections: dict[str, Any]) -> None:
        """Make the settings.

        Args:
            task: Folder with the model and the prompts.
            folder: Folder for the run and for what its ranks print.
            engine: "embedded", or "servers", which `register` names.
            sections: Further settings.
        """
        self.folder = folder
        self.tokenizer: Any = AutoTokenizer.from_pretrained(task / "model")
        common: dict[str, dict[str, Any]] = {
            "run": {"folder": str(folder / "run"), "num_rollouts": 2},
            "data": {"reward": "tests.faults.rewards:by_text", "max_prompt_tokens": 20},
            "rollout": {
                "temperature": TEMPERATURE,
                "prompts_per_rollout": PROMPTS,
                "samples_per_prompt": SAMPLES,
                **ENGINES[engine],
            },
            "algorithm": dict(ALGORITHM),
            "optimizer": {"lr": 1e-3},
        }
        for name, section in sections.items():
            common[name] = common.get(name, {}) | section
        self.tables = settings(task, "run", **common)

    def register(self, url: str, version: str) -> None:
        """Register a server of this SGLang version."""
        record = ServerRecord("server", url, "here", 1, version, "now", 1)
        write_jsonl(self.folder / "run" / "servers" / "server.json", [asdict(record)])

    def play(
        self, world_size: int, stop_after: int | None = None, *, keeps_weights: bool = False
    ) -> list[Recorded]:
        """Start the run on so many ranks, and return what they saw."""
        return run_ranks(play, world_size, self.folder, self.tables, stop_after, keeps_weights)

    def require_equal(
        self, *starts: Sequence[Recorded], by_servers: Sequence[Sampled] = (), is_complete: bool = True
    ) -> Found:
        """Compare what all ranks saw in each start with what the embedded engines or the servers returned."""
        sampled = [*by_servers, *(each for seen in starts for rank in seen for each in rank.sampled)]
        of_ranks = [step for seen in starts for step in zip(*(rank.steps for rank in seen), strict=True)]
        return require_equal(
            [[microbatch for rank in step for microbatch in rank] for step in of_ranks],
            sampled,
            temperature=TEMPERATURE,
            reward_of=self._reward,
            epochs=EPOCHS,
            is_complete=is_complete,
        )

    def _reward(self, response: Sequence[int]) -> float:
        """Score as `tests.faults.rewards:by_text` does, from the tokens."""
        text = self.tokenizer.decode(response, skip_special_tokens=True)
        return zlib.crc32(text.encode()) / 2**32
