"""Every setting, and what its consumer must have received: `test_seams.py` refuses a setting without a row."""

import torch
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
        run.folder  run.checkpoints:Checkpoints.__init__  folder.parent
        run.seed  engines.embedded.continuous_batch:sampling_noise  noise_key.0
        run.seed  rollout.rollouts:PromptStream.__init__  seed
        run.seed  data.batches.gradient_steps:minibatch_of_prompts  key.0
        run.seed  actor.actor:initialize_groups  seed
        run.seed  rollout.evaluation:EvaluationSet.metrics  seed
        run.timeout_s  actor.actor:initialize_groups  timeout_s
        run.peer_timeout_s  run.session:watching  peer_timeout_s
        model.load  actor.actor:load_weights  folder
        model.load  run.checkpoints:Checkpoints.__init__  model_folder
        parallel.max_tokens_per_microbatch  data.batches.gradient_steps:plan_minibatch  max_tokens
        parallel.share_prefixes  actor.forward:Forwarding.of  shares_prefixes
        parallel.share_prefixes  data.batches.gradient_steps:train_batches  shape.shares_prefixes
        data.prompts  rollout.rollouts:load_training_prompts  files
        data.{prompt_column,answer_column}  rollout.rollouts:load_training_prompts  *
        data.{prompt_column,answer_column}  rollout.evaluation:load_prompts  *
        data.shuffle  rollout.rollouts:PromptStream.__init__  shuffle
        data.overlong_buffer_tokens  rollout.scoring:OverlongShaping.__call__  self.buffer_tokens
        data.overlong_penalty  rollout.scoring:OverlongShaping.__call__  self.penalty
        data.reward_timeout_s  workers.worker_process:WorkerProcess.receive  timeout_s
        data.reward_if_timed_out  rollout.scoring:ScoredTimeOuts.valued  self.value
        data.reward_memory_mb  workers.worker_process:WorkerProcess.__init__  memory_mb
        data.worker_environment  workers.worker_process:WorkerProcess.__init__  environment
        data.max_prompt_tokens  rollout.groups:GroupMaker.begin  self.max_prompt_tokens
        rollout.max_response_tokens  rollout.scoring:OverlongShaping.__call__  self.max_response_tokens
        rollout.max_response_tokens  data.batches.gradient_steps:sequence_weights  response_length
        rollout.temperature  actor.forward:packed_linear_policy_loss  temperature
        rollout.temperature  actor.forward:linear_log_probs  temperature
        rollout.num_topk_log_probs  engines.embedded.continuous_batch:most_probable  k
        rollout.max_dropped_fraction  run.logger:refuse_if_too_many_dropped  max_fraction
        rollout.transformers.weights  rollout.rollouts:TransformersEngine.__init__  weights
        evaluation.pass_at  rollout.evaluation:set_metrics  ks
        algorithm.{delta_low,delta_high,ratio_cap,top_k}  kernels.linear:combine_statistics  objective.*
        algorithm.{include_other,sampled_token,entropy_coef}  kernels.linear:combine_statistics  objective.*
        algorithm.preset  kernels.linear:combine_statistics  objective.name
        algorithm.aggregation  data.batches.gradient_steps:sequence_weights  mode
        algorithm.normalize_advantage_std  data.batches.gradient_steps:group_advantages  normalize_std
        algorithm.minibatches_per_rollout  data.batches.gradient_steps:minibatch_of_prompts  num_minibatches
        algorithm.logits_chunk_bytes  actor.forward:packed_linear_policy_loss  chunk_bytes
        algorithm.logits_chunk_bytes  actor.forward:linear_log_probs  chunk_bytes
        optimizer.beta1  actor.actor:Actor.train_step  self.optimizer.param_groups.0.betas.0
        optimizer.beta2  actor.actor:Actor.train_step  self.optimizer.param_groups.0.betas.1
        optimizer.eps  actor.actor:Actor.train_step  self.optimizer.param_groups.0.eps
        optimizer.clip_grad  megatron.core.optimizer.optimizer:clip_grad_by_total_norm_fp32  max_norm
        optimizer.distributed  actor.actor:Actor.__init__  self._ddp.0.ddp_config.use_distributed_optimizer
        optimizer.offload  actor.offload:TrainerMemory.states_here  self.is_offloading
        checkpoint.resume  run_folder.folder:RunFolder.open  resume
        checkpoint.asynchronous  run.checkpoints:Checkpoints.save  self.is_writing
        checkpoint.{keep_last,keep_every,keep_best}  run.checkpoints:Retention.__init__  *
        checkpoint.best_metric  run.logger:RunLogger.latest  metric
        tracking.backends  run_folder.folder:open_backends  names
        tracking.prometheus_address  run_folder.folder:open_backends  config.tracking.*
        tracking.mismatch_share  data.batches.gradient_steps:pack  measured_share
    """,
    "resumed": """
        lora.rank  models.lora:_initial_pair  result.lora_A.shape.-2
        lora.alpha  models.lora:Adapter.__init__  alpha
        rollout.generate  rollout.trajectories:UserGenerate.generate  self._name
        algorithm.{eps_low,eps_high,alpha}  kernels.linear:combine_statistics  objective.*
        algorithm.preset  kernels.linear:combine_statistics  objective.name
        megatron.recompute_num_layers  actor.actor:Actor.__init__  self.chunks.0.config.*
    """,
    "turns": """
        model.reference  actor.reference:load_weights  folder
        rollout.environment  environments.pool:EnvironmentPool.__init__  name
        rollout.temperature  actor.forward:packed_policy_loss  temperature
        algorithm.delta  actor.forward:packed_policy_loss  objective.delta_low
        algorithm.delta  actor.forward:packed_policy_loss  objective.delta_high
        algorithm.{anchor,ref_kl_coef,ref_kl}  actor.forward:packed_policy_loss  objective.*
        algorithm.normalize_advantage_std  data.batches.gradient_steps:group_advantages  normalize_std
    """,
    "skipped": """
        algorithm.{tau_low,tau_high,log_ratio_coef}  kernels.linear:combine_statistics  objective.*
    """,
    "own_rule": """
        algorithm.rule_over  actor.actor:OutputHead.__init__  objective.own.over
        algorithm.rule_divergence  actor.actor:OutputHead.__init__  objective.divergence
    """,
    "share": "algorithm.stale_share  actor.actor:OutputHead.__init__  objective.*",
    "decay": """
        algorithm.{power_low,power_high,decay_low,decay_high}  actor.actor:OutputHead.__init__  objective.*
    """,
    "experts": "algorithm.{rho_low,rho_high}  actor.actor:OutputHead.__init__  objective.*",
    "stages": "algorithm.{token_kl,response_kl}  actor.actor:OutputHead.__init__  objective.*",
    "context": """
        algorithm.{prefix_delta,prefix_delta_max,late_weight}  actor.actor:OutputHead.__init__  objective.*
        parallel.overlap_grad_reduce  actor.actor:Actor.__init__  self._ddp.0.ddp_config.*
        parallel.overlap_param_gather  actor.actor:Actor.__init__  self._ddp.0.ddp_config.*
    """,
    "agents": """
        rollout.agent.{harness,command}  agents.agents:HarnessPool.__init__  *
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
    Seam(
        "run.num_rollouts",
        "rollout.scheduling:Scheduler.next",
        given("rollout"),
        fold=list,
        expected=lambda config: list(range(config.run.num_rollouts)),
    ),
    Seam("run.num_threads", f"{_ACTOR}.train_step", lambda call: torch.get_num_threads(), "skipped"),
    Seam("run.timeout_s", "torch.distributed:init_process_group", lambda call: call.timeout.total_seconds()),
]

_MODEL = [
    Seam(
        "model.dtype",
        f"{_ACTOR}.__init__",
        lambda call: {str(p.dtype)[6:] for p in call.self.chunks[0].parameters()},
        expected=lambda config: {config.model.dtype},
    ),
    Seam(
        "model.layer_spec",
        "models.build:choose_layer_spec",
        given("result.reason"),
        expected=lambda config: "model.layer_spec asks for it",
    ),
    Seam(
        "lora.targets",
        "models.lora:Adapter.__init__",
        lambda call: sorted(call.pairs),
        "resumed",
        expected=lambda config: sorted(config.lora.targets),
    ),
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
    Seam("data.reward_retries", _WORKER, lambda call: worker_reward(call).retries),
    Seam("data.reward_values", _WORKER, lambda call: tuple(worker_reward(call).values), "resumed"),
    Seam("data.reward_workers", "workers.pool:WorkerPool.__init__", lambda call: call.self._idle.qsize()),
]

_ROLLOUT = [
    Seam(
        "rollout.prompts_per_rollout",
        "rollout.producer:Producer.begin_rollout",
        given("limit"),
    ),
    plain("rollout.samples_per_prompt", "rollout.groups:_requests", "count", where=is_training),
    *sampled("rollout.max_response_tokens", "max_response_tokens"),
    *sampled("rollout.temperature", "temperature"),
    Seam(
        "rollout.num_topk_log_probs",
        "kernels.linear:combine_statistics",
        lambda call: call.tokens.topk.ids.shape[1],
        expected=lambda config: config.algorithm.model_dump()["top_k"],
    ),
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
            ("resumed", [(False, False), (False, True)]),
            ("turns", [(False, False), (True, False), (True, True)]),  # the reference's are its own
        )
    ),
    Seam("rollout.lag", "run.state:TrainingState.begin_rollout", lambda call: len(call.self.queue), fold=max),
    Seam(
        "rollout.max_turns",
        "rollout.sampler:sample_of",
        given("completion.episode.num_turns"),
        "turns",
        fold=max,
    ),
    Seam("rollout.thinking", "rollout.trajectories:Conversations.__init__", given("limits.thinking"), "turns"),
    Seam(
        "rollout.max_turn_tokens",
        "engines.embedded.continuous_batch:num_tokens_left",
        given("result"),
        "turns",
        fold=max,
    ),
    *(
        Seam(
            f"rollout.{name}",
            "rollout.producer:Producer._begin",
            given("self._rollout"),
            "resumed",
            fold=fold,
        )
        for name, fold in (  # the first call of a rollout begins it
            ("refill_zero_variance", lambda rollouts: rollouts.count(0) > 1),
            ("max_refills", lambda rollouts: rollouts.count(0) - 1),
        )
    ),
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
    *(
        row
        for name, prefix in (("far", "evaluation"), ("near", "evaluation.sets.near"))
        for row in (
            *sampled(f"{prefix}.temperature", "temperature", evaluates(name)),
            *sampled(f"{prefix}.top_p", "top_p", evaluates(name)),
            *sampled(f"{prefix}.max_response_tokens", "max_response_tokens", evaluates(name)),
            plain(f"{prefix}.samples_per_prompt", "rollout.groups:_requests", "count", where=evaluates(name)),
        )
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
    Seam(
        "algorithm.rule_options",
        "actor.actor:OutputHead.__init__",
        lambda call: dict(call.objective.own.options),
        "own_rule",
    ),
    Seam(
        "algorithm.epochs_per_rollout",
        "data.batches.gradient_steps:minibatch_of_prompts",
        lambda call: call.key[2] + 1,
        fold=max,
    ),
    Seam("algorithm.loss_from", "actor.forward:packed_policy_loss", lambda call: "logits", "turns"),
    Seam("algorithm.loss_from", "actor.forward:packed_linear_policy_loss", lambda call: "hidden_states"),
    Seam(
        "algorithm.logits_dtype",
        "actor.forward:packed_linear_policy_loss",
        lambda call: str(call.logits_dtype)[6:],
    ),
]

_OPTIMIZER = [
    *(
        Seam(
            f"optimizer.{name}",
            f"{_ACTOR}.train_step",
            metric("optimizer/lr"),
            scenario,
            learning_rates,
            fold=rounded,
        )
        for scenario, names in (
            ("whole", ("lr", "min_lr", "schedule", "warmup_steps")),
            ("resumed", ("schedule",)),
        )
        for name in names
    ),
    Seam(
        "optimizer.weight_decay",
        f"{_ACTOR}.train_step",
        lambda call: max(group["weight_decay"] for group in call.self.optimizer.param_groups),
    ),
    Seam("optimizer.max_skipped_steps", f"{_ACTOR}.train_step", lambda call: "taken", "skipped", fold=len),
]

_CHECKPOINT = [
    Seam(
        "checkpoint.best_is",
        f"{_CHECKPOINTS}:Retention.__init__",
        given("highest_is_best"),
        expected=lambda config: config.checkpoint.best_is == "highest",
    ),
    Seam(
        "checkpoint.reserve_gib",
        "checkpoints.checkpoint_folder:require_free",
        lambda call: call.reserve_bytes / 2**30,
    ),
]

_TRACKING = [
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
    plain(
        "tracking.shadow_options.dppo_binary_tv.delta",
        "actor.observation:Observer.__init__",
        "self.shadows.dppo_binary_tv.delta",
    ),
]

TABLE = [
    *(seam for scenario, text in _AS_IT_IS.items() for seam in rows(scenario, text)),
    *(*_RUN, *_MODEL, *_DATA, *_ROLLOUT, *_SERVERS, *_EVALUATION),
    *(*_ALGORITHM, *_OPTIMIZER, *_CHECKPOINT, *_TRACKING),
]

READ_FROM_THE_SECTION = {
    *("data.thinking", "rollout.top_p", "rollout.max_data_gib", "algorithm.replay_recomputed_routes"),
    *("rollout.over_sampling", "rollout.max_staleness"),
    *("checkpoint.max_failed_saves", "tracking.max_roll_backs"),
}
"""Settings that their users read from the section itself: `setting_effects.py` has rows or tests of them."""
