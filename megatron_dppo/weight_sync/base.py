"""How trained weights reach the rollout engine."""

from typing import Protocol


class WeightSync(Protocol):
    """Pushes the actor's weights, in Hugging Face names, to wherever samples come from.

    Every rank calls `push` together. Between its begin and its end no sample may be drawn.
    """

    def push(self, version: int) -> str:
        """Send all weights, each tensor exactly once, and return their checksum.

        Args:
            version: What samples drawn with these weights will report.

        Raises:
            WeightSyncError: A tensor is missing or came twice, or the receiver's checksum differs.
        """
        ...
