"""Settings and who asserts their effect: rows that pairs of runs show, and names of other tests."""

from collections.abc import Mapping

from tests.distributed.setting_checks import ANY
from tests.distributed.setting_effects_learning import EFFECTS as LEARNING
from tests.distributed.setting_effects_records import EFFECTS as RECORDS
from tests.distributed.setting_effects_sampling import EFFECTS as SAMPLING

__all__ = ["ANY", "ASSERTED_BY", "EFFECTS"]

EFFECTS = [*SAMPLING, *LEARNING, *RECORDS]

_EQUAL = ("distributed/test_layouts.py", "test_every_layout_equals_one_process", "layout_cases")
_PLAN, _SERVERS = "distributed/test_plan.py", "sglang/test_several_servers.py"
_SURVIVES = ("faults/test_faults.py", "test_a_run_survives", "CASES")
ASSERTED_BY: Mapping[str, tuple[str, str, str]] = {
    "run.timeout_s": (
        "distributed/test_failure_detection.py",
        "test_rank_that_never_starts_is_missed",
        "timeout_s",
    ),
    **{
        f"parallel.{name}": _EQUAL
        for name in (
            *("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor"),
            *("overlap_grad_reduce", "overlap_param_gather"),
        )
    },
    "data.thinking": (
        "unit/test_reward_choice.py",
        "test_a_function_of_the_users_has_no_rules",
        'thinking="require"',
    ),
    "data.reward_workers": (
        "unit/test_reward_pool.py",
        "test_no_more_workers_start_than_there_is_work_for",
        "num_workers",
    ),
    "rollout.engine": (
        "sglang/test_engine.py",
        "test_it_is_an_engine_that_a_run_builds_and_collects_from",
        "sglang",
    ),
    "rollout.over_sampling": (
        "unit/test_scheduler.py",
        "test_over_sampling_ends_with_the_groups_that_are_whole_first_and_drops_the_others",
        "over_sampling=1.5",
    ),
    "rollout.keep_partials": (
        "unit/test_scheduler.py",
        "test_over_sampling_ends_with_the_groups_that_are_whole_first_and_drops_the_others",
        "keep_partials=False",
    ),
    "rollout.max_staleness": (
        "unit/test_ahead.py",
        "test_no_token_is_older_than_the_bound_and_each_place_is_trained_on_once",
        "bound.max_staleness",
    ),
    "rollout.release_trainer": (
        "distributed/test_training_run.py",
        "test_a_trainer_that_leaves_while_responses_are_sampled_trains_the_same",
        "release_trainer",
    ),
    "rollout.transformers.batch_size": (
        "unit/test_transformers_engine.py",
        "test_responses_that_end_early_are_refilled_correctly",
        "batch_size",
    ),
    "rollout.sglang.request_timeout_s": (
        "unit/test_sglang_client.py",
        "test_a_response_that_takes_too_long_is_aborted_and_never_asked_again",
        "generate_timeout_s",
    ),
    "rollout.sglang.max_attempts": (
        "unit/test_sglang_client.py",
        "test_attempts_are_bounded",
        "max_attempts=3",
    ),
    "rollout.sglang.max_concurrent_requests": (
        _SERVERS,
        "test_both_servers_answer_and_none_gets_more_than_its_limit",
        "max_concurrent_requests=5",
    ),
    "rollout.sglang.num_own_servers": (
        "sglang/test_training.py",
        "test_a_run_with_servers_of_its_own_survives_being_killed",
        "num_own_servers",
    ),
    "rollout.sglang.weight_sync": (
        "sglang/test_weight_sync.py",
        "test_pushed_weights_are_served",
        "weight_sync",
    ),
    "rollout.sglang.sync_bucket_bytes": (
        "unit/test_weight_buckets.py",
        "test_every_tensor_comes_once_and_bit_for_bit",
        "num_bytes",
    ),
    "rollout.sglang.sync_timeout_s": (
        "sglang/test_sync_faults.py",
        "test_the_other_server_gets_all_weights_and_all_requests",
        "sync_timeout_s=10",
    ),
    "rollout.sglang.probe_every": (
        "unit/test_weight_sync.py",
        "test_the_probe_compares_after_the_first_push_and_each_period",
        "every",
    ),
    "rollout.sglang.colocated": (
        "sglang/test_gpu_turns.py",
        "test_trainer_and_server_are_never_there_together",
        '"colocated": True',
    ),
    "algorithm.loss_from": (
        _PLAN,
        "test_the_peak_of_all_live_tensors_is_within_15_percent",
        '"loss_from": "logits"',
    ),
    "algorithm.logits_chunk_bytes": (
        _PLAN,
        "test_the_peak_of_all_live_tensors_is_within_15_percent",
        '"logits_chunk_bytes": 2 *',
    ),
    "optimizer.distributed": (_PLAN, "test_optimizer_states_are_exact", "is_distributed=False"),
    "optimizer.offload": (
        "distributed/test_residence.py",
        "test_what_leaves_is_what_was_promised",
        '"offload": is_away',
    ),
    "optimizer.max_skipped_steps": (
        "distributed/test_seams.py",
        "test_its_consumer_receives_a_setting",
        "SCENARIOS",
    ),
    "checkpoint.resume": ("unit/test_run_folder.py", "test_folders_that_cannot_be_used", "resume=False"),
    "checkpoint.asynchronous": _SURVIVES,
    "checkpoint.max_failed_saves": _SURVIVES,
    "tracking.alarms": (
        "distributed/test_alarms.py",
        "test_each_alarm_is_raised_through_the_logger",
        '"alarms": "stop"',
    ),
    "tracking.max_roll_backs": (
        "distributed/test_roll_back.py",
        "test_it_says_where_there_is_no_way_back",
        "max_roll_backs=1",
    ),
    "rollout.sglang.start_timeout_s": (
        "unit/test_server_start.py",
        "test_a_server_that_is_late_is_an_error",
        "timeout_s",
    ),
    "rollout.sglang.max_restarts": ("unit/test_server_start.py", "test_restarts_are_bounded", "max_restarts"),
}
"""Settings whose effect another test asserts: its file, its name, and a text that sets it there."""
