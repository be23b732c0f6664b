"""Effects of [algorithm] and [optimizer]: which phase differs first, and by what."""

from tests.distributed.setting_checks import (
    ANY,
    COARSE,
    DELTA,
    FAST,
    INF,
    MASKED_ALL,
    NEGATIVE,
    OTHER_TURNS,
    POSITIVE,
    TOP,
    WEIGHT_NEGATIVE,
    WEIGHT_POSITIVE,
    always,
    both,
    falls,
    masks,
    moves,
    near,
    rises,
    step_of,
)
from tests.distributed.setting_runs import OWN, Effect, Left

_ALGORITHM = [
    Effect("algorithm.preset", ("pg_is", "grpo"), "loss 1", rises(MASKED_ALL), FAST),
    Effect(
        "algorithm.rule_options",
        ({"limit": 1.0}, {"limit": 1e-3}),
        "loss 1",
        rises(MASKED_ALL),
        masks(f"{OWN}:steep"),
    ),
    Effect(
        "algorithm.rule_divergence",
        ("binary_tv", "binary_kl"),
        "loss 0",
        always,
        masks(f"{OWN}:steep", rule_options={"limit": 1e-3}),
    ),
    Effect(
        "algorithm.rule_over",
        ("tokens", "responses"),
        "loss 1",
        always,
        masks(f"{OWN}:steep", rule_options={"limit": 1e-3}),
    ),
    Effect("algorithm.delta", (DELTA, 1e-3), "loss 1", rises(MASKED_ALL), masks("dppo_binary_tv")),
    Effect(
        "algorithm.delta_low",
        (DELTA, 1e-3),
        "loss 1",
        rises(NEGATIVE, POSITIVE),
        masks("dppo_binary_tv", delta=DELTA),
    ),
    Effect(
        "algorithm.delta_high",
        (DELTA, 1e-3),
        "loss 1",
        rises(POSITIVE, NEGATIVE),
        masks("dppo_binary_tv", delta=DELTA),
    ),
    Effect("algorithm.eps_low", (0.9, 0.01), "loss 1", rises(NEGATIVE, POSITIVE), masks("grpo", eps_high=9.0)),
    Effect("algorithm.eps_high", (9.0, 0.01), "loss 1", rises(POSITIVE, NEGATIVE), masks("grpo", eps_low=0.9)),
    Effect(
        "algorithm.ratio_cap",
        (9.0, 1.01),
        "loss 1",
        rises(step_of("trust_region/ratio_capped_fraction")),
        masks("pg_tis"),
    ),
    Effect(
        "algorithm.alpha",
        (0.01, 0.9),
        "loss 1",
        falls(NEGATIVE, POSITIVE),
        masks("relax_low", eps_low=0.01, eps_high=0.01),
    ),
    Effect(
        "algorithm.anchor",
        ("rollout", "recomputed"),
        "loss 0",
        always,
        masks("dppo_binary_tv", delta=1e-3) | {"rollout.transformers.weights": "bfloat16"},
    ),
    Effect(
        "algorithm.replay_recomputed_routes",
        (False, True),
        "policy 1",
        always,
        masks("minirl") | {"optimizer.lr": 0.05},
    ),
    Effect("algorithm.top_k", (4, 8), "policy 0", rises(step_of("trust_region/divergence_mean")), TOP),
    Effect(
        "algorithm.include_other", (True, False), "loss 0", falls(step_of("trust_region/divergence_mean")), TOP
    ),
    Effect("algorithm.sampled_token", ("union", "replace"), "loss 0", always, TOP),
    Effect(
        "algorithm.rho_low", (0.1, 0.99), "loss 0", rises(MASKED_ALL), masks("icepop", rho_high=9.0) | COARSE
    ),
    Effect(
        "algorithm.rho_high", (9.0, 1.01), "loss 0", rises(MASKED_ALL), masks("icepop", rho_low=0.1) | COARSE
    ),
    *(
        Effect(
            f"algorithm.{name}",
            (1.0, 1e-5),
            "loss 1",
            rises(MASKED_ALL),
            masks("trm", **{other: INF}) | {"rollout.num_topk_log_probs": 8, "algorithm.top_k": 8},
        )
        for name, other in (("token_kl", "response_kl"), ("response_kl", "token_kl"))
    ),
    Effect(
        "algorithm.prefix_delta",
        (0.9, 1e-6),
        "loss 1",
        rises(MASKED_ALL),
        masks("cppo", delta=0.005, prefix_delta_max=0.95),
    ),
    Effect(
        "algorithm.prefix_delta_max",
        (0.9, 2e-6),
        "loss 1",
        rises(MASKED_ALL),
        masks("cppo", delta=0.02, prefix_delta=1e-6),
    ),
    Effect(
        "algorithm.late_weight",
        (1.0, 0.1),
        "loss 1",
        always,
        masks("cppo", delta=0.02, prefix_delta=1e-3, prefix_delta_max=2e-3),
    ),
    Effect("algorithm.tau_low", (1.0, 5.0), "loss 1", moves(WEIGHT_NEGATIVE, WEIGHT_POSITIVE), masks("sapo")),
    Effect("algorithm.tau_high", (1.0, 5.0), "loss 1", moves(WEIGHT_POSITIVE, WEIGHT_NEGATIVE), masks("sapo")),
    Effect(
        "algorithm.stale_share",
        (1.0, 0.1),
        "loss 1",
        rises(MASKED_ALL),
        masks("sat", eps_low=0.6, eps_high=1.0),
    ),
    *(
        Effect(f"algorithm.{field}", values, ANY, moves(*of_sign), masks("vespo"))
        for field, values, of_sign in (
            ("power_low", (1.0, 5.0), (WEIGHT_NEGATIVE, WEIGHT_POSITIVE)),
            ("power_high", (1.0, 5.0), (WEIGHT_POSITIVE, WEIGHT_NEGATIVE)),
            ("decay_low", (1.0, 5.0), (WEIGHT_NEGATIVE, WEIGHT_POSITIVE)),
            ("decay_high", (1.0, 5.0), (WEIGHT_POSITIVE, WEIGHT_NEGATIVE)),
        )
    ),
    Effect("algorithm.entropy_coef", (0.0, 0.5), "loss 0", rises(step_of("policy/entropy")), FAST),
    Effect("algorithm.log_ratio_coef", (0.0, 0.5), "gradient 0", always, FAST),
    Effect("algorithm.ref_kl_coef", (0.01, 9.0), "loss 1", falls(step_of("policy/ref_kl", 2)), FAST),
    Effect("algorithm.ref_kl", ("k3", "k1"), "loss 1", always, FAST | {"algorithm.ref_kl_coef": 0.5}),
    *(
        Effect(
            "algorithm.aggregation",
            ("token_mean", mode),
            phase,
            always,
            {"rollout.max_response_tokens": 40, "rollout.prompts_per_rollout": 9},
        )
        for mode, phase in (
            ("seq_mean_token_sum", "loss 0"),
            ("seq_mean_token_mean", "loss 2"),
            ("seq_mean_token_sum_norm", "loss 2"),
        )
    ),
    *(
        Effect(
            "algorithm.normalize_advantage_std",
            (False, True),
            "advantages",
            rises(lambda left: max(map(abs, left.phases["advantages"]))),
            base,
        )
        for base in ({}, OTHER_TURNS)
    ),
    Effect(
        "algorithm.minibatches_per_rollout",
        (3, 2),
        "policy 0",
        both(lambda left: len(left.steps("loss/policy")), 3, 2),
    ),
    Effect(
        "algorithm.epochs_per_rollout",
        (1, 2),
        "policy 3",
        both(lambda left: len(left.steps("loss/policy")), 3, 6),
    ),
    Effect(
        "algorithm.logits_dtype",
        ("model", "float32"),
        "policy 0",
        falls(step_of("drift/abs_prob_diff_mean", 0)),
        {
            "model.dtype": "bfloat16",
            "rollout.transformers.weights": "float32",
            "rollout.prompts_per_rollout": 24,  # other roundings are larger, so it shows in many tokens alone
            "algorithm.minibatches_per_rollout": 1,
        },
    ),
]

RATES = "optimizer/lr"
FOUR = {"algorithm.minibatches_per_rollout": 4, "rollout.prompts_per_rollout": 8}


def differ_from_the_second_step_on(a: Left, b: Left) -> bool:
    """Adam's first step does not depend on its betas, beyond rounding."""
    first, second = (step_of("drift/abs_prob_diff_mean", number) for number in (1, 2))
    return first(a) == near(first(b)) and second(a) != near(second(b))


_OPTIMIZER = [
    Effect("optimizer.lr", (1e-3, 2e-3), "policy 1", both(lambda left: set(left.steps(RATES)), {1e-3}, {2e-3})),
    Effect(
        "optimizer.min_lr",
        (0.0, 5e-4),
        "policy 2",
        both(lambda left: left.steps(RATES)[-1], 0.0, 5e-4),
        FOUR | {"optimizer.schedule": "linear"},
    ),
    Effect(
        "optimizer.schedule",
        ("linear", "cosine"),
        "policy 2",
        both(
            lambda left: left.steps(RATES),
            [1e-3, near(1e-3 * 2 / 3), near(1e-3 / 3), 0.0],
            [1e-3, near(7.5e-4), near(2.5e-4), 0.0],
        ),
        FOUR,
    ),
    Effect(
        "optimizer.warmup_steps",
        (0, 2),
        "policy 1",
        both(lambda left: left.steps(RATES), [1e-3] * 3, [5e-4, 1e-3, 1e-3]),
    ),
    Effect("optimizer.weight_decay", (0.0, 9.0), "policy 1", always),
    Effect("optimizer.beta1", (0.9, 0.1), "policy 1", differ_from_the_second_step_on),
    Effect("optimizer.beta2", (0.999, 0.1), "policy 1", differ_from_the_second_step_on),
    Effect("optimizer.eps", (1e-8, 1.0), "policy 1", falls(step_of("drift/abs_prob_diff_mean"))),
    Effect("optimizer.clip_grad", (1.0, 1e-9), "policy 1", falls(step_of("drift/abs_prob_diff_mean"))),
]


EFFECTS = [*_ALGORITHM, *_OPTIMIZER]
