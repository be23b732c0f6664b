"""Classify every setting once: may a resume change it, and do results of `evaluate` depend on it?

The tests fail for a key of the schema without a row. Rows are not patterns, so a new key is never classified by
accident. An option of the pass-through tables [megatron] and [sglang] without a row is part of the experiment.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from megatron_dppo.algorithms.presets import OVERRIDABLE

Evaluated = Literal["no", "all sets", "own set", "weights"]


class Effect(NamedTuple):
    """Effects of one setting."""

    resume: str | None = None  # reason why a resume may change it; None if it is part of the experiment
    evaluated: Evaluated = "no"  # whether scores depend on it, and the place that records it in saved results


_EXPERIMENT = Effect()
_ALL_SETS = Effect(evaluated="all sets")
_OWN_SET = Effect(evaluated="own set")
_TIME_OUT = Effect("A time limit.")
_MEMORY = Effect("Memory placement; the numbers are the same.")
_MEMORY_ROUNDING = Effect("Memory placement; the numbers are the same up to rounding.")
_LAYOUT = Effect("The layout; a checkpoint that cannot be resharded is refused when it is loaded.")
_SERVERS = Effect("How servers are started, called and updated.")
_SAVING = Effect("Saving.")
_TRACKING = Effect("What is measured and written, and what an alarm does.")
_LIMIT = Effect("A limit that only ends a run.")

EFFECTS: Mapping[str, Effect] = {
    "run.folder": Effect("The run was moved."),
    "run.seed": _ALL_SETS,
    "run.num_rollouts": Effect(
        "The length of the run, if optimizer.schedule is constant and rollout.lag is 0; both depend on it."
    ),
    "run.num_threads": Effect("CPU threads."),
    "run.timeout_s": _TIME_OUT,
    "run.peer_timeout_s": _TIME_OUT,
    "model.load": Effect(evaluated="weights"),
    "model.reference": _EXPERIMENT,
    "model.dtype": _ALL_SETS,
    "model.layer_spec": _EXPERIMENT,
    "lora.rank": _EXPERIMENT,
    "lora.alpha": _EXPERIMENT,
    "lora.targets": _EXPERIMENT,
    "parallel.tensor": _LAYOUT,
    "parallel.pipeline": _LAYOUT,
    "parallel.virtual_pipeline": _LAYOUT,
    "parallel.context": _LAYOUT,
    "parallel.expert": _LAYOUT,
    "parallel.expert_tensor": _LAYOUT,
    "parallel.max_tokens_per_microbatch": _LAYOUT,
    "parallel.share_prefixes": _LAYOUT,
    "parallel.overlap_grad_reduce": _LAYOUT,
    "parallel.overlap_param_gather": _LAYOUT,
    "data.prompts": _EXPERIMENT,
    "data.prompt_column": _ALL_SETS,
    "data.answer_column": _ALL_SETS,
    "data.shuffle": _EXPERIMENT,
    "data.reward": _OWN_SET,
    "data.reward_values": _EXPERIMENT,
    "data.thinking": _OWN_SET,
    "data.overlong_buffer_tokens": _EXPERIMENT,
    "data.overlong_penalty": _EXPERIMENT,
    "data.reward_workers": Effect("Processes."),
    "data.reward_timeout_s": Effect("A time limit.", "all sets"),
    "data.reward_if_timed_out": _ALL_SETS,
    "data.reward_retries": Effect("Retries of a failed reward.", "all sets"),
    "data.reward_memory_mb": Effect("A memory limit.", "all sets"),
    "data.worker_environment": Effect("Further variables of workers; scores do not depend on them."),
    "data.max_prompt_tokens": _ALL_SETS,
    "rollout.engine": _ALL_SETS,
    "rollout.prompts_per_rollout": _EXPERIMENT,
    "rollout.samples_per_prompt": _EXPERIMENT,
    "rollout.max_response_tokens": _OWN_SET,
    "rollout.environment": _ALL_SETS,
    "rollout.generate": _ALL_SETS,
    "rollout.max_turns": _ALL_SETS,
    "rollout.max_turn_tokens": _ALL_SETS,
    "rollout.thinking": _ALL_SETS,
    "rollout.temperature": _EXPERIMENT,
    "rollout.top_p": _EXPERIMENT,
    "rollout.num_topk_log_probs": _EXPERIMENT,
    "rollout.routing_replay": _EXPERIMENT,
    "rollout.max_dropped_fraction": _LIMIT,
    "rollout.max_data_gib": Effect("A memory limit."),
    "rollout.lag": _EXPERIMENT,
    "rollout.over_sampling": _EXPERIMENT,
    "rollout.max_staleness": _EXPERIMENT,
    "rollout.refill_zero_variance": _EXPERIMENT,
    "rollout.max_refills": _EXPERIMENT,
    "rollout.release_trainer": _MEMORY,
    "rollout.agent.harness": _ALL_SETS,
    "rollout.agent.command": _ALL_SETS,
    "rollout.agent.train": _EXPERIMENT,
    "rollout.agent.thinking": _ALL_SETS,
    "rollout.agent.renderer": _ALL_SETS,
    "rollout.agent.episode_timeout_s": Effect("A time limit.", "all sets"),
    "rollout.agent.call_timeout_s": Effect("A time limit.", "all sets"),
    "rollout.agent.max_calls": _ALL_SETS,
    "rollout.transformers.weights": _ALL_SETS,
    "rollout.transformers.batch_size": Effect("Sequences decoded at once."),
    "rollout.sglang.start_timeout_s": _SERVERS,
    "rollout.sglang.max_restarts": _SERVERS,
    "rollout.sglang.request_timeout_s": Effect(_SERVERS.resume, "all sets"),
    "rollout.sglang.max_attempts": _SERVERS,
    "rollout.sglang.max_concurrent_requests": _SERVERS,
    "rollout.sglang.num_own_servers": _SERVERS,
    "rollout.sglang.weight_sync": _SERVERS,
    "rollout.sglang.sync_bucket_bytes": _SERVERS,
    "rollout.sglang.sync_timeout_s": _SERVERS,
    "rollout.sglang.probe_every": _SERVERS,
    "rollout.sglang.colocated": _SERVERS,
    "algorithm.preset": _EXPERIMENT,
    **{f"algorithm.{field}": _EXPERIMENT for field in OVERRIDABLE},
    "algorithm.replay_recomputed_routes": _EXPERIMENT,
    "algorithm.aggregation": _EXPERIMENT,
    "algorithm.normalize_advantage_std": _EXPERIMENT,
    "algorithm.minibatches_per_rollout": _EXPERIMENT,
    "algorithm.epochs_per_rollout": _EXPERIMENT,
    "algorithm.loss_from": _MEMORY_ROUNDING,
    "algorithm.logits_chunk_bytes": _MEMORY_ROUNDING,
    "algorithm.logits_dtype": _EXPERIMENT,
    "optimizer.lr": _EXPERIMENT,
    "optimizer.min_lr": _EXPERIMENT,
    "optimizer.schedule": _EXPERIMENT,
    "optimizer.warmup_steps": _EXPERIMENT,
    "optimizer.weight_decay": _EXPERIMENT,
    "optimizer.beta1": _EXPERIMENT,
    "optimizer.beta2": _EXPERIMENT,
    "optimizer.eps": _EXPERIMENT,
    "optimizer.clip_grad": _EXPERIMENT,
    "optimizer.distributed": Effect(
        "Memory placement; a checkpoint that stores states the other way is refused."
    ),
    "optimizer.offload": _MEMORY,
    "optimizer.max_skipped_steps": _LIMIT,
    "checkpoint.every": _SAVING,
    "checkpoint.every_steps": _SAVING,
    "checkpoint.resume": _SAVING,
    "checkpoint.asynchronous": _SAVING,
    "checkpoint.keep_last": _SAVING,
    "checkpoint.keep_every": _SAVING,
    "checkpoint.keep_best": _SAVING,
    "checkpoint.best_metric": _SAVING,
    "checkpoint.best_is": _SAVING,
    "checkpoint.reserve_gib": _SAVING,
    "checkpoint.max_failed_saves": _SAVING,
    "evaluation.sets": _OWN_SET,
    "evaluation.every": Effect("How often the sets are evaluated."),
    "evaluation.samples_per_prompt": _OWN_SET,
    "evaluation.temperature": _OWN_SET,
    "evaluation.top_p": _OWN_SET,
    "evaluation.max_response_tokens": _OWN_SET,
    "evaluation.pass_at": _OWN_SET,
    "tracking.backends": _TRACKING,
    "tracking.prometheus_address": _TRACKING,
    "tracking.samples_every": _TRACKING,
    "tracking.batches_every": _TRACKING,
    "tracking.paired_routing_every": _TRACKING,
    "tracking.mismatch_share": _TRACKING,
    "tracking.alarms": _TRACKING,
    "tracking.max_roll_backs": _TRACKING,
    "tracking.clipped_tokens_every": _TRACKING,
    "tracking.shadow": _TRACKING,
    "tracking.shadow_presets": _TRACKING,
    "tracking.shadow_options": _TRACKING,
}
"""The effect of each key of the schema."""

_SERVER_PLACE = "Addresses of the servers."
_SERVER_LAYOUT = "The layout of a server."
_SERVER_LOAD = "Load of a server."
_SERVER_GRAPHS = "How a server launches kernels."
_SERVER_LOG = "A server's log."

OPTION_MAY_CHANGE: Mapping[str, str] = {
    **{
        f"megatron.recompute_{name}": "Memory placement; the numbers are the same."
        for name in ("granularity", "method", "num_layers", "modules")
    },
    "sglang.python": "The interpreter of the servers.",
    **{f"sglang.{name}": _SERVER_PLACE for name in ("host", "port", "base_gpu_id")},
    **{
        f"sglang.{name}_size": _SERVER_LAYOUT
        for name in (
            "tp",
            "pp",
            "dp",
            "ep",
            "attn_cp",
            "attn_dp",
            "moe_dp",
            "moe_dense_tp",
            "shared_experts_tp",
        )
    },
    "sglang.mem_fraction_static": "Memory of a server.",
    **{
        f"sglang.max_{name}": _SERVER_LOAD for name in ("prefill_tokens", "queued_requests", "running_requests")
    },
    **{
        f"sglang.{name}": _SERVER_LOAD
        for name in ("max_total_tokens", "chunked_prefill_size", "page_size", "pp_max_micro_batch_size")
    },
    **{
        f"sglang.schedule_{name}": _SERVER_LOAD
        for name in ("policy", "conservativeness", "low_priority_values_first")
    },
    **{
        f"sglang.cuda_graph_{name}": _SERVER_GRAPHS
        for name in (
            "backend_decode",
            "backend_prefill",
            "bs_decode",
            "bs_prefill",
            "config",
            "max_bs_decode",
            "max_bs_prefill",
            "max_seq_len_prefill",
            "prefill_max_context",
        )
    },
    **{f"sglang.disable_cuda_graph{name}": _SERVER_GRAPHS for name in ("", "_padding")},
    **{
        f"sglang.log_{name}": _SERVER_LOG
        for name in ("level", "level_http", "requests", "requests_format", "requests_level", "requests_target")
    },
    **{f"sglang.{name}_timeout": _TIME_OUT.resume or "" for name in ("dist", "watchdog", "soft_watchdog")},
}
"""Options of the pass-through tables that a resume may change, and why."""


def may_change(key: str) -> bool:
    """Return whether a resume may change a setting.

    Args:
        key: A dotted key of a resolved config. An entry of a table, such as `data.reward.math`, has the class
            of the table.
    """
    return key in OPTION_MAY_CHANGE or _effect(key).resume is not None


def free_settings() -> Mapping[str, list[str]]:
    """Return the settings that a resume may change, by the reason."""
    reasons: dict[str, list[str]] = {}
    for key, effect in EFFECTS.items():
        if effect.resume is not None:
            reasons.setdefault(effect.resume, []).append(key)
    for key, reason in OPTION_MAY_CHANGE.items():
        reasons.setdefault(reason, []).append(key)
    return reasons


def effect_on_evaluation(key: str) -> Evaluated:
    """Return whether results of `evaluate` depend on a setting, and the place that records it."""
    return "all sets" if key.startswith("sglang.") else _effect(key).evaluated


def _effect(key: str) -> Effect:
    while key not in EFFECTS and "." in key:
        key = key.rpartition(".")[0]
    return EFFECTS.get(key, _EXPERIMENT)
