"""Counts what an engine did: retries, time-outs, tokens."""

from dataclasses import asdict, astuple, dataclass


@dataclass(frozen=True)
class EngineCounts:
    """Counts of the engine's retries, time-outs and tokens since it was built, evaluations included.

    Unlike `RolloutCounts`, it counts what happened to responses that are still open. The embedded engine counts
    its prompt tokens; all else happens to servers only.
    """

    num_retries: int = 0  # calls to servers that were repeated
    num_maybe_sampled_twice: int = 0  # responses asked for again that a server may have sampled before
    num_timed_out: int = 0  # responses given up at one server, since they took too long
    num_unanswered: int = 0  # requests dropped: no answer came in time, or within the attempts
    num_refused_answers: int = 0  # requests dropped: an answer came that is not one
    num_requeued: int = 0  # times that a request was sent to another server, since one had failed
    num_retractions: int = 0  # times that a server dropped a request's cache and computed it again
    num_without_routes: int = 0  # answers whose routes were asked for and cannot be used
    num_prompt_tokens: int = 0  # of the answers that were kept, what was sampled before included
    num_cached_tokens: int = 0  # of them, those that the server did not compute again

    def __add__(self, other: "EngineCounts") -> "EngineCounts":
        return EngineCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "EngineCounts") -> "EngineCounts":
        return EngineCounts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def metrics(self) -> dict[str, float]:
        """Return each count as an `engine/...` metric. Call it on totals."""
        return {f"engine/{name.removeprefix('num_')}": float(value) for name, value in asdict(self).items()}
