"""The data types of the package, from prompts and samples to packed micro-batches.

Letters in shapes: L tokens of one sample (prompt and response), R of them response tokens,
K top-K columns, T packed tokens of one micro-batch, S sequences in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict

if TYPE_CHECKING:  # reward workers read this module and start without a tensor library
    from jaxtyping import Bool, Float32, Int32, Int64, Integer, Shaped
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
RoutingReplay = Literal["off", "measure", "replay"]
AnswerForm = Literal["boxed", "answer_line"]
"""Format of the final result in a response: in its last box, or in a last line "Answer: ..."."""


DataCursor = Mapping[str, "int | list[int]"]
"""Position in a stream of prompts, as JSON."""


if TYPE_CHECKING:

    class Message(TypedDict):
        """One turn of a chat. Further fields, such as `tool_calls`, reach the chat template and workers too."""

        role: str
        content: str
else:
    Message = dict[str, Any]  # a TypedDict would lose further fields on the way to a worker


@dataclass(frozen=True)
class Prompt:
    """A question and the data that its reward needs. Exactly one of `text` and `messages` is set."""

    id: str
    answer: str
    source: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None  # for the chat template: functions that may be called
    template_arguments: Mapping[str, Any] | None = None  # for the chat template, such as enable_thinking
    metadata: Mapping[str, Any] | None = None  # JSON values for the reward and the environment
    file: str | None = None  # its file's name, if `data.prompts` has several
    label: Any = None  # the answer as a JSON value, if its cell is no text

    @property
    def typed_answer(self) -> Any:
        """The answer with the type that its cell has."""
        return self.answer if self.label is None else self.label

    def __post_init__(self) -> None:
        assert (self.text is None) != (self.messages is None), "a prompt is either text or messages"


def each_token(record: Any, apply: Callable[[Tensor, float], Tensor]) -> Any:
    """Copy a record, replacing each per-token tensor by `apply(values, fill)`; `fill` is the padding value.

    A per-token tensor is a dataclass field with `fill` in its metadata. Other fields are unchanged.
    """
    changed: dict[str, Any] = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if value is not None and "fill" in each.metadata:
            changed[each.name] = apply(value, each.metadata["fill"])
        elif value is not None and is_dataclass(value):  # torch.compile of 2.11 cannot trace is_dataclass(None)
            changed[each.name] = each_token(value, apply)
    return replace(record, **changed)


@dataclass(frozen=True)
class RolloutTopK:
    """The rollout policy's K most probable tokens at each response position, most probable first."""

    ids: Int32[Tensor, "R K"] = field(metadata={"fill": -1})  # -1 pads
    log_probs: Float32[Tensor, "R K"] = field(metadata={"fill": -math.inf})  # of the sampling distribution


@dataclass(frozen=True)
class RoutedExperts:
    """The experts that the rollout engine's routers chose, row t for the forward of token t.

    The last token of a sample is never forwarded by the engine, so there is one row fewer than tokens.
    """

    indices: Integer[Tensor, "L-1 moe_layers top_k"]  # uint8 (int16 above 256 experts)
    layer_numbers: tuple[int, ...]  # 0-based Hugging Face indices of the MoE layers
    num_experts: int


@dataclass(frozen=True)
class ModelRouting:
    """Dimensions of the routes of one model: MoE layers, experts and top-k."""

    layer_numbers: tuple[int, ...]  # 0-based Hugging Face indices of the MoE layers
    num_experts: int
    top_k: int


@dataclass(frozen=True)
class WeightVersionSpan:
    """Response tokens [start, stop) that one version of the weights sampled."""

    start: int
    stop: int
    version: int


CallKind = Literal["first", "continues", "branch", "repeats", "tools", "template", "edited", "another"]
"""How a call of an agent relates to the earlier ones; `docs/reference/agents.md` explains each."""


@dataclass(frozen=True)
class AgentCall:
    """One call of an agent in an episode: a node of the tree."""

    kind: CallKind
    parent: int | None  # number of the call, from 0, whose conversation it continues; None: a new conversation
    num_prompt_tokens: int  # before its response, all conversation
    num_tokens: int  # sampled
    is_trained: bool  # whether a conversation that was chosen has it; a fault may still leave that one out
    response: str


@dataclass(frozen=True)
class Episode:
    """The outcome of a trajectory. If `reward` is None, `data.reward` scores `response`.

    The counts are of an agent's complete episode, whose calls may be more than the trajectory's turns.
    """

    response: str  # the last response
    num_turns: int = 1
    reward: float | None = None
    info: Mapping[str, float] = field(default_factory=dict[str, float])
    fault: str | None = None  # message of a fault of what `failed` names
    failed: Literal["environment", "harness"] = "environment"
    calls: tuple[AgentCall, ...] = ()
    num_forks: int = 0  # responses that continue no earlier one, or one that has a continuation
    num_untrained_tokens: int = 0  # sampled, and in no sample

    @property
    def num_calls(self) -> int:
        """Number of responses of an agent's episode."""
        return len(self.calls)


@dataclass(frozen=True)
class Sample:
    """One response of the rollout engine to one prompt: the same record from the engine to the mini-batch.

    An engine returns the response alone. When it is complete, `engines.base.with_prompt` puts the prompt before
    it; scoring adds the reward, and the mini-batch the advantage and the weights.
    """

    id: str
    group_id: str
    tokens: Int64[Tensor, " L"]  # prompt, then response
    prompt_length: int  # 0 of a response alone
    loss_mask: Bool[Tensor, " R"]  # response tokens in the loss: the sampled ones
    rollout_log_probs: Float32[Tensor, " R"]  # log mu of the sampling distribution
    finish_reason: FinishReason
    topk: RolloutTopK | None = None
    routed_experts: RoutedExperts | None = None
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    num_retractions: int = 0  # times that the engine dropped the sample's cache and computed it again
    reward: float | None = None
    reward_info: Mapping[str, float] = field(default_factory=dict[str, float])
    advantage: float | None = None
    token_weights: Float32[Tensor, " R"] | None = None  # of each response token in the loss; set before packing
    branch: int = 0  # number of a further sample of one agent's episode; 0: the first sample, or the only one
    num_moves: int = 0  # times that its request moved to another server after a failure
    num_cached_tokens: int = 0  # input tokens in its requests that the engine found in its cache
    routes_fault: str | None = None  # why the requested routes are missing
    prompt_tokens: tuple[int, ...] | None = None  # of a response alone, if they differ from its request's
    episode: Episode | None = None  # result from its environment or agent; None without one
    branches: tuple[Sample, ...] = ()  # further samples of its episode

    @property
    def rollout_id(self) -> str:
        """The id of the response or the episode; all samples of an episode have the same."""
        return self.id.removesuffix(f"#{self.branch}") if self.branch else self.id

    @property
    def response_length(self) -> int:
        """R, the number of response tokens, end-of-sequence included."""
        return self.tokens.numel() - self.prompt_length

    def wrong_rows(self, *, has_topk: bool) -> dict[str, int]:
        """Return the numbers of rows by field if one of them is not R; an empty table if all are."""
        num_rows = {"log_probs": self.rollout_log_probs.numel(), "loss_mask": self.loss_mask.numel()}
        if has_topk:
            num_rows["topk"] = self.topk.ids.shape[0] if self.topk is not None else 0
        return num_rows if set(num_rows.values()) != {self.response_length} else {}

    @property
    def has_finite_log_probs(self) -> bool:
        """Whether mu of all tokens is finite."""
        return bool(self.rollout_log_probs.isfinite().all())

    @property
    def has_usable_log_probs(self) -> bool:
        """Whether mu of all tokens in the loss is finite; -inf is allowed among the Top-K."""
        is_finite = math.isfinite(self.rollout_log_probs[self.loss_mask].double().sum())
        return is_finite and (self.topk is None or bool((self.topk.log_probs < math.inf).all()))

    @property
    def request_id(self) -> str:
        """`id`, by the name that functions of `rollout.generate` may use."""
        return self.id

    @property
    def log_probs(self) -> Float32[Tensor, " R"]:
        """`rollout_log_probs`, by the name that functions of `rollout.generate` may use."""
        return self.rollout_log_probs


@dataclass(frozen=True)
class SampleGroup:
    """All responses to one prompt; advantages are computed within the group."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    index: int  # index of the prompt in its rollout, over all ranks
    calls: Mapping[str, tuple[AgentCall, ...]] = field(default_factory=dict[str, tuple[AgentCall, ...]])
    """Calls of agents' episodes, by the first sample's id."""

    @property
    def rollouts(self) -> tuple[Sample, ...]:
        """The first sample of each response or episode: rewards and advantages count these."""
        return tuple(sample for sample in self.samples if sample.branch == 0)


_PADS_0: Mapping[str, float] = {"fill": 0}


@dataclass(frozen=True, kw_only=True)
class RolloutTokens:
    """Inputs of a loss on T tokens besides the policy's outputs: one record, from packing to the kernels.

    A new per-token input of the loss is one line here, with the value that pads it, and its rule in
    `data.batches.packing.pack`. Slicing, moving, saving and `PolicyLossInputs.of` treat all fields alike.
    """

    targets: Int64[Tensor, " T"] = field(metadata=_PADS_0)  # the token that each position scores
    rollout_log_probs: Float32[Tensor, " T"] = field(metadata=_PADS_0)  # log mu
    advantages: Float32[Tensor, " T"] = field(metadata=_PADS_0)
    loss_mask: Bool[Tensor, " T"] | None = field(
        default=None, metadata=_PADS_0
    )  # tokens in the loss; None: all
    token_weights: Float32[Tensor, " T"] | None = field(default=None, metadata=_PADS_0)  # None: 1 everywhere
    old_log_probs: Float32[Tensor, " T"] | None = field(default=None, metadata=_PADS_0)  # anchor = "recomputed"
    ref_log_probs: Float32[Tensor, " T"] | None = field(default=None, metadata=_PADS_0)  # for the reference KL
    positions: Int32[Tensor, " T"] | None = field(default=None, metadata=_PADS_0)
    # index of the token among its response's learning tokens, from 0; for custom rules
    lengths: Int32[Tensor, " T"] | None = field(default=None, metadata=_PADS_0)
    # number of learning tokens in the response; for custom rules
    topk: RolloutTopK | None = None  # ids, log_probs [T, K]

    @property
    def topk_ids(self) -> Integer[Tensor, "T K"] | None:
        """[T, K] ids of the Top-K, if there are any."""
        return None if self.topk is None else self.topk.ids

    def rows(self, which: Any) -> Self:
        """Return the record of selected tokens, chosen by an index, a mask or a slice."""
        return each_token(self, lambda values, _: values[which])


ROLLOUT_TOKENS = tuple(each.name for each in fields(RolloutTokens))
"""Names of the fields of `RolloutTokens`: the fields of a micro-batch that a loss reads."""


@dataclass(frozen=True, kw_only=True)
class Microbatch(RolloutTokens):
    """Whole sequences packed end to end; position t scores `targets[t]`, its sequence's next token.

    The last position of each sequence scores nothing: its `loss_mask` is False and its target 0.
    """

    loss_mask: Bool[Tensor, " T"] = field(metadata=_PADS_0)
    token_weights: Float32[Tensor, " T"] = field(metadata=_PADS_0)  # 1 everywhere under token_mean
    tokens: Int64[Tensor, " T"] = field(metadata=_PADS_0)
    position_ids: Int64[Tensor, " T"] = field(metadata=_PADS_0)  # from 0 in each sequence
    cu_seqlens: Int32[Tensor, " S+1"]  # where sequences start, and T
    routed_experts: RoutedExperts | None = None  # indices [T, moe_layers, top_k]
    sample_ids: tuple[str, ...] = ()  # of the S sequences; empty if they are not samples
    weight_versions: Int32[Tensor, " T"] | None = field(default=None, metadata={"fill": -1})
    # version of the weights that sampled the target; -1: not sampled, or not known
    is_measured: Bool[Tensor, " T"] | None = field(default=None, metadata=_PADS_0)
    # tokens of samples selected for mismatch metrics; None: all

    @property
    def num_loss_tokens(self) -> int:
        """Number of positions in the loss."""
        return int(self.loss_mask.sum())

    @property
    def max_seqlen(self) -> int:
        """Length of the longest packed sequence."""
        return int(self.cu_seqlens.diff().max())


@dataclass(frozen=True)
class TrainBatch:
    """One gradient step's batch on this rank. The counts are over all data-parallel ranks."""

    microbatches: tuple[Microbatch, ...]
    num_loss_tokens: int
    num_samples: int

    def with_column(self, name: str, values: Sequence[Shaped[Tensor, " T"] | RoutedExperts]) -> Self:
        """Return the batch with a per-token field, one value for each micro-batch."""
        changes: list[dict[str, Any]] = [{name: each} for each in values]
        pairs = zip(self.microbatches, changes, strict=True)
        return replace(self, microbatches=tuple(replace(m, **change) for m, change in pairs))


@dataclass(frozen=True)
class OpenRollout:
    """A sampled rollout that waits for training or is being trained on; checkpoints must contain it.

    Its batches are among those of `run.state.TrainingState.steps`.
    """

    num_steps: int  # number of gradient steps that remain
    num_done: int = 0  # number of gradient steps taken
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    # for the rollout's row, over all ranks: while it waits from its sampling, and in a checkpoint all so far
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])  # in its phases so far, and "total"
    listed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # masked tokens so far


@dataclass(frozen=True)
class RunState:
    """Counters of a run. Resuming also needs weights, optimizer, RNG states and the sampled rollouts."""

    rollout: int  # number of finished rollouts
    step: int  # number of finished gradient steps, including skipped ones
    weight_version: int  # version of the engine's weights
    data_cursor: DataCursor
    last_evaluation: int = -1  # finished rollouts at the last evaluation; -1 before the first
    skipped_in_a_row: int = 0  # latest consecutive gradient steps skipped for non-finite values
    roll_backs: int = 0  # times that the run returned to an earlier checkpoint
