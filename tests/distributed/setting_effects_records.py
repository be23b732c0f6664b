"""Effects of [checkpoint], [evaluation] and [tracking], which leave the training as it is."""

import json
from collections.abc import Callable
from typing import Any

from tests.distributed.setting_checks import ANY, FAST, HELD_OUT, LONGER, Check, both, falls, rises, step_of
from tests.distributed.setting_runs import Effect, Left

_CHECKPOINT = [
    Effect(
        "checkpoint.every",
        (1, 2),
        None,
        both(Left.checkpoints, [1, 2, 3, 4], [2, 4]),
        LONGER | {"checkpoint.keep_last": 0},
    ),
    Effect("checkpoint.every_steps", (0, 2), None, both(Left.checkpoints, [3], [2, 3])),
    Effect(
        "checkpoint.keep_last",
        (0, 2),
        None,
        both(Left.checkpoints, [1, 2, 3, 4], [3, 4]),
        LONGER | {"checkpoint.every": 1},
    ),
    Effect(
        "checkpoint.keep_every",
        (0, 2),
        None,
        both(Left.checkpoints, [4], [2, 4]),
        LONGER | {"checkpoint.every": 1, "checkpoint.keep_last": 1},
    ),
    Effect(
        "checkpoint.keep_best",
        (0, 1),
        None,
        lambda a, b: a.checkpoints() == [4] and b.checkpoints() == _with_best(b, max),
        LONGER
        | {
            "checkpoint.every": 1,
            "checkpoint.keep_last": 1,
            "checkpoint.best_metric": "rollout/num_response_tokens",
            "rollout.max_response_tokens": 40,
        },
    ),
    Effect(
        "checkpoint.best_is",
        ("highest", "lowest"),
        None,
        lambda a, b: a.checkpoints() == _with_best(a, max) and b.checkpoints() == _with_best(b, min),
        LONGER
        | {
            "checkpoint.every": 1,
            "checkpoint.keep_last": 1,
            "checkpoint.keep_best": 1,
            "checkpoint.best_metric": "rollout/num_response_tokens",
            "rollout.max_response_tokens": 40,
        },
    ),
    Effect(
        "checkpoint.best_metric",
        ("reward/mean", "throughput/tokens_per_s"),
        None,
        lambda a, b: (
            a.checkpoints() == _with_best(a, max, "reward/mean")
            and b.checkpoints() == _with_best(b, max, "throughput/tokens_per_s")
        ),
        LONGER | {"checkpoint.every": 1, "checkpoint.keep_last": 1, "checkpoint.keep_best": 1},
    ),
    Effect(
        "checkpoint.best_metric",
        ("reward/mean", "reward/maen"),
        None,
        both(lambda left: "found no finite 'reward/maen' after 1 rollouts" in left.log, False, True),
        {"checkpoint.keep_best": 1, "checkpoint.keep_last": 1},
    ),
    Effect(
        "checkpoint.reserve_gib",
        (1.0, 1e9),
        "prompts",
        both(lambda left: "checkpoint.reserve_gib" in left.error, False, True),
    ),
]


def _with_best(
    left: Left, choose: Callable[..., int], metric: str = "rollout/num_response_tokens"
) -> list[int]:
    """Return the checkpoints that stay: the last one, and the best one by a metric."""
    scores = left.rollouts(metric)
    return sorted({choose(range(1, len(scores) + 1), key=lambda number: scores[number - 1]), len(scores)})


def _in_evaluation(name: str, values: tuple[Any, Any], holds: Check, **more: Any) -> Effect:
    return Effect(f"evaluation.{name}", values, None, holds, HELD_OUT | more)


def _lengths(left: Left) -> float:
    return left.evaluations("response_length_mean")[0]


def _evaluation_names(left: Left) -> set[str]:
    return {name.rpartition("/")[2] for row in left.rows if row["kind"] == "evaluation" for name in row}


_EVALUATION = [
    Effect(
        "evaluation.sets",
        ({}, HELD_OUT["evaluation.sets"]),
        None,
        both(lambda left: len(left.names("evaluations/held-out_*")), 0, 2),
        {key: value for key, value in HELD_OUT.items() if key != "evaluation.sets"},
    ),
    _in_evaluation(
        "every",
        (1, 2),
        both(
            lambda left: [row["rollout"] for row in left.rows if row["kind"] == "evaluation"],
            [0, 1, 2, 3],
            [0, 2, 3],
        ),
        **{"run.num_rollouts": 3},
    ),
    _in_evaluation(
        "samples_per_prompt",
        (2, 3),
        lambda a, b: "avg_at_2" in _evaluation_names(a) and "avg_at_3" in _evaluation_names(b),
    ),
    _in_evaluation(
        "pass_at",
        ([1], [2]),
        lambda a, b: (
            {"pass_at_1"} <= _evaluation_names(a) - _evaluation_names(b)
            and {"pass_at_2"} <= _evaluation_names(b) - _evaluation_names(a)
        ),
    ),
    _in_evaluation("max_response_tokens", (9, 4), both(_lengths, 9.0, 4.0)),
    _in_evaluation("temperature", (0.7, 0.0), lambda a, b: _distinct(b) < _distinct(a)),
    _in_evaluation("top_p", (1.0, 1e-6), lambda a, b: _distinct(b) < _distinct(a)),
]


def _distinct(left: Left) -> int:
    """Count the different responses of an evaluation."""
    file = sorted((left.folder / "evaluations").glob("*"))[0]
    return len({(row["index"], row["response"]) for row in map(json.loads, file.read_text().splitlines())})


def _files(pattern: str, first: int, second: int) -> Check:
    return both(lambda left: len(left.names(pattern)), first, second)


_TRACKING = [
    # The phases of sampling are read from the samples, which half of the rollouts lack here.
    Effect("tracking.samples_every", (1, 2), ANY, _files("samples/*", 4, 2), LONGER),
    Effect("tracking.batches_every", (1, 2), None, _files("batches/*", 4, 2), LONGER),
    Effect("tracking.clipped_tokens_every", (1, 2), None, _files("clipped_tokens/*", 4, 2), LONGER),
    Effect(
        "tracking.paired_routing_every",
        (1, 2),
        None,
        both(lambda left: len(left.rollouts("mismatch_live/num_tokens")), 4, 2),
        LONGER | {"rollout.routing_replay": "measure"},
    ),
    Effect(
        "tracking.mismatch_share",
        (1.0, 0.5),
        "policy 0",
        falls(lambda left: left.rollouts("mismatch_live/num_tokens")[0]),
        {"rollout.routing_replay": "measure", "tracking.paired_routing_every": 1},
    ),
    Effect("tracking.backends", ([], ["tensorboard"]), None, _files("tensorboard/**/events*", 0, 1)),
    Effect(
        "tracking.shadow",
        (False, True),
        None,
        both(lambda left: any(n.startswith("shadow/") for r in left.rows for n in r), False, True),
    ),
    Effect(
        "tracking.shadow_presets",
        (["grpo"], ["dppo_binary_kl"]),
        None,
        lambda a, b: bool(
            a.steps("shadow/grpo/agreement")
            and not b.steps("shadow/grpo/agreement")
            and b.steps("shadow/dppo_binary_kl/agreement")
        ),
        {"tracking.shadow": True},
    ),
    Effect(
        "tracking.shadow_options",
        ({}, {"dppo_binary_tv": {"delta": 1e-3}}),
        None,
        rises(step_of("shadow/dppo_binary_tv/masked_fraction")),
        {"tracking.shadow": True, "tracking.shadow_presets": ["dppo_binary_tv"]} | FAST,
    ),
]


EFFECTS = [*_CHECKPOINT, *_EVALUATION, *_TRACKING]
