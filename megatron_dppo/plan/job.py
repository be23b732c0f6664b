"""Defines the inputs of a plan: config, model, machine, and the number of tokens on a rank.

Token numbers are upper bounds: every prompt and response has the longest allowed length.
"""

import math
from dataclasses import dataclass, replace

from megatron_dppo.algorithms import PRESETS
from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.parameters import Adapters, ModelShape, model_shape
from megatron_dppo.checks import Facts, check_run
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.plan.activations import EXPECTED, Assumptions
from megatron_dppo.plan.machine import Machine
from megatron_dppo.plan.options import Options
from megatron_dppo.plan.partition import StagePart, partition
from megatron_dppo.plan.settings import Settings, with_settings

BATCH_BYTES = 3 * 8 + 1 + 4 * 4
"""Bytes of one token in a micro-batch: tokens, positions, targets; mask; four float32."""
TOPK_BYTES = 4 + 4  # id, log-prob


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
        """Return the number of a data-parallel rank's micro-batches in a step: sequences up to `max_tokens`."""
        per_microbatch = max(self.max_tokens // self.sequence_tokens, 1)
        return math.ceil(self.samples(data_parallel) / per_microbatch)

    def microbatch_tokens(self, data_parallel: int) -> int:
        """Return the tokens of the largest micro-batch, over all context-parallel ranks."""
        return min(self.max_tokens, self.samples(data_parallel) * self.sequence_tokens)

    def step_tokens(self, data_parallel: int) -> int:
        """Return the tokens of one data-parallel rank in a gradient step, all on its device."""
        return self.samples(data_parallel) * self.sequence_tokens

    @property
    def topk_bytes(self) -> int:
        """Bytes of one token's top-K columns."""
        return self.topk_columns * TOPK_BYTES

    @property
    def routes_bytes(self) -> int:
        """Bytes of one token's routes, all layers."""
        return self.routed_layers * self.routed_experts * self.route_bytes


@dataclass(frozen=True)
class Job:
    """A run on a machine: all inputs of memory and time besides the layout."""

    config: Config
    facts: Facts  # for one process per GPU of the machine
    machine: Machine
    shape: ModelShape
    workload: Workload
    options: Options
    assumptions: Assumptions = EXPECTED

    @classmethod
    def of(cls, config: Config, facts: Facts, machine: Machine, assumptions: Assumptions = EXPECTED) -> "Job":
        """Return the job that a config describes.

        Raises:
            ConfigError: The model's parameters are not known, or an option is invalid.
        """
        if isinstance(facts.model, Problem) or isinstance(facts.sizes, Problem):
            raise ConfigError([each for each in (facts.model, facts.sizes) if isinstance(each, Problem)][:1])
        shape = model_shape(facts.model)
        facts = replace(facts, world_size=machine.num_gpus)
        return cls(config, facts, machine, shape, Workload.of(config, shape), Options.of(config), assumptions)

    def having(self, settings: Settings) -> "Job":
        """Return the same job with other values of some keys."""
        config = with_settings(self.config, settings)
        return replace(
            self, config=config, workload=Workload.of(config, self.shape), options=Options.of(config)
        )

    def on(self, num_gpus: int) -> "Job":
        """Return the same job on more or fewer GPUs."""
        machine = replace(self.machine, num_gpus=num_gpus)
        return replace(self, machine=machine, facts=replace(self.facts, world_size=num_gpus))

    @property
    def problems(self) -> list[Problem]:
        """Problems for which `train` refuses the config on this number of processes."""
        return check_run(self.config, self.facts)

    @property
    def has_reference(self) -> bool:
        """Whether the loss has a KL to a reference policy, which needs one forward of each rollout."""
        return bool(self.config.algorithm.ref_kl_coef)

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether the trust region's anchor is recomputed, which needs one more forward per gradient step."""
        algorithm = self.config.algorithm
        preset = PRESETS.get(
            algorithm.preset
        )  # None for a user's rule, which is anchored at the rollout policy
        default = "rollout" if preset is None else preset.anchor
        return (algorithm.anchor or default) == "recomputed"

    @property
    def has_reference_weights(self) -> bool:
        """Whether the reference is more than the model without adapters, so the host has all its weights."""
        return self.has_reference and (not self.config.lora.rank or self.config.model.reference is not None)

    @property
    def has_colocated_sglang(self) -> bool:
        """Whether SGLang's servers share the trainer's GPUs."""
        return self.config.rollout.engine == "sglang" and self.config.rollout.sglang.colocated

    @property
    def layout(self) -> Layout:
        """The configured layout.

        Raises:
            LayoutError: The processes do not divide.
        """
        return Layout.of(self.config.parallel, self.machine.num_gpus)

    def partition(self, layout: Layout) -> tuple[StagePart, ...]:
        """Return the part of the model on each pipeline stage of a layout."""
        lora = self.config.lora
        adapters = Adapters(lora.rank, lora.targets) if lora.rank else None
        return partition(self.shape, layout, self.config.optimizer.distributed, adapters)
