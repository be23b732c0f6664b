"""How the rows of setting effects compare two runs, and settings that several rows share."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.setting_runs import OWN, Effect, Left, Tables

Check = Callable[[Left, Left], bool]


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-3)


def always(a: Left, b: Left) -> bool:
    return True


def step_of(a: str, number: int = 1) -> Callable[[Left], float]:
    """Read a metric of one gradient step, 0 if the row lacks it."""
    return lambda left: next(
        row.get(a, 0.0) for row in left.rows if row["kind"] == "step" and row["step"] == number
    )


def total(name: str) -> Callable[[Left], float]:
    """Sum a metric over all gradient steps."""
    return lambda left: math.fsum(left.steps(name))


def rises(read: Callable[[Left], float], but_not: Callable[[Left], float] | None = None) -> Check:
    """The second run's number is larger, and the other number the same."""
    return lambda a, b: read(b) > read(a) and (but_not is None or but_not(a) == but_not(b))


def falls(read: Callable[[Left], float], but_not: Callable[[Left], float] | None = None) -> Check:
    """The second run's number is smaller, and the other number the same."""
    return lambda a, b: read(b) < read(a) and (but_not is None or but_not(a) == but_not(b))


def moves(read: Callable[[Left], float], but_not: Callable[[Left], float]) -> Check:
    """The second run's number is another one, and the other number the same but for rounding."""
    return lambda a, b: abs(read(a) - read(b)) > 1e-3 and abs(but_not(a) - but_not(b)) < 1e-5


def both(read: Callable[[Left], Any], first: Any, second: Any) -> Check:
    """Each run has this value."""
    return lambda a, b: read(a) == first and read(b) == second


def appears(name: str) -> Check:
    """A count of the one rollout is 0 in the first run, and more in the second."""
    return lambda a, b: a.rollouts(name) == [0.0] < b.rollouts(name)


def is_refused_by(setting: str) -> Check:
    """The second run alone ends with an error that names the setting."""
    return both(lambda left: setting in left.error, False, True)


def rollout(name: str) -> Callable[[Left], list[Any]]:
    return lambda left: left.rollouts(name)


def ids(left: Left) -> list[str]:
    return left.phases["prompts"]


MASKED = "trust_region/masked_fraction"
POSITIVE, NEGATIVE = (step_of(f"{MASKED}_{sign}") for sign in ("positive", "negative"))
WEIGHT_POSITIVE, WEIGHT_NEGATIVE = (step_of(f"trust_region/weight_{sign}") for sign in ("positive", "negative"))
MASKED_ALL = lambda left: POSITIVE(left) + NEGATIVE(left)  # noqa: E731
GRADIENT = step_of("optimizer/grad_norm", 0)
DELTA, INF = 0.9, math.inf
ANY = "any"
COARSE = {"rollout.transformers.weights": "bfloat16"}
ATTENTION = {"lora.targets": ["q_proj", "v_proj"]}
FAST = {"optimizer.lr": 1e-2}
"""A learning rate at which masks drop tokens from the second gradient step on."""
TURNS = {
    "rollout.environment": f"{OWN}:Nodding",
    "rollout.max_turns": 2,
    "rollout.max_response_tokens": 12,
    "rollout.max_turn_tokens": 4,
}
OTHER_TURNS = TURNS | {"rollout.environment": f"{OWN}:Endless", "data.reward": "environment"}
HELD_OUT = {
    "evaluation.sets": {"held-out": {"prompts": "{task}/held_out.jsonl"}},
    "evaluation.every": 1,
    "evaluation.samples_per_prompt": 2,
    "algorithm.minibatches_per_rollout": 1,
}
LONGER = {"run.num_rollouts": 4, "algorithm.minibatches_per_rollout": 1}
TOP = {"algorithm.preset": "dppo_topk_tv", "rollout.num_topk_log_probs": 8, "algorithm.top_k": 4} | FAST


def masks(preset: str, **base: Any) -> dict[str, Any]:
    return {"algorithm.preset": preset, **FAST, **{f"algorithm.{k}": v for k, v in base.items()}}


def with_turns_too(
    setting: str, values: tuple[Any, Any], first: str | None, holds: Check, base: Tables | None = None
) -> list[Effect]:
    """A row of runs of single responses, and the same of conversations."""
    return [Effect(setting, values, first, holds, {**(base or {}), **turns}) for turns in ({}, TURNS)]
