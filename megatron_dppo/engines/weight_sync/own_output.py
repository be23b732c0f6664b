"""Sends the embedding of a tied model under the name of the output layer too, for servers that build both."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from megatron_dppo.architectures.weight_map import EMBEDDING, OUTPUT
from megatron_dppo.engines.weight_sync.base import WeightOwner

(_EMBEDDING,), (_OUTPUT,) = EMBEDDING.hf, OUTPUT.hf


class WithOwnOutput:
    """Weights of a tied model, with its output layer as an additional tensor; implements `base.WeightOwner`.

    SGLang builds an output layer for some architectures even if config.json ties it to the embedding
    (`SglangFacts.has_own_output`), and no checkpoint of such a model fills it.
    """

    def __init__(self, owner: WeightOwner) -> None:
        """Store the owner of weights without an output layer."""
        self._owner = owner

    def weights(
        self, *, of_own_stage: bool = False, max_bytes: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the owner's weights, and the embedding again as the output layer."""
        for name, tensor in self._owner.weights(of_own_stage=of_own_stage, max_bytes=max_bytes):
            yield name, tensor
            if name == _EMBEDDING:
                yield _OUTPUT, tensor

    def describe_weights(self, *, of_own_stage: bool = False) -> dict[str, Tensor]:
        """Return the tensors of `weights`, without data."""
        described: dict[str, Tensor] = {}
        for name, tensor in self._owner.describe_weights(of_own_stage=of_own_stage).items():
            described[name] = tensor
            if name == _EMBEDDING:
                described[_OUTPUT] = tensor
        return described

    @property
    def pipeline_place(self) -> tuple[int, int, bool]:
        """See `WeightOwner.pipeline_place`."""
        return self._owner.pipeline_place

    @property
    def log_probs(self) -> Callable[[Sequence[Tensor]], list[Tensor]] | None:
        """See `WeightOwner.log_probs`."""
        return self._owner.log_probs
