"""Goals for our losses, and the comparison of measured figures with them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MEASURED = "dppo_topk_kl"  # the objective that most goals apply to: the most expensive one
FLOOR = "copied bytes"  # the row of the byte floor


@dataclass(frozen=True)
class Goal:
    """A limit for our time relative to another loss, for the speed-up over it, or for our memory in MB."""

    form: str
    ours: str
    against: str  # a contender, FLOOR, or "memory"
    limit: float
    is_speedup: bool  # True: at least `limit` times as fast; False: at most `limit` times the time, or MB

    @property
    def words(self) -> str:
        """The goal as text, without the figure."""
        if self.against == "memory":
            return f"{self.form}: {self.ours}, at most {self.limit:.0f} MB besides its inputs"
        if self.is_speedup:
            return f"{self.form}: {self.ours}, at least {self.limit:.2f}x as fast as {self.against}"
        return f"{self.form}: {self.ours}, at most {self.limit:.2f}x the time of {self.against}"


@dataclass(frozen=True)
class GoalResult:
    """Result of a goal for one case."""

    goal: str
    figure: float | None
    outcome: Literal["met", "missed", "not measured"]


_OURS = f"ours, {MEASURED}"
GOALS = (
    Goal("logits", _OURS, FLOOR, 1.15, is_speedup=False),
    Goal("logits", _OURS, "memory", 50, is_speedup=False),
    Goal("logits", _OURS, "Megatron fused CE", 3.5, is_speedup=True),
    Goal("logits", _OURS, "Liger vocab-parallel CE", 3.0, is_speedup=True),
    Goal("logits", _OURS, "log_softmax + gather", 2.0, is_speedup=True),
    Goal("logits", "ours, dppo_binary_tv", "Liger GRPO", 1.0, is_speedup=True),
    Goal("linear", _OURS, "three matrix products", 1.25, is_speedup=False),
    Goal("linear", _OURS, "Liger fused linear CE, TP", 1.15, is_speedup=True),
    Goal("linear", _OURS, "verl linear_cross_entropy", 1.8, is_speedup=True),
    Goal("linear", _OURS, "cut-cross-entropy, exact", 1.2, is_speedup=True),
    Goal("linear", _OURS, "QuACK chunked", 0.95, is_speedup=True),
    Goal("log_probs", "ours", "Liger fused linear CE, TP", 1.0, is_speedup=True),
)


def goal_results(
    seconds: Mapping[tuple[str, str], float], extra_bytes: Mapping[tuple[str, str], int], *, is_gpu: bool
) -> list[GoalResult]:
    """Return each goal's figure, and whether it was met. Without a GPU, no goal counts as measured.

    Args:
        seconds: Median seconds of each measured (form, name), with the byte floor under FLOOR.
        extra_bytes: Peak bytes besides the inputs of each measured (form, name).
        is_gpu: Whether the figures are from a GPU.
    """
    results: list[GoalResult] = []
    for goal in GOALS:
        ours, other = (goal.form, goal.ours), (goal.form, goal.against)
        if is_gpu and goal.against == "memory" and ours in extra_bytes:
            figure = extra_bytes[ours] / 1e6
        elif is_gpu and ours in seconds and other in seconds:
            figure = seconds[other] / seconds[ours] if goal.is_speedup else seconds[ours] / seconds[other]
        else:
            results.append(GoalResult(goal.words, None, "not measured"))
            continue
        is_met = figure >= goal.limit if goal.is_speedup else figure <= goal.limit
        results.append(GoalResult(goal.words, figure, "met" if is_met else "missed"))
    return results
