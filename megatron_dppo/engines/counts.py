"""Counts an engine's retries, time-outs and tokens."""

from dataclasses import asdict, astuple, dataclass


@dataclass(frozen=True)
class EngineCounts:
    """Counts of the engine's retries, time-outs and tokens since it was built, evaluations included.

    Unlike `RolloutCounts`, it includes responses that are still open. The embedded engine counts only prompt
    tokens and cached tokens; the other counts concern servers.
    """

    num_retries: int = 0  # calls to servers that were repeated
    num_maybe_sampled_twice: int = 0  # requests sent again that a server may have sampled already
    num_timed_out: int = 0  # requests aborted at one server because they took too long
    num_unanswered: int = 0  # requests dropped: no response in time, or within the attempts
    num_refused_answers: int = 0  # requests dropped: the response failed a check
    num_requeued: int = 0  # times that a request moved to another server after a failure
    num_retractions: int = 0  # times that a server dropped a request's cache and recomputed it
    num_without_routes: int = 0  # responses with missing or unusable routes that were requested
    num_prompt_tokens: int = 0  # input tokens of the responses that were kept, resumed tokens included
    num_cached_tokens: int = 0  # prompt tokens that the engine found in its cache

    def __add__(self, other: "EngineCounts") -> "EngineCounts":
        return EngineCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "EngineCounts") -> "EngineCounts":
        return EngineCounts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def metrics(self) -> dict[str, float]:
        """Return each count as an `engine/...` metric. Call it on totals."""
        return {f"engine/{name.removeprefix('num_')}": float(value) for name, value in asdict(self).items()}
