"""Defines the inputs of a plan: GPUs with their speeds, options, and tokens on a rank.

Token numbers are upper bounds: every prompt and response has the longest allowed length.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_dppo.algorithms import PRESETS
from megatron_dppo.architectures.layout import Layout, is_admitted
from megatron_dppo.architectures.megatron_options import shares_prefixes
from megatron_dppo.architectures.parameters import ModelShape, model_shape
from megatron_dppo.checks import Facts, problems_of
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.plan.gpu_rates import ASSUMED, GpuRates
from megatron_dppo.plan.units import GIB, Settings, format_count, with_settings
from megatron_dppo.run_folder.reader import read_run
from megatron_dppo.runtime.gpu_ledger import ENGINE_RESIDUE_BYTES, OUTSIDE, RESERVE_BYTES

ASSUMED_GPU_BYTES = 80 * 10**9
"""Memory of a GPU that remarks of `check` assume."""
FRAGMENTATION = 0.05
"""Share of activations and logits that the allocator cannot use; an assumption."""
PROCESS_HOST_BYTES = 4 * GIB
"""Host memory of one trainer process with its libraries; an assumption."""

EXPERT_IMBALANCE = 1.3
"""Rows of the busiest expert-parallel rank, relative to the mean of all ranks."""
ATTENTION_PADDING = 1.25
"""Rows of our torch spec's padded batches, relative to the tokens in them (2 at worst), if it cannot use flash
attention."""

# Links of an H100 SXM node, from NVIDIA's data sheets; bytes per second, one direction.
NVLINK_BYTES_PER_S = 450e9
NETWORK_BYTES_PER_S = 50e9  # one 400 Gbit/s adapter for each GPU
LINK_EFFICIENCY = 0.7  # an assumption


@dataclass(frozen=True)
class Machine:
    """Number, memory and speed of the GPUs, and the hosts' memory."""

    num_gpus: int
    gpu_bytes: int  # of each GPU
    host_bytes: int | None = None  # of each node; None: not checked
    gpus_per_node: int = 8
    rates: GpuRates = ASSUMED
    engine_residue_bytes: int = ENGINE_RESIDUE_BYTES  # of a colocated server, on each GPU in training

    @property
    def assumed_text(self) -> str:
        """GPUs that a remark assumes, in words."""
        return f"{format_count(self.num_gpus, 'GPU')} of {self.gpu_bytes / 1e9:g} GB"

    @property
    def ranks_per_node(self) -> int:
        """Number of trainer processes that share one host."""
        return min(self.num_gpus, self.gpus_per_node)

    def link(self, span: int) -> float:
        """Return bytes per second of each GPU in a group that spans `span` consecutive ranks."""
        published = NVLINK_BYTES_PER_S if span <= self.gpus_per_node else NETWORK_BYTES_PER_S
        return published * LINK_EFFICIENCY


def measured_machine(machine: Machine, run: Path) -> Machine:
    """Return the machine with the engine's residue as a run with colocated servers measured it.

    Raises:
        ConfigError: The run has not measured it.
        DataError: The folder is not a run's.
    """
    found = [row.values[OUTSIDE] for row in read_run(run).rollouts if OUTSIDE in row.values]
    if not found:
        expected, action = f"{OUTSIDE} in its rows", "Name a run of colocated servers on GPUs."
        raise ConfigError(Problem("--measured", str(run), expected, action))
    return replace(machine, engine_residue_bytes=max(int(max(found)) - RESERVE_BYTES, 0))


Granularity = Literal["none", "selective", "full"]
Method = Literal["uniform", "block"]
LayerSpec = Literal["torch", "torch-cpu", "te"]

COUNTED_MODULES = ("core_attn", "mlp", "moe")
"""Values of recompute_modules that our layer specs recompute; others are taken to save nothing."""


@dataclass(frozen=True)
class Recompute:
    """Activations that are recomputed in backward, in Megatron's terms."""

    granularity: Granularity = "none"
    method: Method = "uniform"
    num_layers: int = 1  # "full": number of layers recomputed together, or per stage ("block")
    modules: tuple[str, ...] = ("core_attn",)  # "selective"

    def __str__(self) -> str:
        if self.granularity == "selective":
            return f"selective ({', '.join(self.modules)})"
        is_usual = self.granularity == "none" or (self.method == "uniform" and self.num_layers == 1)
        return self.granularity if is_usual else f"full ({self.method}, {self.num_layers})"

    def keys(self) -> dict[str, Any]:
        """Return the keys of `[megatron]` that set it."""
        if self.granularity == "none":
            return {}
        keys: dict[str, Any] = {"recompute_granularity": self.granularity}
        if self.granularity == "full":
            return keys | {"recompute_method": self.method, "recompute_num_layers": self.num_layers}
        return keys | {"recompute_modules": list(self.modules)}


FULL = Recompute("full")


@dataclass(frozen=True)
class LayerOptions:
    """Recompute and layer spec.

    Attributes:
        recompute: Activations that are recomputed.
        layer_spec: Our torch spec ("torch-cpu": as on CPUs), or Transformer Engine's modules.
    """

    recompute: Recompute = Recompute()
    layer_spec: LayerSpec = "torch"

    @classmethod
    def of(cls, config: Config) -> "LayerOptions":
        """Return the options of a config; for layer_spec "auto", assume the spec that keeps more."""
        is_engine = config.model.layer_spec == "transformer_engine"
        return cls(recompute_of(config.megatron), "te" if is_engine else "torch")

    def __str__(self) -> str:
        return f"recompute {self.recompute}"


def recompute_of(megatron: Mapping[str, Any]) -> Recompute:
    """Return the recompute settings of `[megatron]`."""
    problems = recompute_problems(megatron)
    if problems:
        raise ConfigError(problems)
    default = Recompute()
    return Recompute(
        granularity=megatron.get("recompute_granularity", default.granularity),
        method=megatron.get("recompute_method", default.method),
        num_layers=megatron.get("recompute_num_layers", default.num_layers),
        modules=tuple(megatron.get("recompute_modules", default.modules)),
    )


def recompute_problems(megatron: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of the recompute_* keys of `[megatron]` that Megatron would refuse."""
    granularity = megatron.get("recompute_granularity")
    problems = [
        *_one_of(megatron, "recompute_granularity", ("selective", "full")),
        *_one_of(megatron, "recompute_method", get_args(Method)),
    ]
    num_layers, modules = megatron.get("recompute_num_layers", 1), megatron.get("recompute_modules", [])
    if type(num_layers) is not int or num_layers < 1:
        expected, action = "a whole number above 0", "Set it to 1 to recompute layer by layer."
        problems.append(Problem("megatron.recompute_num_layers", repr(num_layers), expected, action))
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        action = "Write for example ['core_attn', 'moe']."
        problems.append(Problem("megatron.recompute_modules", repr(modules), "a list of names", action))
    for key, value in FULL.keys().items():
        if granularity == "full" and key not in megatron:
            expected, action = "a value with recompute_granularity = 'full'", f"Set megatron.{key} = {value!r}."
            problems.append(Problem(f"megatron.{key}", "none", expected, action))
    if granularity == "selective" and "recompute_num_layers" in megatron:
        found = f"{num_layers!r} with recompute_granularity = 'selective'"
        action = "Remove it: modules of all layers are recomputed."
        problems.append(Problem("megatron.recompute_num_layers", found, "none", action))
    return problems


def _one_of(megatron: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> list[Problem]:
    if key not in megatron or megatron[key] in choices:
        return []
    action = "Correct or remove it."
    return [Problem(f"megatron.{key}", repr(megatron[key]), " or ".join(choices), action)]


BATCH_BYTES = 3 * 8 + 1 + 4 * 4
"""Bytes of one token in a micro-batch: tokens, positions, targets; mask; four float32."""
TOPK_BYTES = 4 + 4  # id, log-prob


@dataclass(frozen=True)
class Assumptions:
    """Assumed values that depend on the data."""

    expert_imbalance: float = EXPERT_IMBALANCE
    attention_padding: float = ATTENTION_PADDING
    fragmentation: float = FRAGMENTATION


EXPECTED = Assumptions()


@dataclass(frozen=True)
class Tree:
    """Samples of a micro-batch that share a prompt."""

    num_samples: int
    prompt_tokens: int
    response_tokens: int  # of each

    @property
    def num_tokens(self) -> int:
        """Number of forwarded tokens: the prompt's once."""
        return self.prompt_tokens + self.num_samples * self.response_tokens

    @property
    def num_keys(self) -> int:
        """Number of tokens of all samples."""
        return self.num_samples * (self.prompt_tokens + self.response_tokens)

    @property
    def num_rows(self) -> int:
        """Number of rows of the loss: of all tokens, or of the responses if the prompt is shared."""
        return self.num_samples * self.response_tokens if self.is_shared else self.num_tokens

    @property
    def is_shared(self) -> bool:
        """Whether the prompt has several samples."""
        return self.num_samples > 1


@dataclass(frozen=True)
class Workload:
    """Token sizes of a run that its config fixes, whatever the layout."""

    dtype_bytes: int  # of parameters and activations
    max_tokens: int  # of one packed micro-batch, over all context-parallel ranks; a shared prefix counts once
    sequence_tokens: int  # of the longest prompt and response
    prompt_tokens: int  # of the longest prompt
    samples_per_step: int  # over all ranks
    samples_sharing: int  # samples whose prompt is forwarded once, if they are in one micro-batch; 1: none
    topk_columns: int
    routed_layers: int  # MoE layers whose routes are carried; 0 without R3 and R2
    routed_experts: int  # per token and layer
    route_bytes: int  # of one expert id

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> "Workload":
        """Return the workload of `config` with this model."""
        rollout, sizes = config.rollout, shape.sizes
        has_routes = config.has_routes and sizes.num_experts is not None
        prompts = rollout.prompts_per_rollout / config.algorithm.minibatches_per_rollout
        return cls(
            dtype_bytes=2 if config.model.dtype == "bfloat16" else 4,
            max_tokens=config.parallel.max_tokens_per_microbatch,
            sequence_tokens=config.data.max_prompt_tokens + rollout.max_response_tokens,
            prompt_tokens=config.data.max_prompt_tokens,
            samples_per_step=math.ceil(prompts) * rollout.samples_per_prompt,
            samples_sharing=rollout.samples_per_prompt if shares_prefixes(config, sizes) else 1,
            topk_columns=rollout.num_topk_log_probs,
            routed_layers=len(sizes.moe_layers) if has_routes else 0,
            routed_experts=sizes.experts_per_token if has_routes else 0,
            route_bytes=1 if (sizes.num_experts or 0) <= 256 else 2,
        )

    def samples(self, data_parallel: int) -> int:
        """Return the samples of one data-parallel rank in a gradient step."""
        return math.ceil(self.samples_per_step / data_parallel)

    def tree(self, data_parallel: int) -> "Tree":
        """Return the samples that share a prompt in a micro-batch: as many as fit it, all of the longest."""
        response = self.sequence_tokens - self.prompt_tokens
        that_fit = (self.max_tokens - self.prompt_tokens) // response
        num = max(min(self.samples_sharing, self.samples(data_parallel), that_fit), 1)
        return Tree(num, self.prompt_tokens, response)

    def num_microbatches(self, data_parallel: int) -> int:
        """Return the number of a data-parallel rank's micro-batches in a step: trees up to `max_tokens`."""
        tree = self.tree(data_parallel)
        per_microbatch = max(self.max_tokens // tree.num_tokens, 1) * tree.num_samples
        return math.ceil(self.samples(data_parallel) / per_microbatch)

    def microbatch_tokens(self, data_parallel: int) -> int:
        """Return the forwarded tokens of the largest micro-batch, over all context-parallel ranks."""
        return min(self.max_tokens, math.ceil(self.forwarded_tokens(data_parallel)))

    def microbatch_rows(self, data_parallel: int) -> int:
        """Return its rows of the loss if prompts are shared."""
        tree = self.tree(data_parallel)
        return self.microbatch_tokens(data_parallel) * tree.num_rows // tree.num_tokens

    def forwarded_tokens(self, data_parallel: int) -> float:
        """Return the tokens that one data-parallel rank forwards in a gradient step."""
        tree = self.tree(data_parallel)
        return self.samples(data_parallel) / tree.num_samples * tree.num_tokens

    def step_rows(self, data_parallel: int) -> int:
        """Return the tokens of one data-parallel rank's samples in a gradient step, all on its device."""
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
    options: LayerOptions
    assumptions: Assumptions = EXPECTED

    @classmethod
    def of(cls, config: Config, facts: Facts, machine: Machine, assumptions: Assumptions = EXPECTED) -> "Job":
        """Return the job that a config describes."""
        if isinstance(facts.model, Problem) or isinstance(facts.sizes, Problem):
            raise ConfigError([each for each in (facts.model, facts.sizes) if isinstance(each, Problem)][:1])
        shape = model_shape(facts.model)
        facts = replace(facts, world_size=machine.num_gpus)
        workload, options = Workload.of(config, shape), LayerOptions.of(config)
        return cls(config, facts, machine, shape, workload, options, assumptions)

    @classmethod
    def assumed(cls, config: Config, facts: Facts) -> "Job":
        """Return the job on GPUs of `ASSUMED_GPU_BYTES`; ConfigError if a problem of the config prevents it."""
        machine = Machine(facts.world_size, ASSUMED_GPU_BYTES)
        job = cls.of(config, facts, machine)
        if not is_admitted(config.parallel, facts.world_size, job.shape.sizes):
            raise ConfigError("the layout has a problem of its own rule")
        return job

    def having(self, settings: Settings) -> "Job":
        """Return the same job with other values of some keys."""
        config = with_settings(self.config, settings)
        workload, options = Workload.of(config, self.shape), LayerOptions.of(config)
        return replace(self, config=config, workload=workload, options=options)

    def on(self, num_gpus: int) -> "Job":
        """Return the same job on more or fewer GPUs."""
        machine = replace(self.machine, num_gpus=num_gpus)
        return replace(self, machine=machine, facts=replace(self.facts, world_size=num_gpus))

    @property
    def problems(self) -> list[Problem]:
        """Problems for which `train` refuses the config on this number of processes."""
        return problems_of(self.config, self.facts, needs=("config",))

    @property
    def shares_prefixes(self) -> bool:
        """Whether a prefix of several samples is forwarded once, with the layers that `options` assumes."""
        return shares_prefixes(self.config, self.shape.sizes)

    @property
    def has_reference(self) -> bool:
        """Whether the loss has a KL to a reference policy, which needs one forward of each rollout."""
        return bool(self.config.algorithm.ref_kl_coef)

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether the trust region's anchor is recomputed, which needs one more forward per gradient step."""
        algorithm = self.config.algorithm
        preset = PRESETS.get(algorithm.preset)
        default = "rollout" if preset is None else preset.anchor  # of a user's rule: rollout
        return (algorithm.anchor or default) == "recomputed"

    @property
    def has_reference_weights(self) -> bool:
        """Whether the reference is more than the model without adapters, so the host has all its weights."""
        return self.has_reference and (not self.config.lora.rank or self.config.model.reference is not None)

    @property
    def layout(self) -> Layout:
        """The configured layout."""
        return Layout.of(self.config.parallel, self.machine.num_gpus)
