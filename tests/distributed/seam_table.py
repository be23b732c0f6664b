"""Every setting, and what its consumer must have received: `test_seams.py` refuses a setting without a row."""

from typing import Any

import torch
from megatron.core import parallel_state

from tests.distributed.seam_reads import (
    ACTOR,
    BATCH,
    COMBINE,
    every,
    flag,
    given,
    group,
    learning_rates,
    metric,
    objective,
    plain,
    rounded,
    size,
    sorted_set,
)
from tests.distributed.seam_rollout_rows import ROLLOUT_ROWS
from tests.distributed.seams import Seam

_ROLLOUTS = "rollout.rollouts"
_HEAD = "actor.output_head"
_CHECKPOINTS = "run.checkpoints"
_SGLANG = "engines.sglang"
_SYNC = "engines.weight_sync"
_SERVED: dict[str, Any] = {"scenario": "served"}
_RETENTION = f"{_CHECKPOINTS}:Retention.__init__"

_RUN = [
    Seam("run.folder", f"{_CHECKPOINTS}:Checkpoints.__init__", lambda call: call.folder.parent),
    Seam("run.seed", f"{BATCH}:sampling_noise", lambda call: call.noise_key[0]),
    plain("run.seed", f"{_ROLLOUTS}:PromptStream.__init__", "seed"),
    Seam("run.seed", "data.batches.gradient_steps:minibatch_of_prompts", lambda call: call.key[0]),
    plain("run.seed", "actor.actor:initialize_groups", "seed"),
    plain("run.seed", "rollout.evaluation:EvaluationSet.metrics", "seed"),
    Seam(
        "run.seed",
        f"{_SGLANG}.own_servers:plan_launch",
        lambda call: flag(call, "--random-seed"),
        **_SERVED,
        expected=lambda config: str(config.run.seed),
    ),
    plain("run.seed", f"{_SYNC}.factory:Probe.__init__", "seed", **_SERVED),
    Seam(
        "run.num_rollouts",
        "rollout.rollouts:RolloutScheduler.run",
        given("rollout"),
        fold=list,
        expected=lambda config: list(range(config.run.num_rollouts)),
    ),
    Seam("run.num_threads", f"{ACTOR}.train_step", lambda call: torch.get_num_threads(), "skipped"),
    Seam("run.timeout_s", "torch.distributed:init_process_group", lambda call: call.timeout.total_seconds()),
    plain("run.timeout_s", "actor.actor:initialize_groups", "timeout_s"),
]

_MODEL = [
    plain("model.load", "actor.actor:load_weights", "folder"),
    plain("model.reference", "actor.reference:load_weights", "folder", scenario="turns"),
    plain("model.load", f"{_CHECKPOINTS}:Checkpoints.__init__", "model_folder"),
    Seam(
        "model.dtype",
        f"{ACTOR}.__init__",
        lambda call: {str(p.dtype)[6:] for p in call.self.chunks[0].parameters()},
        expected=lambda config: {config.model.dtype},
    ),
    Seam(
        "model.layer_spec",
        "models.build:choose_layer_spec",
        lambda call: call.result.reason,
        expected=lambda config: "model.layer_spec asks for it",
    ),
]

_LORA = [
    Seam(
        "lora.rank",
        "models.lora:_initial_pair",
        lambda call: call.result.lora_A.shape[-2],
        "resumed",
    ),
    plain("lora.alpha", "models.lora:Adapter.__init__", "alpha", scenario="resumed"),
    Seam(
        "lora.targets",
        "models.lora:Adapter.__init__",
        lambda call: sorted(call.pairs),
        "resumed",
        expected=lambda config: sorted(config.lora.targets),
    ),
]


_PARALLEL = [
    size("tensor", parallel_state.get_tensor_model_parallel_world_size, "experts"),
    size("expert", parallel_state.get_expert_model_parallel_world_size, "experts"),
    size("expert_tensor", parallel_state.get_expert_tensor_parallel_world_size, "experts"),
    size("pipeline", parallel_state.get_pipeline_model_parallel_world_size, "stages"),
    Seam("parallel.virtual_pipeline", f"{ACTOR}.__init__", lambda call: len(call.self.chunks), "stages"),
    size("context", parallel_state.get_context_parallel_world_size, "context"),
    *(
        Seam(
            f"parallel.{name}",
            f"{ACTOR}.__init__",
            lambda call, name=name: getattr(call.self._ddp[0].ddp_config, name),
            "context",
        )
        for name in ("overlap_grad_reduce", "overlap_param_gather")
    ),
    plain("parallel.max_tokens_per_microbatch", "data.batches.gradient_steps:plan_minibatch", "max_tokens"),
]

_ALGORITHM = [
    *map(
        objective,
        (
            "delta_low",
            "delta_high",
            "ratio_cap",
            "top_k",
            "include_other",
            "sampled_token",
            "entropy_coef",
        ),
    ),
    *(objective(field, "resumed") for field in ("eps_low", "eps_high", "alpha")),
    *(
        plain(
            "algorithm.delta",
            f"{_HEAD}:packed_policy_loss",
            f"objective.{side}",
            scenario="turns",
            expected=lambda config: config.algorithm.delta,
        )
        for side in ("delta_low", "delta_high")
    ),
    *(
        plain(f"algorithm.{field}", f"{_HEAD}:packed_policy_loss", f"objective.{field}", scenario="turns")
        for field in ("anchor", "ref_kl_coef", "ref_kl")
    ),
    *(objective(field, "skipped") for field in ("tau_low", "tau_high", "log_ratio_coef")),
    *(
        plain(f"algorithm.{field}", "actor.actor:OutputHead.__init__", f"objective.{field}", scenario=scenario)
        for scenario, fields in (
            ("experts", ("rho_low", "rho_high")),
            ("stages", ("token_kl", "response_kl")),
            ("context", ("prefix_delta", "prefix_delta_max", "late_weight")),
        )
        for field in fields
    ),
    *(
        Seam(f"algorithm.{field}", "actor.actor:OutputHead.__init__", read, "own_rule")
        for field, read in (
            ("rule_options", lambda call: dict(given("objective.own.options")(call))),
            ("rule_over", given("objective.own.over")),
            ("rule_divergence", given("objective.divergence")),
        )
    ),
    plain("algorithm.preset", COMBINE, "objective.name"),
    plain("algorithm.preset", COMBINE, "objective.name", scenario="resumed"),
    plain("algorithm.aggregation", "data.batches.gradient_steps:sequence_weights", "mode"),
    plain("algorithm.normalize_advantage_std", "data.batches.gradient_steps:group_advantages", "normalize_std"),
    plain(
        "algorithm.normalize_advantage_std",
        "data.batches.gradient_steps:group_advantages",
        "normalize_std",
        scenario="turns",
    ),
    plain(
        "algorithm.minibatches_per_rollout",
        "data.batches.gradient_steps:minibatch_of_prompts",
        "num_minibatches",
    ),
    Seam(
        "algorithm.epochs_per_rollout",
        "data.batches.gradient_steps:minibatch_of_prompts",
        lambda call: call.key[2] + 1,
        fold=max,
    ),
    Seam("algorithm.loss_from", f"{_HEAD}:packed_policy_loss", lambda call: "logits", "turns"),
    Seam("algorithm.loss_from", f"{_HEAD}:packed_linear_policy_loss", lambda call: "hidden_states"),
    plain("algorithm.logits_chunk_bytes", f"{_HEAD}:packed_linear_policy_loss", "chunk_bytes"),
    plain("algorithm.logits_chunk_bytes", f"{_HEAD}:linear_log_probs", "chunk_bytes"),
    Seam(
        "algorithm.logits_dtype", f"{_HEAD}:packed_linear_policy_loss", lambda call: str(call.logits_dtype)[6:]
    ),
]

_OPTIMIZER = [
    *(
        Seam(setting, f"{ACTOR}.train_step", metric("optimizer/lr"), scenario, learning_rates, fold=rounded)
        for setting, scenario in (
            ("optimizer.lr", "whole"),
            ("optimizer.min_lr", "whole"),
            ("optimizer.schedule", "whole"),
            ("optimizer.warmup_steps", "whole"),
            ("optimizer.schedule", "resumed"),
        )
    ),
    Seam(
        "optimizer.weight_decay",
        f"{ACTOR}.train_step",
        lambda call: max(group["weight_decay"] for group in call.self.optimizer.param_groups),
    ),
    Seam("optimizer.beta1", f"{ACTOR}.train_step", lambda call: group("betas")(call)[0]),
    Seam("optimizer.beta2", f"{ACTOR}.train_step", lambda call: group("betas")(call)[1]),
    Seam("optimizer.eps", f"{ACTOR}.train_step", group("eps")),
    plain("optimizer.clip_grad", "megatron.core.optimizer.optimizer:clip_grad_by_total_norm_fp32", "max_norm"),
    Seam(
        "optimizer.distributed",
        f"{ACTOR}.__init__",
        lambda call: call.self._ddp[0].ddp_config.use_distributed_optimizer,
    ),
    plain("optimizer.offload", "actor.offload:TrainerMemory.states_here", "self.is_offloading"),
    Seam("optimizer.max_skipped_steps", f"{ACTOR}.train_step", lambda call: "taken", "skipped", fold=len),
]

_CHECKPOINT = [
    Seam(
        "checkpoint.every",
        f"{_CHECKPOINTS}:Checkpoints.save",
        lambda call: call.point.state.rollout,
        where=lambda call: call.point.opened is None,
        fold=list,
        expected=lambda config: [4, 7],
    ),
    Seam(
        "checkpoint.every_steps",
        f"{_CHECKPOINTS}:Checkpoints.save",
        lambda call: call.point.state.step,
        where=lambda call: call.point.opened is not None,
        fold=list,
        expected=lambda config: [16, 32],
    ),
    plain("checkpoint.resume", "run_folder.folder:RunFolder.open", "resume"),
    plain("checkpoint.asynchronous", f"{_CHECKPOINTS}:Checkpoints.save", "self.is_writing"),
    *(plain(f"checkpoint.{name}", _RETENTION, name) for name in ("keep_last", "keep_every", "keep_best")),
    Seam(
        "checkpoint.best_is",
        _RETENTION,
        given("highest_is_best"),
        expected=lambda config: config.checkpoint.best_is == "highest",
    ),
    plain("checkpoint.best_metric", "run.logger:RunLogger.latest", "metric"),
    Seam(
        "checkpoint.reserve_gib",
        "checkpoints.checkpoint_folder:require_free",
        lambda call: call.reserve_bytes / 2**30,
    ),
]

_TRACKING = [
    plain("tracking.backends", "run_folder.folder:open_backends", "names"),
    *(
        Seam(
            f"tracking.{name}",
            consumer,
            given("rollout"),
            fold=sorted_set,
            expected=every(f"tracking.{name}"),
        )
        for name, consumer in (
            ("batches_every", "run.logger:write_group"),
            ("clipped_tokens_every", "run.logger:RunLogger.write_token_lists"),
        )
    ),
    Seam(
        "tracking.samples_every",
        "run.logger:write_samples",
        lambda call: int(call.path.stem[-6:]),
        fold=list,
        expected=every("tracking.samples_every"),
    ),
    Seam(
        "tracking.paired_routing_every",
        f"{ACTOR}.paired_mismatch",
        lambda call: 1,
        fold=len,
        expected=lambda config: len(every("tracking.paired_routing_every")(config)),
    ),
    plain("tracking.mismatch_share", "data.batches.gradient_steps:pack", "measured_share"),
    Seam(
        "tracking.alarms",
        "metrics.alarms:AlarmWatch.check",
        lambda call: "checked",
        fold=len,
        expected=lambda config: 0,
    ),
    Seam(
        "tracking.shadow",
        "actor.observation:Observer.__init__",
        lambda call: bool(call.self.shadows),
        "resumed",
    ),
    Seam(
        "tracking.shadow_presets",
        "actor.observation:Observer.__init__",
        lambda call: tuple(call.self.shadows),
    ),
    Seam(
        "tracking.shadow_options.dppo_binary_tv.delta",
        "actor.observation:Observer.__init__",
        lambda call: call.self.shadows["dppo_binary_tv"].delta,
    ),
]

_MEGATRON = [
    Seam(
        "megatron.recompute_num_layers",
        f"{ACTOR}.__init__",
        lambda call: call.self.chunks[0].config.recompute_num_layers,
        "resumed",
    ),
]

TABLE = [
    *_RUN,
    *_MODEL,
    *_LORA,
    *_PARALLEL,
    *ROLLOUT_ROWS,
    *_ALGORITHM,
    *_OPTIMIZER,
    *_CHECKPOINT,
    *_TRACKING,
    *_MEGATRON,
]

ELSEWHERE = {
    "data.thinking": ("unit/test_check_prompts.py", "thinking"),
    "rollout.top_p": ("unit/test_checks.py", '"rollout.top_p": 0.9'),
    "rollout.top_k": ("unit/test_checks.py", '"rollout.top_k": '),
    "rollout.repetition_penalty": ("unit/test_checks.py", '"rollout.repetition_penalty": '),
    "rollout.max_data_gib": ("unit/test_checks.py", '"rollout.max_data_gib": 1e-4'),
    "rollout.over_sampling": ("unit/test_scheduler.py", "over_sampling=1.5"),
    "rollout.keep_partials": ("unit/test_scheduler.py", "keep_partials=False"),
    "rollout.max_staleness": ("sglang/test_training.py", '"max_staleness": 2'),
    "checkpoint.max_failed_saves": ("faults/cases.py", '"max_failed_saves": 2'),
    "tracking.max_roll_backs": ("distributed/test_roll_back.py", "max_roll_backs=1"),
}
"""Settings that their users read from the section itself: the tests that set them, by file and text."""
