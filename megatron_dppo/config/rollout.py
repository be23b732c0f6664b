"""The section [rollout]: what all engines have, and a class per engine; the source of responses; staleness."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Discriminator, Field, NonNegativeInt, PositiveFloat, PositiveInt, Tag

from megatron_dppo.config.markers import (
    LIMIT,
    MEMORY,
    MEMORY_LIMIT,
    OWN_SET,
    SCORING_TIME_LIMIT,
    SERVERS,
    TRAINING,
    Bound,
    Clash,
    Effect,
    Needs,
    Section,
)
from megatron_dppo.types import RoutingReplay

EnginePrecision = Literal["float32", "bfloat16", "bfloat16_fp8", "modelopt_fp8", "modelopt_nvfp4"]
"""Precision of the embedded engine's weights and arithmetic."""

_ONE_GPU = "'tensor' or 'disk': NCCL has no two ranks on one GPU"
_UNFINISHED = "1: without max_staleness, trajectories that are left unfinished lose their environment"
_SELECTS = "0: over-sampling lets speed select the samples, and lag should change only their age"
_DISCARDED = "0: rollouts ahead were sampled by weights that a roll back discards"
_TURNS = "0: trainer and servers take turns on the same GPUs"
_INTERRUPTED = "0: a push interrupts responses, and such a function cannot resume them"
_DECIDES = "one of them: the function itself decides on observations and on the end of responses"
_EPISODES = "one of them: the agent itself decides what follows a response, and ends its episodes"
SOURCES = ("rollout.environment", "rollout.generate", "rollout.agent")
"""Beginnings of the keys that name a source of responses."""
_SINGLE_TURN = "single_turn"


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


@dataclass(frozen=True)
class SingleTurnSource:
    """A trajectory is one response to the prompt."""


@dataclass(frozen=True)
class EnvironmentSource:
    """Trajectories are conversations with an environment: its registered name, or "package.module:Class"."""

    name: str


@dataclass(frozen=True)
class GenerateSource:
    """A function of the user samples trajectories: "package.module:function"."""

    name: str


@dataclass(frozen=True)
class HarnessSource:
    """A function of the user runs episodes of an agent: "package.module:function"."""

    name: str


@dataclass(frozen=True)
class CommandSource:
    """A program runs episodes of an agent: its name and arguments."""

    words: tuple[str, ...]


AgentSource = HarnessSource | CommandSource
Source = SingleTurnSource | EnvironmentSource | GenerateSource | AgentSource


@dataclass(frozen=True)
class FixedLag:
    """Weights of version max(r - num_waiting, 0) sample rollout r; 0 is the synchronous loop."""

    num_waiting: int  # complete rollouts that wait for training
    max_versions: ClassVar[int] = 0


@dataclass(frozen=True)
class LargestAge:
    """Sampling continues during training, by weights up to `max_versions` older than those that train."""

    max_versions: int
    num_waiting: ClassVar[int] = 0


Staleness = FixedLag | LargestAge


class RolloutConfig(Section):
    """[rollout]: sampling of responses, by any engine."""

    prompts_per_rollout: Annotated[PositiveInt, TRAINING] = 64
    """Prompts per rollout, over all ranks."""
    samples_per_prompt: Annotated[
        PositiveInt, TRAINING, Bound(">=", 2, "the advantage of a single sample is always 0; 8 is usual")
    ] = 8
    """Responses per prompt. They form the group over which advantages are computed."""
    max_response_tokens: Annotated[PositiveInt, OWN_SET] = 1024
    """Maximum tokens of a response or a complete conversation. Longer ones are cut and count as truncated."""
    environment: Annotated[
        str,
        Clash("rollout.over_sampling", _UNFINISHED, unless="rollout.max_staleness"),
    ] = _SINGLE_TURN
    """Environment: a registered name, "gem:<task>", or your own "package.module:Class"."""
    generate: Annotated[
        str | None,
        Clash("rollout.environment", _DECIDES),
        Clash("rollout.over_sampling", _DECIDES),
        Clash("rollout.max_turn_tokens", _DECIDES),
    ] = None
    """Your own "package.module:function" that samples responses. It replaces the environment."""
    max_turns: Annotated[
        PositiveInt, Clash("rollout.environment", "1: one response ends a single turn", value=_SINGLE_TURN)
    ] = 1
    """Maximum responses per conversation. An unfinished conversation is cut and counted as truncated."""
    max_turn_tokens: PositiveInt | None = None
    """Maximum tokens of one response in a conversation. Default: the rest of `max_response_tokens`."""
    thinking: Annotated[Literal["keep", "template"], Needs("rollout.environment", off=_SINGLE_TURN)] = "keep"
    """With an environment, as `agent.thinking` with an agent: keep earlier thinking in a conversation, or begin
    a new one if the chat template leaves it out. All of them train."""
    temperature: Annotated[PositiveFloat, TRAINING] = 1.0
    """Sampling temperature. The trainer divides its logits by it, too."""
    top_p: Annotated[
        float, TRAINING, Bound("==", 1, "the ratio pi/mu needs mu to be the distribution that was sampled from")
    ] = Field(default=1.0, gt=0, le=1)
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
        Bound("<", "run.num_rollouts", "else the first weights sample every rollout"),
        Clash("rollout.over_sampling", _SELECTS),
        Clash("tracking.alarms", _DISCARDED, value="roll_back"),
    ] = 0
    """Rollouts to sample ahead: the weights of version max(r - lag, 0) sample rollout r."""
    refill_zero_variance: Annotated[bool, TRAINING] = False
    """Dynamic sampling (DAPO): replace groups with equal rewards by groups of new prompts."""
    max_refills: Annotated[PositiveInt, Needs("rollout.refill_zero_variance"), TRAINING] = 3
    """Times that dynamic sampling replaces a group. A group with equal rewards that remains is kept."""
    agent: Annotated[
        AgentConfig,
        Needs("rollout.agent.is_set"),
        Clash("rollout.environment", _EPISODES),
        Clash("rollout.generate", _EPISODES),
        Clash("rollout.over_sampling", _EPISODES, unless="rollout.max_staleness"),
    ] = AgentConfig()
    """Agent that calls the policy. It replaces the environment."""

    @property
    def source(self) -> Source:
        """Source of responses: the one that is named; `check` refuses several."""
        if self.agent.harness is not None:
            return HarnessSource(self.agent.harness)
        if self.agent.command:
            return CommandSource(self.agent.command)
        if self.generate is not None:
            return GenerateSource(self.generate)
        if self.environment != _SINGLE_TURN:
            return EnvironmentSource(self.environment)
        return SingleTurnSource()


class EmbeddedRollout(RolloutConfig):
    """[rollout] with the embedded engine. What SGLang alone can do has one value, and its table no effect."""

    engine: Literal["transformers"] = "transformers"
    """Engine that samples responses: "transformers" or "sglang"."""
    release_trainer: Annotated[bool, MEMORY] = False
    """transformers: trainer and engine use the device in turn. For SGLang see `rollout.sglang.colocated`."""
    transformers: TransformersEngineConfig = TransformersEngineConfig()
    """Options of the embedded engine."""
    over_sampling: Annotated[float, TRAINING] = Field(default=1.0, ge=1, le=1)
    """This engine decodes all responses to their end. Leave it out, or set rollout.engine = "sglang"."""
    max_staleness: Annotated[Literal[0], TRAINING] = 0
    """This engine samples in the trainer's processes, which cannot train meanwhile. Leave it out, or set
    rollout.engine = "sglang"."""
    sglang: Annotated[SglangEngineConfig, Needs("rollout.engine", on="sglang"), SERVERS] = SglangEngineConfig()
    """Options of the SGLang engine."""

    @property
    def colocated(self) -> bool:
        """Whether engine and trainer use the same GPUs in turn."""
        return self.release_trainer

    @property
    def staleness(self) -> Staleness:
        """Age of the weights that sample what is trained on."""
        return FixedLag(self.lag)


class SglangRollout(RolloutConfig):
    """[rollout] with SGLang servers. The embedded engine's options have one value, or no effect."""

    engine: Literal["sglang"] = "sglang"
    """Engine that samples responses: "transformers" or "sglang"."""
    over_sampling: Annotated[
        float,
        TRAINING,
        Bound("<=", "rollout.max_open", "others are too old to train on", "rollout.max_staleness + 1"),
    ] = Field(default=1.0, ge=1)
    """sglang: started prompts per needed prompt. Once enough groups are complete, the rest is dropped. With
    `max_staleness`: open groups per group that a rollout trains on, up to S + 1. None is dropped."""
    max_staleness: Annotated[
        NonNegativeInt,
        TRAINING,
        Clash("rollout.sglang.colocated", _TURNS),
        Clash("rollout.lag", "one of them: a largest or a fixed age"),
        Clash("rollout.generate", _INTERRUPTED),
    ] = 0
    """sglang: maximum staleness S in weight versions. If S > 0, sampling continues during training, and the
    weights that train on a token are at most S versions newer than those that sampled it. 0: synchronous."""
    sglang: Annotated[SglangEngineConfig, SERVERS] = SglangEngineConfig()
    """Options of the SGLang engine."""
    release_trainer: Annotated[Literal[False], MEMORY] = False
    """With SGLang, rollout.sglang.colocated decides whether trainer and servers take turns on the GPUs."""
    transformers: Annotated[TransformersEngineConfig, Needs("rollout.engine", on="transformers")] = (
        TransformersEngineConfig()
    )
    """Options of the embedded engine."""

    @property
    def colocated(self) -> bool:
        """Whether engine and trainer use the same GPUs in turn."""
        return self.sglang.colocated

    @property
    def staleness(self) -> Staleness:
        """Age of the weights that sample what is trained on."""
        return LargestAge(self.max_staleness) if self.max_staleness else FixedLag(self.lag)

    @property
    def max_open(self) -> float:
        """Largest `over_sampling`: groups beyond it would be too old when their rollout is trained on."""
        return self.max_staleness + 1 if self.max_staleness else math.inf


def _engine_of(rollout: Any) -> str | None:
    """Return the tag of the union: the engine that a table or a section names, or the default one."""
    if isinstance(rollout, dict):
        return str(cast("dict[str, Any]", rollout).get("engine", "transformers"))
    return getattr(rollout, "engine", None)


Rollout = Annotated[
    Annotated[EmbeddedRollout, Tag("transformers")] | Annotated[SglangRollout, Tag("sglang")],
    Discriminator(_engine_of),
]


def with_engine(rollout: EmbeddedRollout | SglangRollout, engine: str) -> EmbeddedRollout | SglangRollout:
    """Return the section for an engine; settings that only the other one has get their defaults."""
    if rollout.engine == engine:
        return rollout
    shared = (*RolloutConfig.model_fields, "transformers", "sglang")
    kind = SglangRollout if engine == "sglang" else EmbeddedRollout
    return kind(**{name: getattr(rollout, name) for name in shared})
