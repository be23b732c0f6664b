"""Reads Megatron folders: a distributed checkpoint (`megatron/`), config and tokenizer (`hf/`).

Any layout can load the weights. `require_reshardable` refuses what another layout cannot load besides.
"""

import errno
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.sizes import HFConfig
from megatron_dppo.architectures.weight_map import is_adapter
from megatron_dppo.checkpoints.checkpoint_folder import WEIGHTS, is_megatron_checkpoint
from megatron_dppo.checkpoints.convert.stored_tensors import StoredTensors
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.checkpoints.megatron_weights import load_hf_weights
from megatron_dppo.checkpoints.untrusted import refuse_code
from megatron_dppo.config.schema import LoraConfig
from megatron_dppo.errors import CheckpointError
from megatron_dppo.mcore.fixes import refuse_newer
from megatron_dppo.runtime.files import ABSENT, unreadable

logger = logging.getLogger(__name__)
HF = "hf"
# Errors that torch and Megatron raise on a torn file, or on missing or misshapen tensors.
_LOAD_ERRORS = (
    *(CheckpointingException, CheckpointException, UnpicklingError),
    *(OSError, RuntimeError, ValueError, KeyError, EOFError),
)


def hf_files(folder: Path) -> Path:
    """Return the folder of config.json and the tokenizer of a model folder of either kind."""
    return folder / HF if is_megatron_checkpoint(folder) else folder


def load_weights(chunks: Sequence[GPTModel], folder: Path, hf: HFConfig) -> None:
    """Load `model.load` into this rank's parameters, from a Hugging Face folder or a Megatron checkpoint."""
    if not is_megatron_checkpoint(folder):
        load_hf_weights(chunks, HFWeights(folder), hf)
        return
    has_adapters = any(is_adapter(name) for chunk in chunks for name, _ in chunk.named_parameters())
    if not has_adapters and stored_lora(folder) is not None:
        raise CheckpointError(
            f"{folder} holds LoRA adapters in addition to weights; expected only weights. Merge them "
            "with megatron-dppo convert to-hf and load the result, or resume the run that wrote it."
        )
    load_model_states(chunks, load_sharded(model_states(chunks), folder / WEIGHTS))


def model_states(chunks: Sequence[GPTModel], metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the sharded state of this rank's part of the model; every layout can load its stored form."""
    return {_key(i): chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2].startswith("_extra_state")


@torch.no_grad()
def load_model_states(chunks: Sequence[GPTModel], states: dict[str, Any]) -> None:
    """Load the chunks from what `load_sharded` returned for their `model_states`."""
    for index, chunk in enumerate(chunks):
        missing, unexpected = chunk.load_state_dict(states[_key(index)], strict=False)
        odd = [name for name in (*missing, *unexpected) if not _is_extra_state(name)]
        assert not odd, f"states of another model: {odd[:3]}"


def _key(chunk: int) -> str:
    return "model" if chunk == 0 else f"model{chunk}"


def load_sharded(wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run Megatron's distributed load, and raise its many errors as CheckpointError.

    Each `_extra_state` is left out. Transformer Engine's modules keep fp8 scales there, as pickles that they
    would load. No supported model has fp8 scales, and the checkpoint may come from modules without
    `_extra_state`.
    """
    refuse_code(folder)
    refuse_newer(folder)
    wanted = {
        key: {name: state for name, state in part.items() if not _is_extra_state(str(name))}
        if isinstance(part, dict)
        else part
        for key, part in wanted.items()
    }
    try:
        loaded: Any = dist_checkpointing.load(wanted, str(folder))
        return loaded
    except _LOAD_ERRORS as error:
        if (of_system := _error_of_system(error)) is not None:
            raise unreadable(folder, of_system) from error
        reason = str(error).splitlines()[0][:400] if str(error) else repr(error)
        raise CheckpointError(
            f"{folder} cannot be loaded: {reason}. It is torn, or of another model or optimizer; "
            "name another checkpoint, or make it again."
        ) from error


def _error_of_system(error: BaseException | None) -> OSError | None:
    """Return the error of the disk behind a library's error; None if there is none, or a file is absent.

    torch passes the errors of ranks on as text.
    """
    if error is None or isinstance(error, ABSENT):
        return None
    if isinstance(error, OSError):
        return error
    if (told := re.search(r"\[Errno (\d+)\]", str(error))) is not None:
        number = int(told[1])
        return None if number in (errno.ENOENT, errno.ENOTDIR) else OSError(number, os.strerror(number))
    return _error_of_system(error.__cause__ or error.__context__)


def stored_lora(folder: Path) -> LoraConfig | None:
    """Return the `[lora]` that a Megatron checkpoint was trained with; None if it has no adapters."""
    stored = StoredTensors(folder / WEIGHTS)
    shapes = {k: v for k, v in stored.shapes.items() if is_adapter(k) and not k.startswith("optimizer.")}
    if not shapes:
        return None
    one = next(key for key in shapes if key.endswith(".alpha"))
    alpha = stored.region(one, (0,) * len(shapes[one]), shapes[one])
    factors = {key: shape for key, shape in shapes.items() if key.endswith(".lora_A")}
    ranks, found = {shape[-2] for shape in factors.values()}, {key.split(".")[-2] for key in factors}
    assert len(ranks) == 1, "all adapters of a run have one rank"
    targets = tuple(name for name in LoraConfig().targets if name in found)
    return LoraConfig(rank=ranks.pop(), alpha=int(alpha.flatten()[0]), targets=targets)


def is_resharded(content: dict[str, Any], layout: Layout) -> bool:
    """Whether a checkpoint with this state.json was saved on another layout."""
    return content["layout"] != asdict(layout)


def require_reshardable(
    checkpoint: Path, content: dict[str, Any], layout: Layout, *, is_optimizer_distributed: bool
) -> None:
    """Refuse a checkpoint that cannot be moved from the layout in its state.json to this one."""
    saved = Layout(**content["layout"])
    found = f"{checkpoint} was saved on {saved}; this run has {layout}"
    weights_alone = f"or train from its weights only: model.load = {str(checkpoint)!r}."
    if content["open_rollout"] is not None:
        raise CheckpointError(
            f"{found}, and it is in the middle of a rollout with batches for the saved layout. Start with "
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
            **_drop_sharded(common),
        }
    return {index: {**state[index], **_drop_sharded(common)} for index in range(num_members)}


def _drop_sharded(common: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in common.items() if key != "param_state"}
