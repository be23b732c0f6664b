"""Rows of [data], [rollout], [sglang] and [evaluation]: what prompts, rewards, engines and servers receive."""

from typing import Any

from seam_reads import (
    ACTOR,
    BATCH,
    COMBINE,
    called,
    evaluates,
    flag,
    given,
    is_training,
    plain,
    routing_replay,
    sampled,
    sorted_set,
    worker_reward,
)
from seams import EVALUATION, Seam

from megatron_dppo.rewards import RewardChoice

_ROLLOUTS = "rollout.rollouts"
_HEAD = "actor.output_head"
_CHECKPOINTS = "run.checkpoints"
_SGLANG = "engines.sglang"
_SYNC = "engines.weight_sync"
_SERVED: dict[str, Any] = {"scenario": "served"}
_WORKER = "workers.worker_process:WorkerProcess.__init__"
_SCORE = "rollout.scoring:Scorer.score"
_OVERLONG = "rollout.scoring:OverlongShaping.__call__"
_CLIENT = f"{_SGLANG}.client:SglangClient.__init__"


def _reward_of_pool(call: Any) -> object:
    return RewardChoice.read(call.self.rewards._name).reward


_DATA = [
    *(
        plain(f"data.{name}", f"{_ROLLOUTS}:load_prompts", argument)
        for name, argument in (
            ("prompts", "path"),
            ("prompt_column", "prompt_column"),
            ("answer_column", "answer_column"),
        )
    ),
    *(
        plain(f"data.{name}", "rollout.evaluation:load_prompts", name)
        for name in ("prompt_column", "answer_column")
    ),
    plain("data.shuffle", f"{_ROLLOUTS}:PromptStream.__init__", "shuffle"),
    Seam("data.reward", _WORKER, lambda call: worker_reward(call).reward, fold=lambda values: values[0]),
    Seam("data.reward", _SCORE, _reward_of_pool, where=is_training),
    Seam("data.reward_values", _WORKER, lambda call: tuple(worker_reward(call).values), "resumed"),
    plain("data.overlong_buffer_tokens", _OVERLONG, "self.buffer_tokens"),
    plain("data.overlong_penalty", _OVERLONG, "self.penalty"),
    Seam(
        "data.reward_workers",
        "workers.pool:WorkerPool.__init__",
        lambda call: call.self._idle.qsize(),
    ),
    plain("data.reward_timeout_s", "workers.worker_process:WorkerProcess.receive", "timeout_s"),
    plain("data.reward_memory_mb", _WORKER, "memory_mb"),
    plain("data.max_prompt_tokens", "rollout.groups:GroupMaker.begin", "self.max_prompt_tokens"),
]

_ROLLOUT = [
    Seam(
        "rollout.engine",
        f"{_SYNC}.factory:build_sync",
        lambda call: type(call.engine).__name__,
        **_SERVED,
        expected=lambda config: "SglangEngine",
    ),
    Seam(
        "rollout.prompts_per_rollout",
        "rollout.rollouts:RolloutScheduler._begin",
        lambda call: len(call.result[0]),
    ),
    plain("rollout.samples_per_prompt", "rollout.groups:_requests", "count", where=is_training),
    *sampled("rollout.max_response_tokens", "max_response_tokens"),
    plain("rollout.max_response_tokens", _OVERLONG, "self.max_response_tokens"),
    plain("rollout.max_response_tokens", "data.batches.gradient_steps:sequence_weights", "response_length"),
    *sampled("rollout.temperature", "temperature"),
    plain("rollout.temperature", f"{_HEAD}:packed_linear_policy_loss", "temperature"),
    plain("rollout.temperature", f"{_HEAD}:packed_policy_loss", "temperature", scenario="turns"),
    plain("rollout.temperature", f"{_HEAD}:linear_log_probs", "temperature"),
    plain("rollout.num_topk_log_probs", f"{BATCH}:most_probable", "k"),
    Seam(
        "rollout.num_topk_log_probs",
        f"{COMBINE}",
        lambda call: call.tokens.topk.ids.shape[1],
        expected=lambda config: config.algorithm.top_k,
    ),
    Seam(
        "rollout.routing_replay",
        f"{ACTOR}._routes",
        routing_replay,
        fold=sorted_set,
        expected=lambda config: [(False, False), (True, False), (True, True)],
    ),
    Seam(
        "rollout.routing_replay",
        f"{ACTOR}._routes",
        routing_replay,
        "resumed",
        fold=sorted_set,
        expected=lambda config: [(False, False), (False, True)],
    ),
    Seam(
        "rollout.routing_replay",
        f"{ACTOR}._routes",
        routing_replay,
        "turns",
        fold=sorted_set,
        expected=lambda config: [(False, False), (True, False), (True, True)],  # the reference's are its own
    ),
    Seam("rollout.lag", "run.state:TrainingState.begin_rollout", lambda call: len(call.self.queue), fold=max),
    plain("rollout.max_dropped_fraction", "run.logger:refuse_if_too_many_dropped", "max_fraction"),
    plain(
        "rollout.environment",
        "environments.pool:EnvironmentPool.__init__",
        "name",
        scenario="turns",
    ),
    plain(
        "rollout.generate",
        "rollout.trajectories:UserGenerate.generate",
        "self._name",
        scenario="resumed",
    ),
    Seam(
        "rollout.max_turns",
        "rollout.groups:sample_of",
        lambda call: call.completion.episode.num_turns,
        "turns",
        fold=max,
    ),
    Seam("rollout.max_turn_tokens", f"{BATCH}:num_tokens_left", given("result"), "turns", fold=max),
    Seam(
        "rollout.refill_zero_variance",
        "rollout.rollouts:RolloutScheduler._ahead",
        given("rollout"),
        "resumed",
        fold=called,
    ),
    Seam(
        "rollout.max_refills",
        "rollout.rollouts:RolloutScheduler._ahead",
        given("rollout"),
        "resumed",
        fold=lambda rollouts: rollouts.count(0),
    ),
    Seam(
        "rollout.release_trainer",
        "actor.offload:TrainerMemory.leave",
        given("self.num_bytes_away"),
        fold=called,
    ),
    plain("rollout.transformers.weights", f"{_ROLLOUTS}:TransformersEngine.__init__", "weights"),
    Seam("rollout.transformers.batch_size", f"{BATCH}:ContinuousBatch.__init__", given("slots"), fold=max),
]

_SERVERS = [
    plain("rollout.sglang.start_timeout_s", f"{_SGLANG}.own_servers:supervise", "start_timeout_s", **_SERVED),
    plain("rollout.sglang.max_restarts", f"{_SGLANG}.own_servers:supervise", "max_restarts", **_SERVED),
    plain("rollout.sglang.request_timeout_s", _CLIENT, "patience.generate_timeout_s", **_SERVED),
    plain("rollout.sglang.max_attempts", _CLIENT, "patience.max_attempts", **_SERVED),
    plain(
        "rollout.sglang.max_concurrent_requests",
        f"{_SGLANG}.engine:SglangEngine.__init__",
        "max_concurrent_requests",
        **_SERVED,
    ),
    Seam(
        "rollout.sglang.num_own_servers",
        f"{_SGLANG}.own_servers:plan_launch",
        given("index"),
        **_SERVED,
        fold=len,
    ),
    Seam(
        "rollout.sglang.weight_sync",
        f"{_SYNC}.factory:SglangSync.__init__",
        lambda call: type(call.transport).__name__,
        **_SERVED,
        expected=lambda config: "DiskTransport",
    ),
    *(
        plain(
            "rollout.sglang.sync_bucket_bytes",
            f"{_SYNC}.factory:{way}Transport.__init__",
            "bucket_bytes",
            **_SERVED,
            expected=lambda config: config.rollout.sglang.sync_bucket_bytes // 2,
        )
        for way in ("Disk", "Distributed", "Tensor")
    ),
    plain("rollout.sglang.sync_timeout_s", f"{_SYNC}.factory:RunServers.__init__", "timeout_s", **_SERVED),
    plain(
        "rollout.sglang.sync_timeout_s",
        f"{_SYNC}.factory:DistributedTransport.__init__",
        "timeout_s",
        **_SERVED,
    ),
    plain("rollout.sglang.probe_every", f"{_SYNC}.factory:SglangSync.__init__", "probe_every", **_SERVED),
    plain("rollout.sglang.colocated", "runtime.gpu_ledger:GpuLedger.begin", "takes_turns", **_SERVED),
    Seam(
        "sglang.max_running_requests",
        f"{_SGLANG}.own_servers:plan_launch",
        lambda call: int(flag(call, "--max-running-requests")),
        **_SERVED,
    ),
    Seam("sglang.device", f"{_SGLANG}.own_servers:plan_launch", lambda call: flag(call, "--device"), **_SERVED),
    Seam(
        "sglang.python",
        f"{_SGLANG}.own_servers:plan_launch",
        lambda call: call.result.command[0],
        **_SERVED,
        expected=lambda config: str(config.sglang["python"]),
    ),
]

_EVALUATION = [
    Seam(
        "evaluation.every",
        EVALUATION,
        given("rollout"),
        where=evaluates("far"),
        fold=list,
        expected=lambda config: [0, 6, 7],
    ),
    *(
        row
        for name, prefix in (("far", "evaluation"), ("near", "evaluation.sets.near"))
        for argument in ("temperature", "top_p", "max_response_tokens")
        for row in sampled(f"{prefix}.{argument}", argument, evaluates(name))
    ),
    *(
        plain(
            f"{prefix}.samples_per_prompt",
            "rollout.groups:_requests",
            "count",
            where=evaluates(name),
        )
        for name, prefix in (("far", "evaluation"), ("near", "evaluation.sets.near"))
    ),
    Seam(
        "evaluation.sets.near.reward",
        _SCORE,
        _reward_of_pool,
        where=evaluates("near"),
    ),
    Seam(
        "evaluation.sets.far.reward",
        _SCORE,
        _reward_of_pool,
        where=evaluates("far"),
        expected=lambda config: config.data.reward,
    ),
    Seam(
        "evaluation.sets.near.prompts",
        "rollout.evaluation:load_prompts",
        given("path"),
        fold=set,
        expected=lambda config: {each.prompts for each in config.evaluation.sets.values()},
    ),
    plain("evaluation.pass_at", "rollout.evaluation:set_metrics", "ks"),
]

ROLLOUT_ROWS = [*_DATA, *_ROLLOUT, *_SERVERS, *_EVALUATION]
