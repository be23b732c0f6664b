"""What a user may set: one frozen model per TOML section; unknown keys are errors.

Every field has a type, a default that works, a bound where one exists, and a one-line description.
Rules that need more than one field, or the disk, live in `megatron_dppo.checks`.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_dppo.config.measuring import EvaluationConfig, TrackingConfig
from megatron_dppo.config.section import RewardSetting, Section
from megatron_dppo.types import RoutingReplay

EnginePrecision = Literal["float32", "bfloat16", "bfloat16_fp8", "modelopt_fp8", "modelopt_nvfp4"]
"""Precision of the embedded engine's weights and arithmetic."""


class RunConfig(Section):
    """[run]: the run folder and how long to go on."""

    folder: Path = Path("runs/run")
    """Everything the run writes goes here."""
    seed: NonNegativeInt = 0
    """Seeds sampling noise, prompt order and mini-batch order."""
    num_rollouts: PositiveInt = 100
    """Rollouts to train on; each is followed by `algorithm.minibatches_per_rollout` gradient steps."""
    num_threads: PositiveInt = 1
    """CPU threads of each process."""
    timeout_s: PositiveFloat = 1800.0
    """Seconds that a rank waits for the others, at the start and in every collective, before the job ends."""


class ModelConfig(Section):
    """[model]: what to train."""

    load: Path = Path("model")
    """A Hugging Face folder or a Megatron checkpoint made by megatron-dppo convert."""
    reference: Path | None = None
    """Such a folder, of the policy that algorithm.ref_kl_coef holds on to; none: the weights of `load`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameter and activation type of the trainer; gradients and optimizer stay in float32."""
    layer_spec: Literal["auto", "torch", "transformer_engine"] = "auto"
    """Whose modules compute; auto: Transformer Engine's for bfloat16 on a GPU that can use it, else ours."""


class LoraConfig(Section):
    """[lora]: low-rank adapters in the place of the model's own weights."""

    rank: NonNegativeInt = 0
    """Width of the adapters; 0 trains the model's own weights. The paper's LoRA run has 32."""
    alpha: PositiveInt = 64
    """An adapter's product is scaled by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linears with an adapter, as Hugging Face names them; every expert has its own."""


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
    """Expert-parallel size; experts are spread over the data-parallel ranks."""
    expert_tensor: PositiveInt | None = None
    """Tensor-parallel size inside experts; none means the same as `tensor`."""
    max_tokens_per_microbatch: PositiveInt = 16384
    """Token budget of one packed micro-batch; whole sequences are packed up to it."""
    overlap_grad_reduce: bool = False
    """Sum gradients over ranks while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward pass already runs; needs optimizer.distributed."""


class DataConfig(Section):
    """[data]: prompts and their reward."""

    prompts: Path = Path("prompts.jsonl")
    """A .jsonl or .parquet file with one prompt per row."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages; `column.field` names a part of one."""
    answer_column: str | None = None
    """Column with the reference answer; none: `answer`, verl's `reward_model.ground_truth`, slime's `label`."""
    shuffle: bool = True
    """Reorder prompts each epoch, by `run.seed`."""
    reward: RewardSetting = ""
    """Required: a registered reward, "package.module:function" of your own, a table of such names and weights,
    or "environment", where rollout.environment or rollout.generate gives every reward."""
    reward_values: tuple[float, float] = (0.0, 1.0)
    """What a registered reward gives a wrong and a right response."""
    thinking: Literal["ignore", "require"] = "ignore"
    """require: a registered reward sees what follows the one </think>; without it, the response is wrong."""
    overlong_buffer_tokens: NonNegativeInt = 0
    """Last tokens before rollout.max_response_tokens that cost, of those that the policy sampled; 0: none."""
    overlong_penalty: PositiveFloat = 1.0
    """What the reward of a response that uses the whole buffer is lowered by."""
    reward_workers: PositiveInt = 1
    """Processes that score responses, or hold environments, beside each trainer process."""
    reward_timeout_s: PositiveFloat = 10.0
    """A response that takes longer to score, or an environment to answer, is dropped and counted."""
    reward_memory_mb: NonNegativeInt = 2048
    """What scoring may allocate, in MiB; 0 is no limit. A response that exceeds it is dropped and counted."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are dropped and counted."""


class TransformersEngineConfig(Section):
    """[rollout.transformers]: the engine embedded in the trainer's processes."""

    weights: Literal["model"] | EnginePrecision = "model"
    """Precision of the engine's own copy; model: that of model.dtype. bfloat16_fp8 rounds linear weights to
    fp8-e4m3 first, a scale for each output, and the modelopt_ ones as megatron-dppo quantize does."""
    batch_size: PositiveInt = 256
    """Sequences decoded at once; a finished row is refilled from the queue."""


class SglangEngineConfig(Section):
    """[rollout.sglang]: how SGLang's servers are started and asked; their own arguments stand in [sglang]."""

    start_timeout_s: PositiveFloat = 1800.0
    """Seconds until a server that was started must answer."""
    max_restarts: NonNegativeInt = 3
    """Times that `megatron-dppo serve` starts a server again that ended by itself."""
    request_timeout_s: PositiveFloat = 1800.0
    """Seconds for one response, its time in a server's queue included; then it is dropped and counted."""
    max_attempts: PositiveInt = 4
    """Times that one call is made before it fails."""
    max_concurrent_requests: PositiveInt = 256
    """Requests that each process of the trainer gives one server at a time; as many again while it evaluates
    beside sampling (max_staleness)."""
    num_own_servers: NonNegativeInt = 0
    """Servers that `train` starts and stops itself, on the host of rank 0; 0: those of `serve`."""
    weight_sync: Literal["distributed", "disk", "tensor"] = "distributed"
    """By broadcast; through a folder of run.folder that servers see too; or by handles, on the same devices."""
    sync_bucket_bytes: PositiveInt = 2**29
    """What a push holds on a rank beyond its weights; more where a single tensor is larger than half of it."""
    sync_timeout_s: PositiveFloat = 600.0
    """Seconds for one call of a push."""
    probe_every: NonNegativeInt = 1
    """Compare the servers' log-probs with the trainer's every N pushes. 0: never, nor try their temperature."""
    colocated: bool = False
    """Servers share the trainer's GPUs: trainer and servers leave them to each other, turn by turn."""


class RolloutConfig(Section):
    """[rollout]: how responses are sampled."""

    engine: Literal["transformers", "sglang"] = "transformers"
    """Which engine rolls out."""
    prompts_per_rollout: PositiveInt = 64
    """Prompts in one rollout, over all ranks."""
    samples_per_prompt: PositiveInt = 8
    """Responses to each prompt; the advantage is taken within them."""
    max_response_tokens: PositiveInt = 1024
    """Longer responses are cut and counted as truncated; a conversation as a whole."""
    environment: str = "single_turn"
    """Whom responses answer: a registered environment, "gem:<task>", or "package.module:Class" of your own."""
    generate: str | None = None
    """"package.module:function" of your own that samples responses, in the environment's place."""
    max_turns: PositiveInt = 1
    """Responses in one conversation; an environment that would go on is cut, and counted as truncated."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens of one response in a conversation; none: as many as max_response_tokens leaves."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer divides its logits by the same."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; training refuses anything but 1 (mu must be the sampling distribution)."""
    top_k: int = Field(default=-1, ge=-1)
    """Top-k sampling; training refuses anything but -1 (off)."""
    repetition_penalty: PositiveFloat = 1.0
    """Training refuses anything but 1."""
    num_topk_log_probs: int = Field(default=0, ge=0, le=64)
    """Most probable tokens kept with each position; topk_* algorithms need at least their top_k."""
    routing_replay: RoutingReplay = "off"
    """R3: off | measure (capture and report agreement) | replay (train on the rollout's expert choices)."""
    max_dropped_fraction: float = Field(default=0.01, ge=0, le=1)
    """The run stops when more samples than this share of a rollout are dropped."""
    max_data_gib: PositiveFloat = 32.0
    """Host memory that samples and batches, those of `lag` too, may take on each rank, at worst, in GiB."""
    lag: NonNegativeInt = 0
    """Sample this many rollouts ahead: rollout r is sampled by the weights of version max(r - lag, 0)."""
    over_sampling: float = Field(default=1.0, ge=1)
    """sglang: prompts begun for each one wanted; once enough groups are whole, the rest is aborted. With
    max_staleness, groups that may be open at once for each one that a rollout trains on, up to S + 1."""
    max_staleness: NonNegativeInt = 0
    """sglang: S. Sampling goes on while the trainer trains, and no token is trained on by weights that are more
    than S versions newer than those that sampled it; 0: one after the other."""
    keep_partials: bool = True
    """sglang: resume aborted responses. Required by max_staleness; over_sampling without it needs false, and
    drops and counts them."""
    refill_zero_variance: bool = False
    """Dynamic sampling: replace groups whose rewards are all equal by groups of new prompts."""
    max_refills: PositiveInt = 3
    """Times that a rollout replaces such groups; those that are left stay."""
    release_trainer: bool = False
    """transformers: trainer and engine take turns on the device; rollout.sglang.colocated says it of SGLang."""
    transformers: TransformersEngineConfig = TransformersEngineConfig()
    """Options of the embedded engine."""
    sglang: SglangEngineConfig = SglangEngineConfig()
    """Options of the sglang engine."""

    @property
    def takes_turns(self) -> bool:
        """Whether engine and trainer have the same GPUs, and leave them to each other."""
        return self.sglang.colocated if self.engine == "sglang" else self.release_trainer


class AlgorithmConfig(Section):
    """[algorithm]: a preset, the fields of it to override (none: the preset's own), and how it is trained with.

    The fields are those that `algorithms.presets.OVERRIDABLE` names.
    """

    preset: str = "dppo_binary_tv"
    """Name in megatron_dppo.algorithms.PRESETS, or a rule of one's own: "package.module:function"."""
    rule_options: dict[str, bool | int | float | str] | None = None
    """Own rules: what the function gets beside the tokens."""
    rule_divergence: str | None = None
    """Own rules: the divergence that the function sees, a name in megatron_dppo.algorithms.DIVERGENCES."""
    rule_over: Literal["tokens", "responses"] | None = None
    """Own rules: responses gives the function whole ones, at the price of making the logits twice."""
    delta: float | None = None
    """Divergence threshold for both signs of the advantage."""
    delta_low: float | None = None
    """Divergence threshold where the advantage is negative."""
    delta_high: float | None = None
    """Divergence threshold where the advantage is positive."""
    eps_low: float | None = None
    """Ratio clip below 1, for negative advantages."""
    eps_high: float | None = None
    """Ratio clip above 1, for positive advantages."""
    ratio_cap: float | None = None
    """Cap C on the importance weight pi/mu."""
    alpha: float | None = None
    """relax_*: tokens with mu below this are not clipped on the relaxed side."""
    anchor: Literal["rollout", "recomputed"] | None = None
    """Policy the mask compares with."""
    top_k: int | None = Field(default=None, ge=1, le=64)
    """Columns of mu that topk_* divergences use."""
    include_other: bool | None = None
    """topk_*: count the mass outside the K tokens as one more outcome."""
    sampled_token: Literal["union", "replace"] | None = None
    """topk_*: how the sampled token joins the K."""
    rho_low: float | None = None
    """icepop, mis: smallest ratio of trainer to engine, of a token or of a whole response."""
    rho_high: float | None = None
    """icepop, mis: largest such ratio."""
    token_kl: float | None = None
    """trm: responses with a token above this divergence are left out."""
    response_kl: float | None = None
    """trm: responses with a mean divergence above this are left out."""
    prefix_delta: float | None = None
    """cppo: mean divergence that a response may spend up to any of its tokens, at least."""
    prefix_delta_max: float | None = None
    """cppo: the same at most; between both, the 90th percentile of the response's own divergences."""
    late_weight: float | None = None
    """cppo: weight of a response's last token in that mean; the first has 1."""
    tau_low: float | None = None
    """sapo: steepness of the weight where the advantage is negative."""
    tau_high: float | None = None
    """sapo: steepness of the weight where the advantage is positive."""
    entropy_coef: float | None = None
    """Weight of an entropy bonus."""
    log_ratio_coef: float | None = None
    """Weight of (log pi/mu)^2, which is added to the loss of every learning token."""
    ref_kl_coef: float | None = None
    """Weight of the KL from the reference policy, `model.reference`, of every learning token; 0 is off."""
    ref_kl: Literal["k3", "k1"] | None = None
    """k3: GRPO's estimator in the loss; k1: log pi/ref, weighted by pi/mu, as a penalty of the advantage."""
    aggregation: Literal[
        "token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
    ] = "token_mean"
    """How token losses become one number; counts are global. The authors recommend seq_mean_token_sum_norm."""
    normalize_advantage_std: bool = False
    """Divide group advantages by their standard deviation."""
    minibatches_per_rollout: PositiveInt = 4
    """Gradient steps per pass over a rollout."""
    epochs_per_rollout: PositiveInt = 1
    """Passes over each rollout."""
    loss_from: Literal["hidden_states", "logits"] = "hidden_states"
    """Whether the logits of a micro-batch exist some tokens at a time, or all at once."""
    logits_chunk_bytes: PositiveInt = 2**30
    """hidden_states: bytes of the logits that exist at once on a rank."""
    logits_dtype: Literal["model", "float32"] = "model"
    """hidden_states: float32 does not round the logits of a bfloat16 model."""


class OptimizerConfig(Section):
    """[optimizer]: AdamW and its schedule, counted in gradient steps."""

    lr: float = Field(default=1e-6, gt=0, le=1)
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of a decaying schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after warm-up, reaching min_lr at the run's last gradient step."""
    warmup_steps: NonNegativeInt = 0
    """Gradient steps of linear warm-up from 0."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices (not of norms and biases)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW beta 1."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW beta 2."""
    eps: PositiveFloat = 1e-8
    """AdamW epsilon."""
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient-norm clip; 0 turns it off."""
    distributed: bool = True
    """Shard optimizer states over data-parallel ranks (Megatron's DistributedOptimizer)."""
    offload: bool = False
    """Keep moments and float32 master weights in the host's memory outside of updates; exact, and slower."""
    max_skipped_steps: PositiveInt = 3
    """The run stops when so many gradient steps in a row had a loss or gradient that is not finite."""


class CheckpointConfig(Section):
    """[checkpoint]: saving and resuming."""

    every: NonNegativeInt = 50
    """Save after this many rollouts, and at the end; 0 saves only at the end."""
    every_steps: NonNegativeInt = 0
    """Save after this many gradient steps too, in the middle of a rollout where they fall there; 0 never."""
    resume: bool = True
    """Go on from the run folder's latest checkpoint when there is one."""
    asynchronous: bool = True
    """Write beside training, from a copy in host memory; false waits until the checkpoint is on disk."""
    keep_last: NonNegativeInt = 3
    """Newest checkpoints that stay; 0 keeps all. The next rules keep others besides."""
    keep_every: NonNegativeInt = 0
    """Keep checkpoints whose number of finished rollouts is a multiple of this; 0 none."""
    keep_best: NonNegativeInt = 0
    """Keep this many checkpoints with the best `best_metric`."""
    best_metric: str = "reward/mean"
    """For `keep_best`: a metric of the rollout that was just finished, or of the evaluation after it."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which value of `best_metric` is best."""
    reserve_gib: NonNegativeFloat = 1.0
    """Disk space that a save must leave free, in GiB."""
    max_failed_saves: PositiveInt = 3
    """The run stops when so many saves in a row could not be written; the last one of a run may never fail."""


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Passed through to megatron.core's TransformerConfig."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Passed through to the SGLang server's arguments; `python` names the interpreter that has SGLang."""

    @property
    def embedded_weights(self) -> EnginePrecision:
        """Precision of the embedded engine's weights."""
        weights = self.rollout.transformers.weights
        return self.model.dtype if weights == "model" else weights

    @property
    def num_gradient_steps(self) -> int:
        """Gradient steps of the whole run: the horizon of the learning-rate schedule."""
        return (
            self.run.num_rollouts * self.algorithm.minibatches_per_rollout * self.algorithm.epochs_per_rollout
        )
