"""Bounds the tokens that a rank holds at once: every prompt and response as long as allowed."""

import math
from dataclasses import dataclass

from megatron_dppo.architectures.parameters import ModelShape
from megatron_dppo.config.schema import Config

_BATCH_BYTES = 3 * 8 + 1 + 4 * 4  # tokens, positions, targets; mask; four float32 per token
_TOPK_BYTES = 4 + 4  # id, log-prob


@dataclass(frozen=True)
class Workload:
    """Token sizes of a run that its config fixes, whatever the layout."""

    dtype_bytes: int  # of parameters and activations
    max_tokens: int  # of one packed micro-batch, over all context-parallel ranks
    sequence_tokens: int  # of the longest prompt and response
    samples_per_step: int  # over all ranks
    topk_columns: int
    routed_layers: int  # MoE layers whose routes are carried; 0 with R3 off
    routed_experts: int  # per token and layer
    route_bytes: int  # of one expert id

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> "Workload":
        """Return the workload of `config` with this model."""
        rollout, sizes = config.rollout, shape.sizes
        has_routes = rollout.routing_replay != "off" and sizes.num_experts is not None
        prompts = rollout.prompts_per_rollout / config.algorithm.minibatches_per_rollout
        return cls(
            dtype_bytes=2 if config.model.dtype == "bfloat16" else 4,
            max_tokens=config.parallel.max_tokens_per_microbatch,
            sequence_tokens=config.data.max_prompt_tokens + rollout.max_response_tokens,
            samples_per_step=math.ceil(prompts) * rollout.samples_per_prompt,
            topk_columns=rollout.num_topk_log_probs,
            routed_layers=len(sizes.moe_layers) if has_routes else 0,
            routed_experts=sizes.experts_per_token if has_routes else 0,
            route_bytes=1 if (sizes.num_experts or 0) <= 256 else 2,
        )

    def samples(self, data_parallel: int) -> int:
        """Return the samples of one data-parallel rank in a gradient step."""
        return math.ceil(self.samples_per_step / data_parallel)

    def num_microbatches(self, data_parallel: int) -> int:
        """Return the micro-batches of one data-parallel rank in a step: whole sequences up to `max_tokens`."""
        per_microbatch = max(self.max_tokens // self.sequence_tokens, 1)
        return math.ceil(self.samples(data_parallel) / per_microbatch)

    def microbatch_tokens(self, data_parallel: int) -> int:
        """Return the tokens of the largest micro-batch, over all context-parallel ranks."""
        return min(self.max_tokens, self.samples(data_parallel) * self.sequence_tokens)

    def step_tokens(self, data_parallel: int) -> int:
        """Return the tokens of one data-parallel rank in a gradient step, all on its device."""
        return self.samples(data_parallel) * self.sequence_tokens

    @property
    def batch_bytes(self) -> int:
        """Bytes of one token in a micro-batch, without routes and top-K."""
        return _BATCH_BYTES

    @property
    def topk_bytes(self) -> int:
        """Bytes of one token's top-K columns."""
        return self.topk_columns * _TOPK_BYTES

    @property
    def routes_bytes(self) -> int:
        """Bytes of one token's routes, all layers."""
        return self.routed_layers * self.routed_experts * self.route_bytes
