"""How much host memory a rollout takes on a rank: bounded before the run starts, measured while it goes."""

from collections.abc import Iterable

from megatron_dppo.config.schema import Config
from megatron_dppo.types import ModelRouting, Sample


def rollout_bytes_bound(config: Config, data_parallel_size: int, routing: ModelRouting | None) -> int:
    """Most bytes that one rank's share of a rollout can take, where every response is as long as allowed.

    Samples and the micro-batches packed from them, once per epoch, are held at the same time.

    Args:
        config: The run's.
        data_parallel_size: Ranks that share the prompts.
        routing: The model's, where routes are captured.
    """
    options = config.rollout
    num_prompts = -(-options.prompts_per_rollout // data_parallel_size)
    num_samples = num_prompts * options.samples_per_prompt
    num_tokens = config.data.max_prompt_tokens + options.max_response_tokens
    routes = 0
    if routing is not None:
        routes = len(routing.layer_numbers) * routing.top_k * (1 if routing.num_experts <= 256 else 2)
    topk = options.num_topk_log_probs * (4 + 4)  # ids, log-probs
    sample = 8 + 4 + 1 + topk + routes  # tokens, log-probs, mask
    packed = 3 * 8 + 1 + 4 * 4 + topk + routes  # tokens, positions, targets; mask; four float32 per token
    return num_samples * num_tokens * (sample + config.algorithm.epochs_per_rollout * packed)


def bytes_of_samples(samples: Iterable[Sample]) -> int:
    """Bytes of the samples' tensors."""
    total = 0
    for sample in samples:
        total += sample.tokens.nbytes + sample.loss_mask.nbytes + sample.rollout_log_probs.nbytes
        if sample.topk is not None:
            total += sample.topk.ids.nbytes + sample.topk.log_probs.nbytes
        if sample.routed_experts is not None:
            total += sample.routed_experts.indices.nbytes
    return total
