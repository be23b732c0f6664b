"""Rules about what a run may hold in memory."""

from collections.abc import Iterator

from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.memory import rollout_bytes_bound
from megatron_dppo.errors import Problem


@rule("rollout_memory")
def _rollout_memory(config: Config, facts: Facts) -> Iterator[Problem]:
    """A rollout's data fits into the host memory set aside for it, even where every response is cut."""
    sizes, parallel = facts.model_sizes, config.parallel
    if sizes is None:
        return
    routing = sizes.routing if config.rollout.routing_replay != "off" else None
    num_groups = max(facts.world_size // (parallel.tensor * parallel.pipeline * parallel.context), 1)
    bound = rollout_bytes_bound(config, facts.world_size, num_groups, routing) / (1 << 30)
    if bound > config.rollout.max_data_gib:
        yield Problem(
            "rollout.max_data_gib",
            f"a rollout of up to {bound:.1f} GiB on each rank",
            f"at most {config.rollout.max_data_gib:g} GiB",
            "Lower rollout.prompts_per_rollout, samples_per_prompt, max_response_tokens or num_topk_log_probs, "
            "use more data-parallel ranks, or raise the limit if the host has the memory.",
        )
