"""Measures staleness: weight versions between sampling a token and training on it."""

from collections.abc import Iterable, Sequence

from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.types import Sample, TrainBatch


def add_staleness(metrics: Metrics, steps: Sequence[TrainBatch], weight_version: int) -> None:
    """Add `rollout/staleness_mean` and `_max`: versions between a token's weights and the current ones.

    The mean is over tokens with a known weight version. Without such a token, nothing is added. Epochs, and
    ranks that hold the same tokens, repeat every token equally often, so the mean does not change.

    Args:
        metrics: Metrics to add to.
        steps: This rank's gradient steps on the rollout.
        weight_version: Version of the trainer's weights before these steps.
    """
    for step in steps:
        for microbatch in step.microbatches:
            if microbatch.weight_versions is None:
                continue
            versions = microbatch.weight_versions[microbatch.weight_versions >= 0]
            if versions.numel():
                ages = weight_version - versions.long()
                metrics.add_mean("rollout/staleness_mean", float(ages.sum()), ages.numel())
                metrics.add_max("rollout/staleness_max", int(ages.max()))


def add_ages(metrics: Metrics, samples: Iterable[Sample], weight_version: int, max_staleness: int) -> None:
    """Add `staleness/<n>`: the share of samples whose oldest token was sampled n versions ago.

    Args:
        metrics: Metrics to add to.
        samples: This rank's samples, before training on them.
        weight_version: Version of the trainer's weights.
        max_staleness: Largest n.
    """
    for sample in samples:
        oldest = min((span.version for span in sample.weight_versions), default=weight_version)
        for age in range(max_staleness + 1):
            metrics.add_mean(f"staleness/{age}", weight_version - oldest == age, 1)
