"""Define every setting: one frozen model per TOML section. Unknown keys are errors.

Every field has a type, a working default, a bound if one exists, and a one-line description.
Rules that need several fields or the disk are in `megatron_dppo.checks`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, create_model

from megatron_dppo.algorithms.loss_terms import RefKl
from megatron_dppo.algorithms.objective import Anchor
from megatron_dppo.algorithms.presets import SETTINGS
from megatron_dppo.config.markers import (
    LAYOUT,
    LIMIT,
    MEMORY,
    MEMORY_LIMIT,
    MEMORY_ROUNDING,
    OWN_SET,
    SAVING,
    SCORING_TIME_LIMIT,
    SERVERS,
    TIME_LIMIT,
    TRACKING,
    TRAINING,
    Clash,
    Effect,
    Needs,
    Section,
)
from megatron_dppo.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    PlainPath,
    TrackingConfig,
)
from megatron_dppo.types import RoutingReplay

EnginePrecision = Literal["float32", "bfloat16", "bfloat16_fp8", "modelopt_fp8", "modelopt_nvfp4"]
"""Precision of the embedded engine's weights and arithmetic."""


_LENGTH = "The length of the run, if optimizer.schedule is constant and rollout.lag is 0; both depend on it."
_OVERLAPPED = "true: overlap_param_gather does both"
_ONE_GPU = "'tensor' or 'disk': NCCL has no two ranks on one GPU"
_UNFINISHED = "1: without max_staleness, trajectories that are left unfinished lose their environment"
_SELECTS = "0: over-sampling lets speed select the samples, and lag should change only their age"
_DISCARDED = "0: rollouts ahead were sampled by weights that a roll back discards"
_DECODES = "1: this engine decodes all responses to their end"
_BUSY = "0: this engine samples in the trainer's processes, and they cannot train at the same time"
_TURNS = "0: trainer and servers take turns on the same GPUs"
_INTERRUPTED = "0: a push interrupts responses, and such a function cannot resume them"
_COLOCATED = "false: with SGLang, rollout.sglang.colocated decides whether trainer and servers take turns"
_DECIDES = "one of them: the function itself decides on observations and on the end of responses"
_EPISODES = "one of them: the agent itself decides what follows a response, and ends its episodes"
_OF_TRANSFORMERS, _OF_SGLANG = Needs("rollout.engine", on="transformers"), Needs("rollout.engine", on="sglang")


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
    max_tokens_per_microbatch: PositiveInt = 16384
    """Maximum tokens of a packed micro-batch. Sequences are never split."""
    share_prefixes: bool | None = None
    """Forward a prefix once that several samples of a micro-batch begin with, such as their prompt. Gradients
    are the same. `max_tokens_per_microbatch` then counts such a prefix once. Default: true if it is
    supported: with torch's layers, without linear attention and context parallelism; otherwise false."""
    overlap_grad_reduce: Annotated[bool, Clash("parallel.overlap_param_gather", _OVERLAPPED, when=False)] = (
        False
    )
    """Reduce gradients over ranks during the backward pass."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward pass. Requires `optimizer.distributed`."""


class TransformersEngineConfig(Section):
    """[rollout.transformers]: the embedded engine, which runs in the trainer's processes."""

    weights: Literal["model"] | EnginePrecision = "model"
    """Precision of the engine's copy of the weights. "model" is `model.dtype`. bfloat16_fp8 rounds linear
    weights to fp8-e4m3 with one scale per output. The modelopt_ values round like `megatron-dppo quantize`."""
    batch_size: Annotated[PositiveInt, Effect("Sequences decoded at once.")] = 256
    """Sequences decoded at once. A finished sequence is replaced by the next one in the queue."""


class SglangEngineConfig(Section):
    """[rollout.sglang]: how SGLang servers are started and called. [sglang] has the servers' arguments."""

    start_timeout_s: PositiveFloat = 1800.0
    """Seconds until a started server must respond."""
    max_restarts: NonNegativeInt = 3
    """Maximum restarts of a server that exits unexpectedly, by `megatron-dppo serve`."""
    request_timeout_s: Annotated[PositiveFloat, Effect(SERVERS.resume, "all sets")] = 1800.0
    """Seconds per response, including the time in a server's queue. Slower ones are dropped and counted."""
    max_attempts: PositiveInt = 4
    """Maximum attempts per call."""
    max_concurrent_requests: PositiveInt = 256
    """Concurrent requests per trainer process and server. An evaluation during sampling (`max_staleness`) may
    send the same number in addition."""
    num_own_servers: NonNegativeInt = 0
    """Servers that `train` starts and stops on rank 0's host. 0: use the servers of `megatron-dppo serve`."""
    weight_sync: Annotated[
        Literal["distributed", "disk", "tensor"],
        Clash("rollout.sglang.colocated", _ONE_GPU, when="distributed"),
    ] = "distributed"
    """Transport of weights: broadcast, a shared folder in `run.folder`, or handles on the same devices."""
    sync_bucket_bytes: PositiveInt = 2**31
    """Extra memory of a push on each rank. More if one tensor exceeds half of it; less for small models."""
    sync_timeout_s: PositiveFloat = 600.0
    """Seconds for one call of a push."""
    probe_every: NonNegativeInt = 1
    """Pushes between comparisons of the servers' log-probs with the trainer's. 0: never; also skips the
    temperature check."""
    colocated: bool = False
    """Run servers on the trainer's GPUs. Trainer and servers free the GPU memory for each other in turn."""


class AgentConfig(Section):
    """[rollout.agent]: an agent that somebody else wrote, which calls the policy over HTTP."""

    harness: Annotated[str | None, Clash("rollout.agent.command", "one of them")] = None
    """Your own "package.module:function", an `async def` that runs one episode. It replaces the environment."""
    command: tuple[str, ...] = ()
    """Program and arguments of one episode instead of `harness`, with {base_url}, {api_key}, {prompt} and
    {task} (a JSON file) filled in."""
    train: Annotated[Literal["main", "tools", "all"], TRAINING] = "main"
    """Conversations of an episode that train: main (the tree with the most sampled tokens, with tools if some
    have tools), all trees with tools, or all trees."""
    thinking: Literal["keep", "template"] = "keep"
    """keep: a conversation continues with its thinking. template: it ends where the chat template leaves out
    earlier thinking, and a new one begins."""
    renderer: str | None = None
    """Renderer of the library `renderers`, such as "glm-4.5": it reads tool calls and thinking, and renders new
    messages, as the model's family does. Default: JSON in <tool_call>, and the chat template."""
    episode_timeout_s: Annotated[PositiveFloat, SCORING_TIME_LIMIT] = 600.0
    """Seconds that a harness may work in an episode, without its calls. Slower ones are dropped and counted."""
    call_timeout_s: Annotated[PositiveFloat, SCORING_TIME_LIMIT] = 120.0
    """Seconds that a harness may work before its first call, between two calls, and after the last one."""
    max_calls: int = Field(default=100, ge=1, le=10_000)
    """Maximum responses per episode. Later calls are refused, and the episode is cut if it ends for that."""

    @property
    def is_set(self) -> bool:
        """Whether an agent samples."""
        return self.harness is not None or bool(self.command)


class RolloutConfig(Section):
    """[rollout]: sampling of responses."""

    engine: Literal["transformers", "sglang"] = "transformers"
    """Engine that samples responses."""
    prompts_per_rollout: Annotated[PositiveInt, TRAINING] = 64
    """Prompts per rollout, over all ranks."""
    samples_per_prompt: Annotated[PositiveInt, TRAINING] = 8
    """Responses per prompt. They form the group over which advantages are computed."""
    max_response_tokens: Annotated[PositiveInt, OWN_SET] = 1024
    """Maximum tokens of a response or a complete conversation. Longer ones are cut and count as truncated."""
    environment: Annotated[
        str,
        Clash("rollout.over_sampling", _UNFINISHED, unless="rollout.max_staleness"),
    ] = "single_turn"
    """Environment: a registered name, "gem:<task>", or your own "package.module:Class"."""
    generate: Annotated[
        str | None,
        Clash("rollout.environment", _DECIDES),
        Clash("rollout.over_sampling", _DECIDES),
        Clash("rollout.max_turn_tokens", _DECIDES),
    ] = None
    """Your own "package.module:function" that samples responses. It replaces the environment."""
    max_turns: Annotated[
        PositiveInt, Clash("rollout.environment", "1: one response ends a single turn", value="single_turn")
    ] = 1
    """Maximum responses per conversation. An unfinished conversation is cut and counted as truncated."""
    max_turn_tokens: PositiveInt | None = None
    """Maximum tokens of one response in a conversation. Default: the rest of `max_response_tokens`."""
    thinking: Annotated[Literal["keep", "template"], Needs("rollout.environment", off="single_turn")] = "keep"
    """With an environment, as `agent.thinking` with an agent: keep earlier thinking in a conversation, or begin
    a new one if the chat template leaves it out. All of them train."""
    temperature: Annotated[PositiveFloat, TRAINING] = 1.0
    """Sampling temperature. The trainer divides its logits by it, too."""
    top_p: Annotated[float, TRAINING] = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. Training requires 1, because mu must be the sampling distribution."""
    num_topk_log_probs: Annotated[int, TRAINING] = Field(default=0, ge=0, le=64)
    """Most probable tokens to keep per position. topk_* divergences need at least `algorithm.top_k`."""
    routing_replay: Annotated[RoutingReplay, TRAINING] = "off"
    """R3: off | measure (capture and report agreement) | replay (train on the rollout's expert choices)."""
    max_dropped_fraction: Annotated[float, LIMIT] = Field(default=0.01, ge=0, le=1)
    """Maximum fraction of a rollout's samples that may be dropped. Above it the run stops."""
    max_data_gib: Annotated[PositiveFloat, MEMORY_LIMIT] = 32.0
    """Worst-case host memory of samples and batches on each rank in GiB, including the rollouts of `lag`."""
    lag: Annotated[
        NonNegativeInt,
        TRAINING,
        Clash("rollout.over_sampling", _SELECTS),
        Clash("tracking.alarms", _DISCARDED, value="roll_back"),
    ] = 0
    """Rollouts to sample ahead: the weights of version max(r - lag, 0) sample rollout r."""
    over_sampling: Annotated[
        float,
        TRAINING,
        Clash("rollout.engine", _DECODES, value="transformers"),
    ] = Field(default=1.0, ge=1)
    """sglang: started prompts per needed prompt. Once enough groups are complete, the rest is dropped. With
    `max_staleness`: open groups per group that a rollout trains on, up to S + 1. None is dropped."""
    max_staleness: Annotated[
        NonNegativeInt,
        TRAINING,
        Clash("rollout.engine", _BUSY, value="transformers"),
        Clash("rollout.sglang.colocated", _TURNS),
        Clash("rollout.lag", "one of them: a largest or a fixed age"),
        Clash("rollout.generate", _INTERRUPTED),
    ] = 0
    """sglang: maximum staleness S in weight versions. If S > 0, sampling continues during training, and the
    weights that train on a token are at most S versions newer than those that sampled it. 0: synchronous."""
    refill_zero_variance: Annotated[bool, TRAINING] = False
    """Dynamic sampling (DAPO): replace groups with equal rewards by groups of new prompts."""
    max_refills: Annotated[PositiveInt, Needs("rollout.refill_zero_variance"), TRAINING] = 3
    """Times that dynamic sampling replaces a group. A group with equal rewards that remains is kept."""
    release_trainer: Annotated[
        bool,
        MEMORY,
        Clash("rollout.engine", _COLOCATED, value="sglang"),
    ] = False
    """transformers: trainer and engine use the device in turn. For SGLang see `rollout.sglang.colocated`."""
    agent: Annotated[
        AgentConfig,
        Needs("rollout.agent.is_set"),
        Clash("rollout.environment", _EPISODES),
        Clash("rollout.generate", _EPISODES),
        Clash("rollout.over_sampling", _EPISODES, unless="rollout.max_staleness"),
    ] = AgentConfig()
    """Agent that calls the policy. It replaces the environment."""
    transformers: Annotated[TransformersEngineConfig, _OF_TRANSFORMERS] = TransformersEngineConfig()
    """Options of the embedded engine."""
    sglang: Annotated[SglangEngineConfig, _OF_SGLANG, SERVERS] = SglangEngineConfig()
    """Options of the SGLang engine."""

    @property
    def takes_turns(self) -> bool:
        """Whether engine and trainer use the same GPUs in turn."""
        return self.sglang.colocated if self.engine == "sglang" else self.release_trainer


def _overrides() -> type[Section]:
    """Return a section with the fields of the package's rules; None keeps the preset's value."""
    found: dict[str, Any] = {
        name: (kind | None, Field(default=None, description=doc)) for name, (kind, doc) in SETTINGS.items()
    }
    return create_model("Overrides", __base__=Section, **found)


class AlgorithmConfig(_overrides()):
    """[algorithm]: a preset, overrides of its fields (see `algorithms.presets.SETTINGS`), and training."""

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
    replay_recomputed_routes: bool = False
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
    rollout: RolloutConfig = RolloutConfig()
    algorithm: Annotated[AlgorithmConfig, TRAINING] = AlgorithmConfig()
    optimizer: Annotated[OptimizerConfig, TRAINING] = OptimizerConfig()
    checkpoint: Annotated[CheckpointConfig, SAVING] = CheckpointConfig()
    evaluation: Annotated[EvaluationConfig, OWN_SET] = EvaluationConfig()
    tracking: Annotated[TrackingConfig, TRACKING] = TrackingConfig()
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Fields of megatron.core's TransformerConfig, passed through."""
    sglang: Annotated[dict[str, Any], _OF_SGLANG] = Field(default_factory=dict)
    """Arguments of the SGLang servers, passed through. `python` is the interpreter with SGLang. `model_path`
    names a folder of 8-bit weights, in whose form servers get the weights of `model.load`."""

    @property
    def embedded_weights(self) -> EnginePrecision:
        """Precision of the embedded engine's weights."""
        weights = self.rollout.transformers.weights
        return self.model.dtype if weights == "model" else weights

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
