"""The sanity task with a tiny random model: what tests of whole runs train on."""

import runpy
from pathlib import Path
from typing import Any

from megatron_dppo.data.prompts import sanity_task
from tests.support.tiny import write_model

_ROOT = Path(__file__).parents[2]
TOKENS: dict[str, Any] = {
    "vocab_size": len(sanity_task.TOKENS),
    "eos_token_id": sanity_task.VOCABULARY[sanity_task.EOS],
}
"""Of the model that a tokenizer of the task fits."""


def make_task(folder: Path) -> Path:
    """Write `model/`, `prompts.jsonl` and `held_out.jsonl`."""
    write_model(folder / "model", num_hidden_layers=2, **TOKENS)
    return add_task(folder)


def add_task(folder: Path) -> Path:
    """Write all but the model itself, whose vocabulary is TOKENS."""
    make_model = runpy.run_path(str(_ROOT / "examples" / "quickstart" / "make_model.py"))
    make_model["make_tokenizer"]().save_pretrained(folder / "model")
    sanity_task.write_prompts(folder / "prompts.jsonl", 64, 0)
    sanity_task.write_prompts(folder / "held_out.jsonl", 4, 1)
    return folder


def settings(task: Path, name: str, **changes: dict[str, Any]) -> dict[str, Any]:
    """A config of four short rollouts, two gradient steps each, with Top-K masks and R3."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"folder": str(task / name), "num_rollouts": 4},
        "model": {"load": str(task / "model"), "dtype": "float32"},
        "parallel": {"max_tokens_per_microbatch": 100},
        "data": {"prompts": str(task / "prompts.jsonl"), "reward": "arithmetic", "max_prompt_tokens": 16},
        "rollout": {
            "prompts_per_rollout": 4,
            "samples_per_prompt": 4,
            "max_response_tokens": 10,
            "num_topk_log_probs": 8,
            "routing_replay": "replay",
            "transformers": {"weights": "bfloat16"},
        },
        "algorithm": {"preset": "dppo_topk_tv", "top_k": 8, "minibatches_per_rollout": 2},
        "optimizer": {"lr": 1e-2, "warmup_steps": 3, "schedule": "cosine"},
        "checkpoint": {"every": 2},
        "tracking": {"samples_every": 2},
    }
    merged = {section: table | changes.pop(section, {}) for section, table in tables.items()}
    return merged | changes


def without_clocks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without what differs between two runs that are the same.

    A run that resumes in the middle of a rollout does not know what its engine served before.
    """
    clocks = ("time/", "throughput/", "memory/", "sync/changed_weights_fraction")
    return [{name: value for name, value in row.items() if not name.startswith(clocks)} for row in rows]
