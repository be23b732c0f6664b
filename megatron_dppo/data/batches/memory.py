"""Bounds and measures the host memory that a rollout takes on a rank."""

from collections.abc import Iterable

from megatron_dppo.config.schema import Config
from megatron_dppo.config.sections import num_over_sampled
from megatron_dppo.data.batches.batch_file import tensors_of
from megatron_dppo.routing_replay.routes import index_dtype
from megatron_dppo.types import Microbatch, ModelRouting, Sample


def rollout_bytes_bound(
    config: Config, world_size: int, num_groups: int, routing: ModelRouting | None, *, shares_prefixes: bool
) -> int:
    """Return an upper bound on the bytes of rollouts on one rank, if every response has the maximum length.

    The bound is the sum of: the samples that the rank sampled; the samples of one mini-batch that it sends and
    receives; and the data-parallel group's micro-batches, once per epoch, each with up to one sample more
    than an equal share, or with up to one prompt's samples more if prefixes are shared. Rollouts sampled ahead
    (rollout.lag) are kept only as micro-batches.

    Args:
        config: Config of the run.
        world_size: Number of ranks that share the prompts.
        num_groups: Number of data-parallel groups that share the training.
        routing: Routing of the model if routes are captured, else `None`.
        shares_prefixes: Whether the trainer forwards a prefix of several samples in a micro-batch once.
    """
    options, algorithm = config.rollout, config.algorithm
    num_tokens = config.data.max_prompt_tokens + options.max_response_tokens
    routes = 0
    if routing is not None:
        routes = len(routing.layer_numbers) * routing.top_k * index_dtype(routing.num_experts).itemsize
    topk = options.num_topk_log_probs * (4 + 4)  # ids, log-probs
    sample = num_tokens * (8 + 4 + 1 + topk + routes)  # tokens, log-probs, mask
    masks = 1 if config.tracking.mismatch_share == 1 else 2
    floats = 5 + bool(algorithm.ref_kl_coef)  # log-probs, advantages, ..., and the weight version
    packed = num_tokens * (3 * 8 + masks + floats * 4 + topk + routes)  # positions, targets
    num_begun = num_over_sampled(options.over_sampling, options.prompts_per_rollout)
    if options.refill_zero_variance:
        num_begun *= 1 + options.max_refills
    if options.staleness.max_versions:  # groups being sampled, in addition to groups being trained on
        num_begun += options.prompts_per_rollout
    held = _share(num_begun, world_size) * options.samples_per_prompt * sample
    num_trained = algorithm.epochs_per_rollout * options.prompts_per_rollout * options.samples_per_prompt
    num_at_once = 1 + min(options.staleness.num_waiting, config.run.num_rollouts - 1)
    num_together = options.samples_per_prompt if shares_prefixes else 1
    trained = num_at_once * (_share(num_trained, num_groups) + (num_groups > 1) * num_together) * packed
    if world_size == 1:
        return held + trained
    minibatch = _share(options.prompts_per_rollout, algorithm.minibatches_per_rollout)
    sent = (
        _share(minibatch, world_size) if algorithm.epochs_per_rollout == 1 else minibatch
    )  # later epochs: any prompts of the rank may be in one mini-batch
    sent = min(sent, _share(options.prompts_per_rollout, world_size)) * (world_size // num_groups)
    came = _share(minibatch * options.samples_per_prompt, num_groups) + num_together
    return held + trained + (sent * options.samples_per_prompt + came) * sample


def _share(count: int, num_parts: int) -> int:
    return -(-count // num_parts)


def bytes_of_samples(samples: Iterable[Sample]) -> int:
    """Return the size of the samples' tensors in bytes."""
    return sum(tensor.nbytes for sample in samples for tensor in tensors_of(sample).values())


def bytes_of_routes_and_topk(holder: Sample | Microbatch) -> int:
    """Return the size in bytes of the routes and top-K of a sample or a micro-batch."""
    nested = (holder.topk, holder.routed_experts)
    return sum(tensor.nbytes for each in nested if each is not None for tensor in tensors_of(each).values())
