"""Define every setting: one frozen model per TOML section. Unknown keys are errors.

Every field has a type, a working default, a bound if one exists, and a one-line description.
Rules that need several fields or the disk are in `megatron_dppo.checks`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, create_model

from megatron_dppo.algorithms.loss_terms import RefKl
from megatron_dppo.algorithms.objective import Anchor
from megatron_dppo.algorithms.presets import SETTINGS
from megatron_dppo.config.markers import (
    LAYOUT,
    MEMORY_ROUNDING,
    OWN_SET,
    SAVING,
    TIME_LIMIT,
    TRACKING,
    TRAINING,
    Bound,
    Clash,
    Effect,
    Needs,
    Section,
)
from megatron_dppo.config.rollout import EmbeddedRollout, EnginePrecision, Rollout
from megatron_dppo.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    PlainPath,
    TrackingConfig,
)

_LENGTH = "The length of the run, if optimizer.schedule is constant and rollout.lag is 0; both depend on it."
_LONGEST = "data.max_prompt_tokens + rollout.max_response_tokens"
_PIECES = "false: context-parallel ranks each have pieces of every sequence, and not its prefix"
_OVERLAPPED = "true: overlap_param_gather does both"


class RunConfig(Section):
    """[run]: run folder, length and seed."""

    folder: Annotated[PlainPath, Effect("The run was moved.")] = Path("runs/run")
    """Run folder, which receives all output of the run."""
    seed: int = Field(default=0, ge=0, lt=1 << 32)
    """Seed of sampling, prompt order and mini-batch order, below 2^32: SGLang's NumPy takes no larger one."""
    num_rollouts: Annotated[PositiveInt, Effect(_LENGTH)] = 100
    """Rollouts to train on. Each one gives `algorithm.minibatches_per_rollout` gradient steps per epoch."""
    num_threads: Annotated[PositiveInt, Effect("CPU threads.")] = 1
    """CPU threads of each process."""
    timeout_s: Annotated[PositiveFloat, TIME_LIMIT] = 1800.0
    """Seconds that a rank waits for other ranks, at startup and in every collective, before the job ends."""
    peer_timeout_s: Annotated[float, TIME_LIMIT] = Field(default=60.0, ge=1.0)
    """Seconds for which a rank, its host or the network between may be silent before the job ends."""


class ModelConfig(Section):
    """[model]: the model to train."""

    load: Annotated[PlainPath, Effect(evaluated="weights")] = Path("model")
    """Hugging Face folder, or Megatron checkpoint made by `megatron-dppo convert`."""
    reference: Annotated[PlainPath | None, TRAINING] = None
    """Folder of the reference policy for `algorithm.ref_kl_coef`. Default: the weights of `load`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the trainer's parameters and activations. Gradients and optimizer stay in float32."""
    layer_spec: Annotated[Literal["auto", "torch", "transformer_engine"], TRAINING] = "auto"
    """Layer implementation. "auto" is Transformer Engine for bfloat16 on a supported GPU, else "torch"."""


class LoraConfig(Section):
    """[lora]: low-rank adapters, trained instead of the model's weights."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains the full weights. The paper's LoRA run uses 32."""
    alpha: Annotated[PositiveInt, Needs("lora.rank")] = 64
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], Needs("lora.rank")] = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    """Linear layers with an adapter, by their Hugging Face names. Every expert has its own adapter."""


class ParallelConfig(Section):
    """[parallel]: how the model and the batch are split over processes."""

    tensor: PositiveInt = 1
    """Tensor-parallel size."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel size."""
    virtual_pipeline: PositiveInt = 1
    """Model chunks per pipeline stage (interleaved schedule)."""
    context: PositiveInt = 1
    """Context-parallel size."""
    expert: PositiveInt = 1
    """Expert-parallel size. Experts are distributed over the data-parallel ranks."""
    expert_tensor: PositiveInt | None = None
    """Tensor-parallel size inside experts. Default: `tensor`."""
    max_tokens_per_microbatch: Annotated[
        PositiveInt, Bound(">=", "longest_sequence", "sequences are never split", _LONGEST)
    ] = 16384
    """Maximum tokens of a packed micro-batch. Sequences are never split."""
    share_prefixes: Annotated[bool | None, Clash("parallel.context", _PIECES, when=True)] = None
    """Forward a prefix once that several samples of a micro-batch begin with, such as their prompt. Gradients
    are the same. `max_tokens_per_microbatch` then counts such a prefix once. Default: true if it is
    supported: with torch's layers, without linear attention and context parallelism; otherwise false."""
    overlap_grad_reduce: Annotated[bool, Clash("parallel.overlap_param_gather", _OVERLAPPED, when=False)] = (
        False
    )
    """Reduce gradients over ranks during the backward pass."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward pass. Requires `optimizer.distributed`."""


def _overrides() -> type[Section]:
    """Return a section with the fields of the package's rules; None keeps the preset's value."""
    found: dict[str, Any] = {
        name: (kind | None, Field(default=None, description=doc)) for name, (kind, doc) in SETTINGS.items()
    }
    return create_model("Overrides", __base__=Section, **found)


class AlgorithmConfig(_overrides()):
    """[algorithm]: a preset, overrides of its fields (see `algorithms.presets.SETTINGS`), and training."""

    model_config = ConfigDict(allow_inf_nan=True)  # infinity turns a bound off; the preset checks numbers

    if TYPE_CHECKING:  # of all presets
        anchor: Anchor | None = None
        ref_kl_coef: float | None = None
        ref_kl: RefKl | None = None

    preset: str = "dppo_binary_tv"
    """Name in megatron_dppo.algorithms.PRESETS, or your own rule: "package.module:function"."""
    rule_options: dict[str, bool | int | float | str] | None = None
    """Custom rules: keyword arguments of the function."""
    rule_divergence: str | None = None
    """Custom rules: divergence to compute for the function, a name in megatron_dppo.algorithms.DIVERGENCES."""
    rule_over: Literal["tokens", "responses"] | None = None
    """Custom rules: "responses" passes complete responses to the function and computes the logits twice."""
    replay_recomputed_routes: Annotated[bool, Clash("rollout.routing_replay", "one source of routes")] = False
    """R2: train on the experts that the forward of a recomputed anchor chose (R3: rollout.routing_replay)."""
    aggregation: Literal[
        "token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
    ] = "token_mean"
    """Reduction of token losses, with global counts. The paper's authors recommend seq_mean_token_sum_norm."""
    normalize_advantage_std: bool = False
    """Divide group advantages by their standard deviation."""
    minibatches_per_rollout: PositiveInt = 4
    """Gradient steps per pass over a rollout."""
    epochs_per_rollout: PositiveInt = 1
    """Passes over each rollout."""
    loss_from: Annotated[Literal["hidden_states", "logits"], MEMORY_ROUNDING] = "hidden_states"
    """hidden_states: compute a micro-batch's logits in chunks of tokens. logits: compute all at once."""
    logits_chunk_bytes: Annotated[PositiveInt, MEMORY_ROUNDING] = 2**30
    """hidden_states: maximum bytes of a chunk of logits on a rank."""
    logits_dtype: Literal["model", "float32"] = "model"
    """hidden_states: type of the logits. float32 avoids rounding the logits of a bfloat16 model."""

    @property
    def steps_per_rollout(self) -> int:
        """Gradient steps on each rollout."""
        return self.minibatches_per_rollout * self.epochs_per_rollout


class Config(Section):
    """Config of a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    lora: Annotated[LoraConfig, TRAINING] = LoraConfig()
    parallel: Annotated[ParallelConfig, LAYOUT] = ParallelConfig()
    data: DataConfig = DataConfig()
    rollout: Rollout = EmbeddedRollout()
    algorithm: Annotated[AlgorithmConfig, TRAINING] = AlgorithmConfig()
    optimizer: Annotated[OptimizerConfig, TRAINING] = OptimizerConfig()
    checkpoint: Annotated[CheckpointConfig, SAVING] = CheckpointConfig()
    evaluation: Annotated[EvaluationConfig, OWN_SET] = EvaluationConfig()
    tracking: Annotated[TrackingConfig, TRACKING] = TrackingConfig()
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Fields of megatron.core's TransformerConfig, passed through."""
    sglang: Annotated[dict[str, Any], Needs("rollout.engine", on="sglang")] = Field(default_factory=dict)
    """Arguments of the SGLang servers, passed through. `python` is the interpreter with SGLang. `model_path`
    names a folder of 8-bit weights, in whose form servers get the weights of `model.load`."""

    @property
    def embedded_weights(self) -> EnginePrecision:
        """Precision of the embedded engine's weights."""
        weights = self.rollout.transformers.weights
        return self.model.dtype if weights == "model" else weights

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and response."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def num_gradient_steps(self) -> int:
        """Gradient steps of the run: the horizon of the learning-rate schedule."""
        return self.run.num_rollouts * self.algorithm.steps_per_rollout

    @property
    def has_routes(self) -> bool:
        """Whether micro-batches carry routes, of the rollout or of a recomputed anchor."""
        return self.rollout.routing_replay != "off" or self.algorithm.replay_recomputed_routes

    @property
    def replays_routes(self) -> bool:
        """Whether gradient steps replay their micro-batches' routes: R3 or R2."""
        return self.rollout.routing_replay == "replay" or self.algorithm.replay_recomputed_routes
