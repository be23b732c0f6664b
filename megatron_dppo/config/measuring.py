"""The sections [evaluation] and [tracking]."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from megatron_dppo.config.section import RewardSetting, Section

ShadowOption = bool | int | float | str | dict[str, bool | int | float | str]


def is_due(every: int, rollout: int) -> bool:
    """Whether a period acts in a rollout.

    Args:
        every: The period: N acts in the rollouts N, 2N, 3N, ..., counted from 1; 0 never acts.
        rollout: Index of the rollout, from 0.
    """
    return every > 0 and (rollout + 1) % every == 0


class EvaluationSetConfig(Section):
    """[evaluation.sets.<name>]: one set of held-out prompts; a field that is none is as in [evaluation]."""

    prompts: Path
    """A file like data.prompts."""
    samples_per_prompt: PositiveInt | None = None
    """Responses to each prompt of this set."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature of this set."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling of this set."""
    max_response_tokens: PositiveInt | None = None
    """Where responses of this set are cut."""
    reward: RewardSetting | None = None
    """As data.reward; none: that one. Here right is worth 1 and wrong 0."""


class EvaluationConfig(Section):
    """[evaluation]: scores on sets of held-out prompts, with sampling of its own."""

    sets: dict[str, EvaluationSetConfig] = Field(default_factory=dict)
    """Tables [evaluation.sets.<name>], each with its prompts; without any there is no evaluation."""
    every: NonNegativeInt = 10
    """Evaluate after this many rollouts, before the first and after the last; 0 never."""
    samples_per_prompt: PositiveInt = 32
    """Responses to each prompt: n of avg@n."""
    temperature: NonNegativeFloat = 0.7
    """0 decodes greedily."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Nucleus sampling."""
    max_response_tokens: PositiveInt | None = None
    """Longer responses are cut and counted as truncated; none: rollout.max_response_tokens."""
    pass_at: tuple[PositiveInt, ...] | None = None
    """k of pass@k; none: 1, 2, 4, ... up to a set's samples_per_prompt."""

    @property
    def used_sets(self) -> Mapping[str, EvaluationSetConfig]:
        """The sets that are evaluated: without evaluation not even their files are read."""
        return self.sets if self.every else {}


class TrackingConfig(Section):
    """[tracking]: what is written beside the metrics file, and diagnostics that cost time."""

    backends: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Trackers to feed beside metrics.jsonl (extra `track`)."""
    samples_every: NonNegativeInt = 10
    """Write the samples of the rollouts N, 2N, 3N, ... (from 1) as text; 0 never."""
    batches_every: NonNegativeInt = 0
    """Keep the mini-batches of the rollouts N, 2N, 3N, ... (from 1) as tensors, for what-if; 0 never."""
    paired_routing_every: NonNegativeInt = 0
    """In the rollouts N, 2N, 3N, ... (from 1), forward one mini-batch with both kinds of routes; 0 never."""
    mismatch_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the samples that this forward takes, and that drift and age are measured on; chosen by id."""
    alarms: Literal["log", "stop", "roll_back", "off"] = "log"
    """What follows where a rollout looks wrong: reward, length, tails, routers, values that are not finite.

    "roll_back" goes on from the newest checkpoint before the trouble began, with the prompts that come next."""
    max_roll_backs: PositiveInt = 3
    """The run ends at the alarm after so many."""
    clipped_tokens_every: NonNegativeInt = 0
    """In the rollouts N, 2N, 3N, ... (from 1), list the tokens that masks drop, also in context; 0 never."""
    shadow: bool = True
    """Beside each gradient step, evaluate other presets on its tokens: what they would have masked."""
    shadow_presets: tuple[str, ...] = ()
    """Names in megatron_dppo.algorithms.PRESETS, or own rules; none: the paper's whose inputs the batch has."""
    shadow_options: dict[str, dict[str, ShadowOption]] = Field(default_factory=dict)
    """Tables [tracking.shadow_options."<name>"] with fields as in [algorithm], rule_options among them."""
