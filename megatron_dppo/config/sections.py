"""The sections [data], [optimizer], [checkpoint], [evaluation] and [tracking]."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
)
from pydantic_core import PydanticCustomError

from megatron_dppo.config.markers import (
    LIMIT,
    MEMORY,
    MEMORY_LIMIT,
    OWN_SET,
    SCORING_TIME_LIMIT,
    TRAINING,
    Bound,
    Clash,
    Effect,
    Needs,
    Section,
)

_NO_WAY_BACK = "1 or more, between which a run may roll back"
_VARIABLES = Effect("Further variables of workers; scores do not depend on them.")
_SHARDING = Effect("Memory placement; a checkpoint that stores states the other way is refused.")


def num_over_sampled(factor: float, count: int) -> int:
    """Return `factor` times `count`, rounded up; 1.1 times 100 is 110, although 1.1 is more in binary."""
    return math.ceil(Fraction(repr(factor)) * count)


def _parse_reward(value: Any) -> str | dict[str, float]:
    if isinstance(value, str):
        return value
    weights = cast("dict[str, Any]", value) if isinstance(value, dict) else None
    numbers = () if weights is None else weights.values()
    if weights is None or not all(type(each) in (int, float) and math.isfinite(each) for each in numbers):
        raise PydanticCustomError("reward", "a name in quotes, or a table of names and their finite weights")
    return {name: float(weight) for name, weight in weights.items()}


RewardSetting = Annotated[str | dict[str, float], PlainValidator(_parse_reward)]
"""One reward by name, or weights by name."""


def _plain_path(path: Path) -> Path:
    """Refuse a path that a shell would have changed, or that file systems or log lines do not take."""
    text = str(path)
    if text.startswith("~") or re.search(r"\$[\w{]", text):
        raise PydanticCustomError("path", "a path without ~ and $, which only a shell expands")
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise PydanticCustomError("path", "a path without line breaks and other control characters")
    if any(len(os.fsencode(name)) > _LONGEST_NAME for name in path.parts):
        raise PydanticCustomError("path", "a path of names of at most {bytes} bytes", {"bytes": _LONGEST_NAME})
    return path


_LONGEST_NAME = 255  # bytes, of Linux's file systems
PlainPath = Annotated[Path, AfterValidator(_plain_path)]
"""A path as it is: nothing in it is expanded."""


class PromptFile(Section):
    """A table of `data.prompts`: one of several files of prompts."""

    path: PlainPath
    """Path of a .jsonl or .parquet file with one prompt per row."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the prompts from this file, relative to the other weights. Default: its number of prompts."""
    name: str | None = Field(default=None, pattern=r"^[\w.+-]+$")
    """Name in metrics: letters, digits and . + - _. Default: the file's name without its ending."""

    @property
    def label(self) -> str:
        """Name in metrics."""
        return self.name or re.sub(r"[^\w.+-]+", "_", self.path.stem)


def _parse_files(value: Any) -> Any:
    if isinstance(value, str | Path):
        value = [value]
    if not value or not isinstance(value, list | tuple):
        raise PydanticCustomError("files", "a path, a list of paths, or tables with path, weight and name")
    items = cast("Sequence[Any]", value)
    return tuple({"path": item} if isinstance(item, str | Path) else item for item in items)


def _plain_files(files: tuple[PromptFile, ...]) -> Any:
    """Return what a person would write: a path, a list of paths, or tables."""
    tables = [file.model_dump(exclude_none=True) for file in files]
    paths = [file.path for file in files]
    if any(table.keys() != {"path"} for table in tables):
        return tables
    return paths[0] if len(paths) == 1 else paths


PromptFiles = Annotated[tuple[PromptFile, ...], BeforeValidator(_parse_files), PlainSerializer(_plain_files)]
"""One or more files of prompts, written as a path, a list of paths, or tables."""


class DataConfig(Section):
    """[data]: prompts and reward."""

    prompts: Annotated[PromptFiles, TRAINING] = (PromptFile(path=Path("prompts.jsonl")),)
    """Path of a .jsonl or .parquet file with one prompt per row, or a list of paths, or tables with `path`,
    `weight` (the file's share of the prompts) and `name` (in metrics)."""
    prompt_column: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages. `column.field` selects a nested field."""
    answer_column: str | None = None
    """Reference answer's column. Default: `answer`, verl's `reward_model.ground_truth` or slime's `label`."""
    shuffle: Annotated[bool, TRAINING] = True
    """Shuffle the prompts each epoch, seeded by `run.seed`."""
    reward: Annotated[RewardSetting, OWN_SET] = ""
    """Required: a registered reward, your own "package.module:function", or a table of names and weights.
    "batch:package.module:function" gets all responses to a prompt at once. "environment" takes all rewards from
    `rollout.environment`, `rollout.agent` or `rollout.generate`."""
    reward_values: Annotated[tuple[float, float], TRAINING] = (0.0, 1.0)
    """Rewards of a wrong and of a right response, for registered rewards."""
    thinking: Annotated[Literal["ignore", "require"], OWN_SET] = "ignore"
    """require: registered rewards score the text after the one </think>. A response without it is wrong."""
    overlong_buffer_tokens: Annotated[NonNegativeInt, TRAINING, Bound("<", "rollout.max_response_tokens")] = 0
    """Overlong buffer (DAPO): last tokens before `rollout.max_response_tokens`, which cost a penalty; 0 is off.
    Only tokens that the policy sampled count."""
    overlong_penalty: Annotated[PositiveFloat, Needs("data.overlong_buffer_tokens"), TRAINING] = 1.0
    """Penalty of a response that uses the complete overlong buffer."""
    reward_workers: Annotated[PositiveInt, Effect("Processes.")] = 1
    """Worker processes per trainer process, for rewards and environments."""
    reward_timeout_s: Annotated[PositiveFloat, SCORING_TIME_LIMIT] = 10.0
    """Seconds to score a response (with "batch:" a group) or to step an environment. Slower samples are dropped
    and counted, unless `reward_if_timed_out` is set."""
    reward_if_timed_out: float | None = Field(default=None, ge=-1e18, le=1e18)
    """Reward of a response that takes `reward_timeout_s` or longer to score, in training and evaluation. By
    default it is dropped, and so costs less than a wrong one."""
    reward_retries: Annotated[NonNegativeInt, Effect("Retries of a failed reward.", "all sets")] = 0
    """Further calls of your own reward if it raises, after 0.1 s, 0.2 s, 0.4 s, ... For rewards that call other
    machines. `reward_timeout_s` limits all calls together."""
    reward_memory_mb: Annotated[NonNegativeInt, Effect(MEMORY_LIMIT.resume, "all sets")] = 2048
    """MiB for a worker of rewards, environments or agents; 0 is no limit. Samples above it are dropped and
    counted."""
    worker_environment: Annotated[tuple[str, ...], _VARIABLES] = ()
    """Environment variables that workers of rewards, environments and agents get in addition to common ones
    (PATH, HOME, LANG, PYTHONPATH, HF_HOME, ...), such as ["JUDGE_API_KEY", "JUDGE_URL"]."""
    max_prompt_tokens: PositiveInt = 1024
    """Maximum prompt length. Longer prompts are dropped and counted."""


_Number = Annotated[float, AllowInfNan(True)]  # infinity turns a bound off, as in [algorithm]
ShadowOption = bool | int | _Number | str | dict[str, bool | int | _Number | str]


def is_due(every: int, rollout: int) -> bool:
    """Return whether a periodic action is due in a rollout.

    Args:
        every: Period N: the action is due in the rollouts N, 2N, 3N, ..., counted from 1. 0 means never.
        rollout: Index of the rollout, from 0.
    """
    return every > 0 and (rollout + 1) % every == 0


class OptimizerConfig(Section):
    """[optimizer]: AdamW and its schedule, in gradient steps."""

    lr: float = Field(default=1e-6, gt=0, le=1)
    """Peak learning rate."""
    min_lr: Annotated[
        NonNegativeFloat, Needs("optimizer.schedule", off="constant"), Bound("<=", "optimizer.lr")
    ] = 0.0
    """Final learning rate of a decaying schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after warm-up. It reaches `min_lr` at the run's last gradient step."""
    warmup_steps: Annotated[
        NonNegativeInt, Bound("<=", "num_gradient_steps", name="gradient steps of the run")
    ] = 0
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
    distributed: Annotated[
        bool,
        _SHARDING,
        Clash("parallel.overlap_param_gather", "true: only sharded states are gathered", when=False),
    ] = True
    """Shard optimizer states over data-parallel ranks (Megatron's DistributedOptimizer)."""
    offload: Annotated[bool, MEMORY] = False
    """Keep moments and float32 master weights in host memory between updates. Exact, but slower."""
    max_skipped_steps: Annotated[PositiveInt, LIMIT] = 3
    """Consecutive steps with a loss or gradient that is not finite, after which the run stops."""


class CheckpointConfig(Section):
    """[checkpoint]: saving and resuming."""

    every: Annotated[
        NonNegativeInt,
        Clash("tracking.alarms", _NO_WAY_BACK, value="roll_back", when=0),
    ] = 50
    """Rollouts between checkpoints. 0 saves only at the end."""
    every_steps: NonNegativeInt = 0
    """Gradient steps between additional checkpoints, which may fall within a rollout; 0 is off."""
    resume: bool = True
    """Resume from the run folder's latest checkpoint, if there is one."""
    asynchronous: bool = True
    """Write in the background, from a copy in host memory. false waits until the checkpoint is on disk."""
    keep_last: NonNegativeInt = 3
    """Newest checkpoints to keep; 0 keeps all. `keep_every` and `keep_best` keep more."""
    keep_every: NonNegativeInt = 0
    """Keep one checkpoint between rollouts at every multiple of this many finished rollouts; 0 is off."""
    keep_best: NonNegativeInt = 0
    """Number of checkpoints with the best `best_metric` to keep."""
    best_metric: Annotated[str, Needs("checkpoint.keep_best")] = "reward/mean"
    """Metric for `keep_best`, from the last finished rollout or the evaluation after it."""
    best_is: Annotated[Literal["highest", "lowest"], Needs("checkpoint.keep_best")] = "highest"
    """Best value of `best_metric`."""
    reserve_gib: NonNegativeFloat = 1.0
    """Disk space in GiB that a save must leave free."""
    max_failed_saves: PositiveInt = 3
    """Consecutive failed saves after which the run stops. A failure of the final save always ends the run."""


class EvaluationSetConfig(Section):
    """[evaluation.sets.<name>]: a set of held-out prompts. Fields that are None default to [evaluation]."""

    prompts: PromptFiles
    """Prompt file in the format of `data.prompts`, or a list of files without weights."""
    samples_per_prompt: PositiveInt | None = None
    """Responses to each prompt of this set."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature of this set."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling of this set."""
    max_response_tokens: PositiveInt | None = None
    """Maximum length of this set's responses."""
    reward: RewardSetting | None = None
    """Reward of this set. Default: `data.reward`. In evaluation a right response scores 1 and a wrong one 0."""


class EvaluationConfig(Section):
    """[evaluation]: scores on sets of held-out prompts, with separate sampling settings."""

    sets: dict[str, EvaluationSetConfig] = Field(default_factory=dict)
    """Tables [evaluation.sets.<name>], each with its prompts. Without a table there is no evaluation."""
    every: Annotated[NonNegativeInt, Effect("How often the sets are evaluated.")] = 10
    """Rollouts between evaluations, which also run before the first and after the last rollout; 0 never."""
    samples_per_prompt: PositiveInt = 32
    """Responses per prompt: n of avg@n."""
    temperature: NonNegativeFloat = 0.7
    """Sampling temperature; 0 decodes greedily."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Nucleus sampling."""
    max_response_tokens: PositiveInt | None = None
    """Maximum length. Longer responses count as truncated. Default: `rollout.max_response_tokens`."""
    pass_at: tuple[PositiveInt, ...] | None = None
    """Values k of pass@k. Default: 1, 2, 4, ... up to a set's `samples_per_prompt`."""

    @property
    def used_sets(self) -> Mapping[str, EvaluationSetConfig]:
        """Sets to evaluate: none if `every` is 0, and then their files are not read."""
        return self.sets if self.every else {}


class TrackingConfig(Section):
    """[tracking]: trackers, output files and diagnostics in addition to metrics.jsonl."""

    backends: tuple[Literal["prometheus", "tensorboard", "trackio", "wandb"], ...] = ()
    """Trackers that receive the metrics, in addition to metrics.jsonl (extra `track`)."""
    prometheus_address: str = Field(default="127.0.0.1:9464", pattern=r"^([^\s:/]+|\[[0-9a-fA-F:]+\]):\d{1,5}$")
    """Address on rank 0's host where the backend "prometheus" serves /metrics, to everyone who reaches it."""
    samples_every: NonNegativeInt = 10
    """Rollouts between files of samples as text: N writes rollouts N, 2N, 3N, ... (from 1); 0 never."""
    batches_every: NonNegativeInt = 0
    """Rollouts between saved mini-batches for what-if: N saves rollouts N, 2N, 3N, ... (from 1); 0 never."""
    paired_routing_every: Annotated[
        NonNegativeInt,
        Clash("rollout.routing_replay", "0: only 'measure' and 'replay' capture routes", value="off"),
    ] = 0
    """Rollouts between measurements that forward one mini-batch with live and with replayed routes; 0 never."""
    mismatch_share: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the samples, selected by id, for this forward and for the drift and age metrics."""
    alarms: Literal["log", "stop", "roll_back", "off"] = "log"
    """Action on an alarm about reward, length, tails, router agreement or values that are not finite.

    "roll_back" resumes from the newest checkpoint before the fault began, with the next prompts. The URL in
    MEGATRON_DPPO_ALARM_WEBHOOK, if it is set, gets each alarm, unless this is "off"."""
    max_roll_backs: Annotated[PositiveInt, Needs("tracking.alarms", on="roll_back")] = 3
    """Maximum roll-backs. The next alarm ends the run."""
    clipped_tokens_every: NonNegativeInt = 0
    """Rollouts between lists of the masked tokens with their context: N, 2N, 3N, ... (from 1); 0 never."""
    shadow: bool = True
    """Evaluate other presets at each gradient step: the tokens that they would have masked."""
    shadow_presets: Annotated[tuple[str, ...], Needs("tracking.shadow")] = ()
    """Names in megatron_dppo.algorithms.PRESETS, or custom rules. Default: the paper's presets, if the batch
    has their inputs."""
    shadow_options: dict[str, dict[str, ShadowOption]] = Field(default_factory=dict)
    """Tables [tracking.shadow_options."<name>"] with fields of [algorithm], `rule_options` included."""
