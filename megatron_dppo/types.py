"""The data types of the package, from prompts and samples to packed micro-batches.

Letters in shape comments: L tokens of one sample (prompt and response), R of them response tokens,
K top-K columns, T packed tokens of one micro-batch, S sequences in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict

if TYPE_CHECKING:  # reward workers read this module and start without a tensor library
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
RoutingReplay = Literal["off", "measure", "replay"]
AnswerForm = Literal["boxed", "answer_line"]
"""How a response gives its answer: in its last box, or in a last line "Answer: ..."."""


DataCursor = Mapping[str, "int | list[int]"]
"""Where a stream of prompts stands, as JSON."""


class Message(TypedDict):
    """One turn of a chat. Further fields of a message, such as `tool_calls`, reach the chat template too."""

    role: str
    content: str


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

    def __post_init__(self) -> None:
        assert (self.text is None) != (self.messages is None), "a prompt is either text or messages"


def each_token(record: Any, apply: Callable[[Tensor, float], Tensor]) -> Any:
    """Copy a record with `apply(values, fill)` in place of each per-token tensor; `fill` is for padding.

    A per-token tensor is a field of a dataclass whose metadata name its `fill`. Other fields stay as they are.
    """
    changed: dict[str, Any] = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if value is not None and "fill" in each.metadata:
            changed[each.name] = apply(value, each.metadata["fill"])
        elif is_dataclass(value):
            changed[each.name] = each_token(value, apply)
    return replace(record, **changed)


@dataclass(frozen=True)
class RolloutTopK:
    """The rollout policy's K most probable tokens at each response position, most probable first."""

    ids: Tensor = field(metadata={"fill": -1})  # [R, K] int32; -1 pads
    log_probs: Tensor = field(metadata={"fill": -math.inf})  # [R, K] float32, of the sampling distribution


@dataclass(frozen=True)
class RoutedExperts:
    """The experts that the rollout engine's routers chose, row t for the forward of token t.

    The last token of a sample is never forwarded by the engine, so there is one row fewer than tokens.
    """

    indices: Tensor  # [L-1, moe_layers, top_k] uint8 (int16 above 256 experts)
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


@dataclass(frozen=True)
class Sample:
    """One response to one prompt, as the rollout engine returned it, then scored."""

    id: str
    group_id: str
    tokens: Tensor  # [L] int64: prompt, then response
    prompt_length: int
    loss_mask: Tensor  # [R] bool: the response tokens that learn
    rollout_log_probs: Tensor  # [R] float32: log mu of the sampling distribution
    finish_reason: FinishReason
    topk: RolloutTopK | None = None
    routed_experts: RoutedExperts | None = None
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    num_retractions: int = 0  # times that the engine dropped the sample's cache and computed it again
    reward: float | None = None
    reward_info: Mapping[str, float] = field(default_factory=dict[str, float])
    advantage: float | None = None
    token_weights: Tensor | None = None  # [R] float32: of each response token in the loss; set before packing

    @property
    def response_length(self) -> int:
        """R, the number of response tokens, end-of-sequence included."""
        return self.tokens.numel() - self.prompt_length


@dataclass(frozen=True)
class SampleGroup:
    """All responses to one prompt; advantages are taken within it."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    index: int  # the prompt's place in its rollout, over all ranks


_PADS_0: Mapping[str, float] = {"fill": 0}


@dataclass(frozen=True, kw_only=True)
class RolloutTokens:
    """Inputs of a loss on T tokens beside the policy: one record, from packing to the kernels.

    A new per-token input of the loss is one line here, with the value that pads it, and its rule in
    `data.batches.packing.pack`. Slicing, moving, saving and `PolicyLossInputs.of` treat all fields alike.
    """

    targets: Tensor = field(metadata=_PADS_0)  # [T] int64: the token that each position scores
    rollout_log_probs: Tensor = field(metadata=_PADS_0)  # [T] float32 log mu
    advantages: Tensor = field(metadata=_PADS_0)  # [T] float32
    loss_mask: Tensor | None = field(default=None, metadata=_PADS_0)  # [T] bool: which learn; none: all
    token_weights: Tensor | None = field(default=None, metadata=_PADS_0)  # [T] float32; none: 1 everywhere
    old_log_probs: Tensor | None = field(default=None, metadata=_PADS_0)  # [T] float32, for recomputed anchors
    ref_log_probs: Tensor | None = field(default=None, metadata=_PADS_0)  # [T] float32, for the reference KL
    topk: RolloutTopK | None = None  # ids, log_probs [T, K]

    def rows(self, which: Any) -> Self:
        """Return the record of some tokens alone, chosen by an index, a mask or a slice."""
        return each_token(self, lambda values, _: values[which])


ROLLOUT_TOKENS = tuple(each.name for each in fields(RolloutTokens))
"""Names of the fields of `RolloutTokens`; of a micro-batch, which has more, those that a loss reads."""


@dataclass(frozen=True, kw_only=True)
class Microbatch(RolloutTokens):
    """Whole sequences packed end to end; position t scores `targets[t]`, its sequence's next token.

    The last position of each sequence scores nothing: its `loss_mask` is False and its target 0.
    """

    loss_mask: Tensor = field(metadata=_PADS_0)  # [T] bool
    token_weights: Tensor = field(metadata=_PADS_0)  # [T] float32; 1 everywhere under token_mean
    tokens: Tensor = field(metadata=_PADS_0)  # [T] int64
    position_ids: Tensor = field(metadata=_PADS_0)  # [T] int64, from 0 in each sequence
    cu_seqlens: Tensor  # [S+1] int32: where sequences start, and T
    routed_experts: RoutedExperts | None = None  # indices [T, moe_layers, top_k]
    sample_ids: tuple[str, ...] = ()  # of the S sequences; none where they are no samples
    weight_versions: Tensor | None = field(default=None, metadata={"fill": -1})
    # [T] int32: which sampled the target; -1: none did, or not known
    is_measured: Tensor | None = field(default=None, metadata=_PADS_0)
    # [T] bool: of a sample whose mismatch is told apart; none: all are

    @property
    def num_loss_tokens(self) -> int:
        """Number of positions that learn."""
        return int(self.loss_mask.sum())

    @property
    def max_seqlen(self) -> int:
        """Length of the longest packed sequence."""
        return int(self.cu_seqlens.diff().max())


@dataclass(frozen=True)
class TrainBatch:
    """One gradient step's work on this rank. The counts are global: over all data-parallel ranks."""

    microbatches: tuple[Microbatch, ...]
    num_loss_tokens: int
    num_samples: int


@dataclass(frozen=True)
class SampledRollout:
    """A sampled rollout that waits to be trained on, which every checkpoint must keep."""

    steps: tuple[TrainBatch, ...]  # this rank's gradient steps
    metrics: Mapping[str, float]  # of its row: what was measured when it was sampled, over all ranks


@dataclass(frozen=True)
class OpenRollout:
    """A sampled rollout that is being trained on, which a checkpoint in the middle of it must keep."""

    steps: tuple[TrainBatch, ...]  # this rank's gradient steps, those not yet taken
    num_done: int  # gradient steps taken
    metrics: Mapping[str, float]  # of the rollout's row so far, over all ranks
    seconds: Mapping[str, float]  # spent in its phases so far, and "total"
    listed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # masked tokens of its steps so far


@dataclass(frozen=True)
class RunState:
    """Counters of a run; with weights, optimizer, RNG and an open rollout, all that resuming needs."""

    rollout: int  # rollouts finished
    step: int  # gradient steps finished, skipped ones included
    weight_version: int  # of the weights the engine holds
    data_cursor: DataCursor
    last_evaluation: int = -1  # rollouts finished when the policy was last evaluated; -1 before the first
    skipped_in_a_row: int = 0  # gradient steps just skipped for values that were not finite
    roll_backs: int = 0  # times that the run went back to an earlier checkpoint
