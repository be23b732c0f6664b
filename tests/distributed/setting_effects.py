"""Settings and who asserts their effect: rows that pairs of runs show, and names of other tests."""

from collections.abc import Iterator

from tests.distributed.setting_checks import ANY
from tests.distributed.setting_effects_learning import EFFECTS as LEARNING
from tests.distributed.setting_effects_records import EFFECTS as RECORDS
from tests.distributed.setting_effects_sampling import EFFECTS as SAMPLING

__all__ = ["ANY", "ASSERTED_BY", "EFFECTS"]

EFFECTS = [*SAMPLING, *LEARNING, *RECORDS]

_TESTS = r"""
distributed/test_alarms.py::test_each_alarm_is_raised_through_the_logger
    tracking.alarms  "alarms": "stop"
distributed/test_failure_detection.py::test_rank_that_never_starts_is_missed
    run.timeout_s  timeout_s
distributed/test_failure_detection.py::test_a_stopped_rank_is_missed_before_any_collective_ends
    run.peer_timeout_s  peer_timeout_s
distributed/test_layouts.py::test_every_layout_equals_one_process
    parallel.tensor  layout_cases
    parallel.pipeline  layout_cases
    parallel.virtual_pipeline  layout_cases
    parallel.context  layout_cases
    parallel.expert  layout_cases
    parallel.expert_tensor  layout_cases
    parallel.overlap_grad_reduce  layout_cases
    parallel.overlap_param_gather  layout_cases
distributed/test_plan.py::test_optimizer_states_are_exact
    optimizer.distributed  is_distributed=False
distributed/test_plan.py::test_the_printed_sum_of_a_stage_is_within_15_percent_of_all_live_tensors
    algorithm.loss_from  "loss_from": "logits"
    algorithm.logits_chunk_bytes  "logits_chunk_bytes": 2 *
distributed/test_residence.py::test_offloaded_bytes_are_at_least_the_promised_bytes
    optimizer.offload  "offload": is_away
distributed/test_roll_back.py::test_roll_back_without_a_usable_checkpoint_is_refused
    tracking.max_roll_backs  max_roll_backs=1
distributed/test_seams.py::test_consumer_receives_the_setting
    optimizer.max_skipped_steps  SCENARIOS
distributed/test_training_run.py::test_offloading_the_trainer_while_sampling_changes_no_result
    rollout.release_trainer  release_trainer
faults/test_faults.py::test_a_run_survives
    checkpoint.asynchronous  CASES
    checkpoint.max_failed_saves  CASES
sglang/test_engine.py::test_built_engine_samples_scored_groups
    rollout.engine  sglang
sglang/test_gpu_turns.py::test_trainer_and_server_take_turns_in_gpu_memory
    rollout.sglang.colocated  "colocated": True
sglang/test_several_servers.py::test_both_servers_respond_within_their_request_limits
    rollout.sglang.max_concurrent_requests  max_concurrent_requests=5
sglang/test_sync_faults.py::test_the_other_server_gets_all_weights_and_all_requests
    rollout.sglang.sync_timeout_s  sync_timeout_s=30
sglang/test_training.py::test_run_with_its_own_servers_resumes_after_a_kill
    rollout.sglang.num_own_servers  num_own_servers
sglang/test_weight_sync.py::test_pushed_weights_are_served
    rollout.sglang.weight_sync  weight_sync
unit/test_agents.py::test_a_conversation_over_http_is_the_same_as_with_an_environment
    rollout.agent.harness  agents_of("scripted")
unit/test_agents.py::test_a_command_is_a_harness
    rollout.agent.command  agents_of(None, words)
unit/test_agents.py::test_a_harness_that_fails_costs_its_own_sample
    rollout.agent.call_timeout_s  call_timeout_s=30.0
    rollout.agent.max_calls  max_calls=4
unit/test_episodes.py::test_the_clock_runs_only_while_the_harness_works
    rollout.agent.episode_timeout_s  episode_timeout_s=50.0
unit/test_episodes.py::test_each_tree_that_is_chosen_trains
    rollout.agent.train  train=train
unit/test_episodes.py::test_conversation_continues_only_if_the_template_appends
    rollout.agent.thinking  thinking=thinking
unit/test_agent_renderers.py::test_a_tool_call_is_read_and_its_result_written_as_the_family_does
    rollout.agent.renderer  LibraryRendering(tokenizer, thinking, family.name)
unit/test_ahead.py::test_no_token_is_older_than_the_bound_and_each_place_is_trained_on_once
    rollout.max_staleness  bound.max_staleness
unit/test_reward_choice.py::test_a_time_out_gets_the_value_that_is_set_and_is_dropped_else
    data.reward_if_timed_out  reward_if_timed_out=value
unit/test_reward_choice.py::test_a_function_of_the_users_has_no_rules
    data.thinking  thinking="require"
unit/test_reward_pool.py::test_no_more_workers_start_than_there_is_work_for
    data.reward_workers  num_workers
unit/test_trackers.py::test_prometheus_reads_the_latest_values
    tracking.prometheus_address  "prometheus_address": address
unit/test_workers.py::test_user_code_gets_common_variables_and_what_the_config_names
    data.worker_environment  environment=
unit/test_conversations.py::test_conversations_follow_the_thinking_of_the_template
    rollout.thinking  "template", texts
unit/test_run_folder.py::test_folders_that_cannot_be_used
    checkpoint.resume  resume=False
unit/test_scheduler.py::test_over_sampling_ends_with_the_groups_that_are_whole_first_and_drops_the_others
    rollout.over_sampling  over_sampling=1.5
unit/test_sglang_server.py::test_a_server_that_is_late_is_an_error
    rollout.sglang.start_timeout_s  timeout_s
unit/test_sglang_server.py::test_restarts_are_bounded
    rollout.sglang.max_restarts  max_restarts
unit/test_sglang_client.py::test_a_response_that_has_no_end_in_time_is_aborted_and_not_repeated
    rollout.sglang.request_timeout_s  generate_timeout_s
unit/test_sglang_client.py::test_attempts_are_bounded
    rollout.sglang.max_attempts  max_attempts=3
unit/test_transformers_engine.py::test_responses_that_end_early_are_refilled_correctly
    rollout.transformers.batch_size  batch_size
unit/test_weight_buckets.py::test_every_tensor_comes_once_and_bit_for_bit
    rollout.sglang.sync_bucket_bytes  num_bytes
unit/test_weight_sync.py::test_the_probe_compares_after_the_first_push_and_each_period
    rollout.sglang.probe_every  every
"""


def _asserted_by() -> Iterator[tuple[str, tuple[str, str, str]]]:
    file = name = ""
    for line in _TESTS.strip().splitlines():
        if line.startswith(" "):
            setting, text = line.split(maxsplit=1)
            yield setting, (file, name, text)
        else:
            file, _, name = line.partition("::")


ASSERTED_BY = dict(_asserted_by())
"""Settings whose effect another test asserts: its file, its name, and a text that sets it there."""
