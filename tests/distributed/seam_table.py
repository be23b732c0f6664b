"""Settings whose way to a consumer no pair of runs shows, and what the consumer must have received.

A setting has a row here if `setting_effects.py` names another test for its effect, or if it has several
consumers and a run in which one of them ignores it looks right. The other settings have pairs of runs alone.
"""

from megatron.core import parallel_state

from megatron_dppo.rewards import RewardChoice
from tests.distributed.seams import (
    Received,
    Seam,
    called,
    evaluates,
    flag,
    given,
    is_training,
    learning_rates,
    metric,
    plain,
    rounded,
    routing_replay,
    rows,
    sampled,
    size,
    sorted_set,
    worker_reward,
)

_ACTOR = "actor.actor:Actor"
_CHECKPOINTS = "run.checkpoints"
_LAUNCH = "engines.sglang.server:plan_launch"
_SYNC = "engines.weight_sync.factory"
_WORKER = "workers.worker_process:WorkerProcess.__init__"
_SCORE = "rollout.scoring:Scorer.score"

# Settings that arrive as they are: the setting, its consumer, and the argument (or an attribute of one).
_AS_IT_IS = {
    "whole": """
        run.seed  data.batches.gradient_steps:minibatch_of_prompts  key.0
        run.seed  actor.actor:initialize_groups  seed
        run.seed  rollout.evaluation:EvaluationSet.metrics  seed
        run.timeout_s  actor.actor:initialize_groups  timeout_s
        run.peer_timeout_s  run.session:watching  peer_timeout_s
        model.load  run.checkpoints:Checkpoints.__init__  model_folder
        parallel.share_prefixes  actor.forward:View.of  shares_prefixes
        data.{prompt_column,answer_column}  rollout.evaluation:load_prompts  *
        data.reward_if_timed_out  rollout.scoring:ScoredTimeOuts.valued  self.value
        data.worker_environment  workers.worker_process:WorkerProcess.__init__  environment
        rollout.max_response_tokens  rollout.scoring:OverlongShaping.__call__  self.max_response_tokens
        rollout.max_response_tokens  data.batches.gradient_steps:sequence_weights  response_length
        rollout.temperature  actor.forward:packed_linear_policy_loss  layer.temperature
        rollout.temperature  actor.forward:token_log_probs  layer.temperature
        algorithm.logits_chunk_bytes  actor.forward:packed_linear_policy_loss  layer.chunk_bytes
        algorithm.logits_chunk_bytes  actor.forward:token_log_probs  layer.chunk_bytes
        optimizer.distributed  actor.actor:Actor.__init__  self._ddp.0.ddp_config.use_distributed_optimizer
        optimizer.offload  actor.offload:TrainerMemory.states_here  self.is_offloading
        checkpoint.resume  run_folder.folder:RunFolder.open  resume
        checkpoint.asynchronous  run.checkpoints:Checkpoints.save  self.is_writing
        tracking.prometheus_address  run_folder.folder:open_backends  config.tracking.*
    """,
    "turns": """
        rollout.temperature  actor.forward:packed_policy_loss  layer.temperature
        algorithm.delta  actor.forward:packed_policy_loss  objective.delta_low
        algorithm.delta  actor.forward:packed_policy_loss  objective.delta_high
        algorithm.{anchor,ref_kl_coef,ref_kl}  actor.forward:packed_policy_loss  objective.*
    """,
    "context": """
        parallel.overlap_grad_reduce  actor.actor:Actor.__init__  self._ddp.0.ddp_config.*
        parallel.overlap_param_gather  actor.actor:Actor.__init__  self._ddp.0.ddp_config.*
    """,
    "agents": """
        rollout.agent.harness  agents.agents:HarnessPool.__init__  *
        rollout.agent.thinking  agents.agents:LibraryRendering.__init__  thinking
        rollout.agent.renderer  agents.agents:LibraryRendering.__init__  name
        rollout.agent.{episode_timeout_s,call_timeout_s,max_calls}  agents.agents:Episode.__init__  limits.*
        rollout.agent.train  agents.agents:Episode.__init__  limits.train
    """,
    "served": """
        run.seed  engines.weight_sync.factory:Probe.__init__  seed
        rollout.sglang.start_timeout_s  engines.sglang.server:supervise  start_timeout_s
        rollout.sglang.max_restarts  engines.sglang.server:supervise  max_restarts
        rollout.sglang.max_attempts  engines.sglang.client:SglangClient.__init__  patience.max_attempts
        rollout.sglang.max_concurrent_requests  engines.sglang.engine:SglangEngine.__init__  *
        rollout.sglang.sync_timeout_s  engines.weight_sync.factory:RunServers.__init__  timeout_s
        rollout.sglang.sync_timeout_s  engines.weight_sync.factory:DistributedTransport.__init__  timeout_s
        rollout.sglang.probe_every  engines.weight_sync.factory:SglangSync.__init__  probe_every
        rollout.sglang.colocated  runtime.gpu_ledger:GpuLedger.begin  takes_turns
    """,
}


def _reward_of_pool(call: Received) -> object:
    scorer = call.self.rewards
    return RewardChoice.read(getattr(scorer, "scorer", scorer)._name).reward


_RUN = [
    Seam(
        "run.seed",
        _LAUNCH,
        lambda call: flag(call, "--random-seed"),
        "served",
        expected=lambda config: str(config.run.seed),
    ),
    Seam("run.timeout_s", "torch.distributed:init_process_group", lambda call: call.timeout.total_seconds()),
]

_MODEL = [
    size("tensor", parallel_state.get_tensor_model_parallel_world_size, "experts"),
    size("expert", parallel_state.get_expert_model_parallel_world_size, "experts"),
    size("expert_tensor", parallel_state.get_expert_tensor_parallel_world_size, "experts"),
    size("pipeline", parallel_state.get_pipeline_model_parallel_world_size, "stages"),
    size("context", parallel_state.get_context_parallel_world_size, "context"),
    Seam("parallel.virtual_pipeline", f"{_ACTOR}.__init__", lambda call: len(call.self.chunks), "stages"),
]

_DATA = [
    Seam("data.reward", _WORKER, lambda call: worker_reward(call).reward, fold=lambda values: values[0]),
    Seam("data.reward", _SCORE, _reward_of_pool, where=is_training),
    Seam("data.reward_workers", "workers.pool:WorkerPool.__init__", lambda call: call.self._idle.qsize()),
]

_ROLLOUT = [
    *(
        Seam(
            "rollout.routing_replay",
            f"{_ACTOR}._routes",
            routing_replay,
            scenario,
            fold=sorted_set,
            expected=lambda config, kinds=kinds: kinds,
        )
        for scenario, kinds in (
            ("whole", [(False, False), (True, False), (True, True)]),
            ("turns", [(False, False), (True, False), (True, True)]),  # the reference's are its own
        )
    ),
    Seam("rollout.thinking", "rollout.trajectories:Conversations.__init__", given("limits.thinking"), "turns"),
    Seam(
        "rollout.release_trainer",
        "actor.offload:TrainerMemory.leave",
        given("self.num_bytes_away"),
        fold=called,
    ),
    Seam(
        "rollout.transformers.batch_size",
        "engines.embedded.continuous_batch:ContinuousBatch.__init__",
        given("slots"),
        fold=max,
    ),
]

_SERVERS = [
    Seam(
        "rollout.engine",
        f"{_SYNC}:build_sync",
        lambda call: type(call.engine).__name__,
        "served",
        expected=lambda config: "SglangEngine",
    ),
    plain(
        "rollout.sglang.request_timeout_s",
        "engines.sglang.client:SglangClient.__init__",
        "patience.generate_timeout_s",
        scenario="served",
    ),
    Seam("rollout.sglang.num_own_servers", _LAUNCH, given("index"), "served", fold=len),
    Seam(
        "rollout.sglang.weight_sync",
        f"{_SYNC}:SglangSync.__init__",
        lambda call: type(call.transport).__name__,
        "served",
        expected=lambda config: "DiskTransport",
    ),
    *(
        Seam(
            "rollout.sglang.sync_bucket_bytes",
            f"{_SYNC}:{way}Transport.__init__",
            given("bucket_bytes"),
            "served",
            expected=lambda config: config.rollout.sglang.sync_bucket_bytes // 2,
        )
        for way in ("Disk", "Distributed", "Tensor")
    ),
    Seam(
        "sglang.max_running_requests", _LAUNCH, lambda call: int(flag(call, "--max-running-requests")), "served"
    ),
    Seam("sglang.device", _LAUNCH, lambda call: flag(call, "--device"), "served"),
    Seam(
        "sglang.python",
        _LAUNCH,
        given("result.command.0"),
        "served",
        expected=lambda config: str(config.sglang["python"]),
    ),
]

_EVALUATION = [
    *sampled("evaluation.sets.near.temperature", "temperature", evaluates("near")),
    *sampled("evaluation.sets.near.top_p", "top_p", evaluates("near")),
    *sampled("evaluation.sets.near.max_response_tokens", "max_response_tokens", evaluates("near")),
    plain(
        "evaluation.sets.near.samples_per_prompt", "rollout.groups:_requests", "count", where=evaluates("near")
    ),
    Seam("evaluation.sets.near.reward", _SCORE, _reward_of_pool, where=evaluates("near")),
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
        expected=lambda config: {
            file.path for each in config.evaluation.sets.values() for file in each.prompts
        },
    ),
]

_ALGORITHM = [
    Seam("algorithm.loss_from", "actor.forward:packed_policy_loss", lambda call: "logits", "turns"),
    Seam("algorithm.loss_from", "actor.forward:packed_linear_policy_loss", lambda call: "hidden_states"),
]

_OPTIMIZER = [
    Seam(
        "optimizer.schedule",
        f"{_ACTOR}.train_step",
        metric("optimizer/lr"),
        "resumed",
        learning_rates,
        fold=rounded,
    ),
    Seam("optimizer.max_skipped_steps", f"{_ACTOR}.train_step", lambda call: "taken", "skipped", fold=len),
]

_TRACKING = [
    Seam(
        "tracking.alarms",
        "metrics.alarms:AlarmWatch.check",
        lambda call: "checked",
        fold=len,
        expected=lambda config: 0,
    ),
]

TABLE = [
    *(seam for scenario, text in _AS_IT_IS.items() for seam in rows(scenario, text)),
    *(*_RUN, *_MODEL, *_DATA, *_ROLLOUT, *_SERVERS, *_EVALUATION),
    *(*_ALGORITHM, *_OPTIMIZER, *_TRACKING),
]

READ_FROM_THE_SECTION = {
    *("data.thinking", "rollout.over_sampling", "rollout.max_staleness"),
    *("checkpoint.max_failed_saves", "tracking.max_roll_backs", "rollout.agent.command"),
}
"""Settings that their users read from the section itself; `ASSERTED_BY` names their tests."""
