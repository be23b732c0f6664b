"""The data types of the package, from prompts and samples to packed micro-batches.

Letters in shape comments: L tokens of one sample (prompt and response), R of them response tokens,
K top-K columns, T packed tokens of one micro-batch, S sequences in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:  # reward workers read this module and start without a tensor library
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
RoutingReplay = Literal["off", "measure", "replay"]
AnswerForm = Literal["boxed", "answer_line"]
"""How a response gives its answer: in its last box, or in a last line "Answer: ..."."""


DataCursor = Mapping[str, "int | list[int]"]
"""Where a stream of prompts stands, as JSON."""


class Message(TypedDict):
    """One turn of a chat, as tokenizers' chat templates take it."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """A question and what its reward needs. Exactly one of `text` and `messages` is set."""

    id: str
    answer: str
    source: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None

    def __post_init__(self) -> None:
        assert (self.text is None) != (self.messages is None), "a prompt is either text or messages"


@dataclass(frozen=True)
class RolloutTopK:
    """The rollout policy's K most probable tokens at each response position, most probable first."""

    ids: Tensor  # [R, K] int32; -1 pads
    log_probs: Tensor  # [R, K] float32, of the sampling distribution


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
    """What routes of one model look like."""

    layer_numbers: tuple[int, ...]  # 0-based Hugging Face indices of the MoE layers
    num_experts: int
    top_k: int


@dataclass(frozen=True)
class WeightVersionSpan:
    """Response tokens [start, stop) were sampled by this version of the weights."""

    start: int
    stop: int
    version: int


@dataclass(frozen=True)
class Sample:
    """One response to one prompt, as the rollout engine gave it, then scored."""

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


@dataclass(frozen=True)
class Microbatch:
    """Whole sequences packed end to end; position t scores `targets[t]`, its sequence's next token.

    The last position of each sequence scores nothing: its `loss_mask` is False and its target 0.
    """

    tokens: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in each sequence
    targets: Tensor  # [T] int64
    cu_seqlens: Tensor  # [S+1] int32: where sequences start, and T
    loss_mask: Tensor  # [T] bool
    rollout_log_probs: Tensor  # [T] float32
    advantages: Tensor  # [T] float32
    token_weights: Tensor  # [T] float32; 1 everywhere under token_mean
    topk: RolloutTopK | None = None  # ids, log_probs [T, K]
    routed_experts: RoutedExperts | None = None  # indices [T, moe_layers, top_k]
    old_log_probs: Tensor | None = None  # [T] float32, only for anchor = "recomputed"
    sample_ids: tuple[str, ...] = ()  # of the S sequences; none where they are no samples
    weight_versions: Tensor | None = None  # [T] int32: which sampled the target; -1: none did, or not known
    is_measured: Tensor | None = None  # [T] bool: of a sample whose mismatch is told apart; none: all are

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
class OpenRollout:
    """A rollout that was sampled and is being trained on: what a checkpoint in the middle of it must keep."""

    steps: tuple[TrainBatch, ...]  # this rank's gradient steps, those not yet taken
    num_done: int  # gradient steps taken
    metrics: Mapping[str, float]  # of the rollout's row so far, over all ranks
    seconds: Mapping[str, float]  # spent in its phases so far, and "total"


@dataclass(frozen=True)
class RunState:
    """Where a run stands; with weights, optimizer, RNG and an open rollout, all that resuming needs."""

    rollout: int  # rollouts finished
    step: int  # gradient steps finished, skipped ones included
    weight_version: int  # of the weights the engine holds
    data_cursor: DataCursor
    last_evaluation: int = -1  # rollouts finished when the policy was last evaluated; -1 before the first
    skipped_in_a_row: int = 0  # gradient steps just skipped for values that were not finite
    roll_backs: int = 0  # times that the run went back to an earlier checkpoint
