"""Loads a checkpoint of one layout on another: refuses the impossible, and adapts the optimizer's state."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.errors import CheckpointError

logger = logging.getLogger(__name__)


def is_resharded(content: dict[str, Any], layout: Layout) -> bool:
    """Whether a checkpoint with this state.json was saved on another layout."""
    return content["layout"] != asdict(layout)


def require_reshardable(
    checkpoint: Path, content: dict[str, Any], layout: Layout, *, is_optimizer_distributed: bool
) -> None:
    """Refuse a checkpoint that cannot be moved from the layout in its state.json to this one.

    Raises:
        CheckpointError: The checkpoint is in the middle of a rollout, or contains rollouts sampled ahead, with
            batches made for its layout. Or the optimizer states are not distributed, and Megatron stores them
            by their position on a rank.
    """
    saved = Layout(**content["layout"])
    found = f"{checkpoint} was saved on {saved}; this run has {layout}"
    weights_alone = f"or train from its weights only: model.load = {str(checkpoint)!r}."
    if content["open_rollout"] is not None:
        raise CheckpointError(
            f"{found}, and it stands in the middle of a rollout with batches for the saved layout. Start with "
            f"that layout until a rollout is finished and saved, name an earlier checkpoint in "
            f"{checkpoint.parent / 'latest'}, {weights_alone}"
        )
    if content.get("queue"):
        raise CheckpointError(
            f"{found}, and it holds {len(content['queue'])} rollouts sampled ahead (rollout.lag), with "
            f"batches for the saved layout. Start with that layout, {weights_alone}"
        )
    if not is_optimizer_distributed:
        raise CheckpointError(
            f"{found}, and optimizer.distributed = false stores moments by their place on a rank. Start with "
            f"that layout, {weights_alone}"
        )
    logger.info("%s: resharding from %s to %s", checkpoint, saved, layout)


def fit_to_chain(state: dict[Any, Any], num_members: int) -> dict[Any, Any]:
    """Convert the optimizer's loaded state to the structure of this run's optimizer.

    Megatron chains a second optimizer, for parameters that expert-parallel ranks do not share, after the first.
    A layout without expert parallelism has one optimizer for all parameters. Tensors are stored in the same
    form, but parameter groups are not.

    Args:
        state: Loaded state: common entries as in the checkpoint, tensors as this run requested them.
        num_members: Optimizers in this run's chain.
    """
    chained = [
        state[key] for key in sorted(k for k in state if isinstance(k, int)) if "optimizer" in state[key]
    ]
    saved = chained or [state]
    groups = [group for member in saved for group in member["optimizer"]["param_groups"]]
    either = [{**group, "is_expert_parallel": flag} for group in groups for flag in (False, True)]
    common = {key: value for key, value in saved[0].items() if not isinstance(key, int)}
    common["optimizer"] = {**common["optimizer"], "param_groups": either}
    if num_members == 1:
        return {
            **{key: value for key, value in state.items() if not isinstance(key, int)},
            **_unsharded(common),
        }
    return {index: {**state[index], **_unsharded(common)} for index in range(num_members)}


def _unsharded(common: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in common.items() if key != "param_state"}
