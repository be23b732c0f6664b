"""Runs of the task of `looking_up` with a tiny random model, and whether it learned."""

import itertools
import runpy
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_dppo.runtime.files import write_jsonl
from tests.support.sanity_run import settings

STEPS = 4  # of gradient, for each rollout
GUESSING = 0.75
"""Reward of a policy that calls the tool with the right key, and then writes one of the two digits."""
_ROOT = Path(__file__).parents[2]


def make_lookup_task(folder: Path) -> Path:
    """Write `model/`, and `prompts.jsonl` with each key and each digit: only the tool knows the digit."""
    runpy.run_path(str(_ROOT / "examples" / "make_tiny.py"))["write_tool_model"](folder / "model")
    rows: list[dict[str, Any]] = [
        {"id": f"{key}-{digit}", "prompt": [{"role": "user", "content": key}], "answer": digit}
        for key, digit in itertools.product("01", "59")
    ]
    write_jsonl(folder / "prompts.jsonl", rows)
    return folder


def lookup_settings(task: Path, name: str, num_rollouts: int, **rollout: Any) -> dict[str, Any]:
    """Config of a run that learns the task, with routes that are replayed."""
    algorithm = {"preset": "dppo_binary_tv", "minibatches_per_rollout": 1, "epochs_per_rollout": STEPS}
    return {
        **settings(task, name),
        "run": {"folder": str(task / name), "num_rollouts": num_rollouts},
        "data": {"prompts": str(task / "prompts.jsonl"), "reward": "environment", "max_prompt_tokens": 8},
        "rollout": {
            "agent": {"harness": "tests.support.looking_up:run"},
            "prompts_per_rollout": 4,
            "samples_per_prompt": 4,
            "max_turn_tokens": 2,
            "max_response_tokens": 16,
            "routing_replay": "replay",
        }
        | rollout,
        "algorithm": algorithm | {"entropy_coef": 0.03, "normalize_advantage_std": True},
        "optimizer": {"lr": 4e-3},
        "tracking": {"samples_every": 1},
    }


def require_learned(
    rollouts: list[dict[str, Any]], *, above: float, gain: float = 0.3, is_seeded: bool = True
) -> None:
    """Require that the mean reward of the last eight rollouts is above a bound, and far above the first ones.

    Without a seed they are the best eight in a row of the second half: so small a policy may forget again.
    """
    rewards = [row["reward/mean"] for row in rollouts]
    ends = [len(rewards)] if is_seeded else range(len(rewards) // 2 + 8, len(rewards) + 1)
    first, last = fmean(rewards[:4]), max(fmean(rewards[end - 8 : end]) for end in ends)
    assert last > above and last - first > gain, rewards
    for row in rollouts:
        assert row["rollout/dropped_samples"] == row["agents/forks"] == row["agents/untrained_tokens"] == 0
