"""Effects of [run], [model], [lora], [parallel], [data] and [rollout]: what differs first, and how."""

import json

from safetensors import safe_open

from tests.distributed.setting_checks import (
    ANY,
    ATTENTION,
    GRADIENT,
    TURNS,
    always,
    appears,
    both,
    falls,
    ids,
    is_refused_by,
    near,
    rises,
    rollout,
    step_of,
    with_turns_too,
)
from tests.distributed.setting_runs import OWN, Effect, Left

_RUN = [
    Effect("run.seed", (0, 1), "prompts", always),
    Effect("run.seed", (0, 1), "responses", always, {"data.shuffle": False}),
    Effect("run.num_rollouts", (1, 2), "policy 3", both(lambda left: len(left.rollouts("reward/mean")), 1, 2)),
    Effect(
        "run.num_threads",
        (1, 2),
        ANY,
        both(lambda left: left.num_threads, 1, 2),
        {
            "rollout.prompts_per_rollout": 2,
            "rollout.max_response_tokens": 3,
            "algorithm.minibatches_per_rollout": 1,
        },
    ),
    Effect(
        "run.folder",
        ("{task}/here", "{task}/there"),
        None,
        lambda a, b: (a.folder.name, b.folder.name) == ("here", "there") and bool(a.rows and b.rows),
    ),
]

_MODEL = [
    Effect("model.load", ("{task}/model", "{task}/other"), "responses", always),
    Effect(
        "model.reference",
        ("{task}/model", "{task}/other"),
        "loss 0",
        rises(step_of("policy/ref_kl", 0)),
        {"algorithm.ref_kl_coef": 0.1},
    ),
    Effect(
        "model.dtype",
        ("float32", "bfloat16"),
        "responses",
        rises(step_of("drift/abs_prob_diff_mean", 0)),
        {"rollout.transformers.weights": "float32"},
    ),
    Effect(
        "model.layer_spec",
        ("auto", "torch"),
        None,
        both(lambda left: "asks for it" in left.versions["layer_spec_reason"], False, True),
    ),
    Effect("lora.rank", (2, 4), "gradient 0", always, ATTENTION | {"lora.alpha": 8}),
    Effect(
        "lora.alpha",
        (8, 16),
        "gradient 0",
        lambda a, b: GRADIENT(b) == near(2 * GRADIENT(a)),
        ATTENTION | {"lora.rank": 2},
    ),
    Effect("lora.targets", (["q_proj", "v_proj"], ["q_proj"]), "gradient 0", falls(GRADIENT), {"lora.rank": 2}),
    Effect(
        "parallel.max_tokens_per_microbatch",
        (90, 40),
        ANY,  # sums are taken in another order
        rises(lambda left: len(_tensors(left))),
        {"tracking.batches_every": 1},
    ),
    Effect(
        "parallel.share_prefixes",
        (False, True),
        ANY,
        lambda a, b: a.rollouts("batch/forwarded_fraction") == [1.0] > b.rollouts("batch/forwarded_fraction"),
    ),
]

_DATA = [
    Effect(
        "data.prompts",
        ("{task}/prompts.jsonl", "{task}/reversed.jsonl"),
        "prompts",
        lambda a, b: ids(a) == _file_order(a)[:6] and ids(b) == _file_order(a)[::-1][:6],
        {"data.shuffle": False},
    ),
    Effect("data.prompt_column", ("question", "longer"), "responses", always),
    *with_turns_too("data.answer_column", ("reference", "wrong"), "rewards", always),
    Effect("data.shuffle", (True, False), "prompts", lambda a, b: ids(b) == _file_order(b)[:6]),
    *with_turns_too("data.reward", (f"{OWN}:by_answer", "tests.faults.rewards:by_text"), "rewards", always),
    *with_turns_too(
        "data.reward_values",
        ([0.0, 1.0], [-2.0, 1.0]),
        "rewards",
        both(lambda left: set(left.phases["rewards"]), {0.0}, {-2.0}),
        {"data.reward": "arithmetic"},
    ),
    Effect(
        "data.overlong_buffer_tokens",
        (0, 4),
        "rewards",
        lambda a, b: b.rollouts("reward/overlong_penalty_mean")[0] < 0,
    ),
    *(
        Effect(
            "data.overlong_penalty",
            (1.0, 2.0),
            "rewards",
            lambda a, b: (
                b.rollouts("reward/overlong_penalty_mean")[0]
                == near(2 * a.rollouts("reward/overlong_penalty_mean")[0])
            ),
            base,
        )
        for base in (
            {"data.overlong_buffer_tokens": 4},
            {**TURNS, "data.overlong_buffer_tokens": 8},
        )
    ),
    *(
        Effect(
            f"data.{name}",
            values,
            "prompts",
            appears(f"rollout/dropped_reward_{reason}"),
            {
                "data.reward": f"{OWN}:{function}",
                "rollout.max_dropped_fraction": 1.0,
                "rollout.prompts_per_rollout": 3,
            },
        )
        for name, values, reason, function in (
            ("reward_timeout_s", (300.0, 1.0), "timed_out", "slow"),
            ("reward_memory_mb", (2048, 300), "out_of_memory", "large"),
        )
    ),
    Effect(
        "data.reward_retries",
        (1, 0),
        "prompts",
        appears("rollout/dropped_reward_failed"),
        {
            "data.reward": f"{OWN}:fails_first",
            "rollout.max_dropped_fraction": 1.0,
            "rollout.prompts_per_rollout": 3,
        },
    ),
    Effect(
        "data.max_prompt_tokens",
        (17, 8),
        "prompts",
        appears("rollout/prompts_too_long"),
        {"data.prompt_column": "longer", "rollout.max_dropped_fraction": 1.0},
    ),
]


def _file_order(left: Left) -> list[str]:
    """Return the prompts' ids in file order."""
    lines = (left.folder.parent / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["id"] for line in lines]


def _tensors(left: Left) -> list[str]:
    """Return the names of the tensors of kept mini-batches."""
    (file,) = (path for path in (left.folder / "batches").rglob("*") if path.suffix == ".safetensors")
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


_ROLLOUT = [
    Effect("rollout.prompts_per_rollout", (6, 3), "prompts", both(lambda left: len(ids(left)), 6, 3)),
    Effect("rollout.samples_per_prompt", (3, 2), "responses", both(lambda left: len(left.samples), 18, 12)),
    Effect(
        "rollout.max_response_tokens",
        (9, 5),
        "responses",
        both(lambda left: max(s["response_length"] for s in left.samples), 9, 5),
    ),
    Effect("rollout.environment", (f"{OWN}:Nodding", f"{OWN}:Loud"), "responses", always, TURNS),
    Effect(
        "rollout.generate",
        (None, f"{OWN}:first_words"),
        "responses",
        both(lambda left: max(s["response_length"] for s in left.samples), 9, 3),
    ),
    Effect(
        "rollout.max_turns", (2, 3), "responses", both(rollout("rollout/num_turns_mean"), [2.0], [3.0]), TURNS
    ),
    Effect(
        "rollout.max_turn_tokens",
        (4, 3),
        "responses",
        falls(lambda left: left.rollouts("rollout/response_length_mean")[0]),
        TURNS,
    ),
    *with_turns_too("rollout.temperature", (1.0, 0.5), "responses", falls(step_of("policy/entropy", 0))),
    Effect(
        "rollout.num_topk_log_probs", (0, 8), None, rises(lambda left: left.rollouts("memory/rollout_bytes")[0])
    ),
    Effect(
        "rollout.routing_replay",
        ("off", "measure"),
        None,
        both(lambda left: len(left.rollouts("routing/agreement_mean")), 0, 1),
    ),
    Effect(
        "rollout.routing_replay",
        ("measure", "replay"),
        "policy 1",
        always,
        {"rollout.transformers.weights": "float32"},
    ),
    Effect(
        "rollout.max_dropped_fraction",
        (1.0, 0.01),
        "prompts",
        is_refused_by("rollout.max_dropped_fraction"),
        {"data.reward": "tests.faults.rewards:raises"},
    ),
    Effect("rollout.max_data_gib", (32.0, 1e-6), "prompts", is_refused_by("rollout.max_data_gib")),
    Effect(
        "rollout.lag",
        (0, 1),
        "policy 3",
        both(rollout("rollout/staleness_max"), [0.0, 0.0], [0.0, 1.0]),
        {"run.num_rollouts": 2},
    ),
    Effect(
        "rollout.refill_zero_variance",
        (False, True),
        "prompts",
        both(rollout("rollout/replaced_groups"), [0.0], [18.0]),
        {"data.reward": "tests.faults.rewards:always_one"},
    ),
    Effect(
        "rollout.max_refills",
        (3, 1),
        "prompts",
        both(rollout("rollout/replaced_groups"), [18.0], [6.0]),
        {"data.reward": "tests.faults.rewards:always_one", "rollout.refill_zero_variance": True},
    ),
    Effect(
        "rollout.transformers.weights",
        ("float32", "bfloat16"),
        "responses",
        lambda a, b: (
            b.rollouts("mismatch/abs_prob_diff_mean")[0] > 1e-5 > a.rollouts("mismatch/abs_prob_diff_mean")[0]
        ),
    ),
    Effect("rollout.top_p", (1.0, 0.9), "prompts", is_refused_by("rollout.top_p")),
]


EFFECTS = [*_RUN, *_MODEL, *_DATA, *_ROLLOUT]
