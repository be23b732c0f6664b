"""Differences between the tested versions of Megatron-Core, and bug fixes.

The bugs also occur on GPUs without Transformer Engine and apex. Each fix names its bug, applies only to the
versions that have it, and does nothing when called again.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megatron.core
import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
import megatron.core.optimizer.optimizer as optimizers
import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.moe.router as router
import megatron.core.transformer.multi_latent_attention as multi_latent_attention
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from packaging.version import Version
from torch.distributed.checkpoint.metadata import TensorProperties

from megatron_dppo.errors import CheckpointError, ConfigError, Problem
from megatron_dppo.mcore import layer_functions, training_states
from megatron_dppo.runtime.libraries import TESTED

# A module that its package hides behind the function of the same name.
_finalize: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")


def apply() -> None:
    """Apply every fix that the installed version needs."""
    version, tested = Version(megatron.core.__version__), TESTED["megatron-core"]
    if version.public not in tested:
        raise ConfigError(
            Problem(
                "megatron-core",
                f"version {version}",
                " or ".join(tested),
                "Install a version that the tests ran with: pip install megatron-core==0.16.1, or "
                "megatron-core==0.19.2 with Python 3.12 or newer.",
            )
        )
    _define_missing_te_gemm()
    _forget_missing_te_linear()
    _leave_expert_biases()
    _find_groups_of_other_rates()
    forget_stored_strides()
    layer_functions.install()
    training_states.install()
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        _restore_adam_step()


def _define_missing_te_gemm() -> None:
    """The router's float32 gating reads `te_general_gemm`, a NameError without Transformer Engine."""
    if not hasattr(moe_utils, "te_general_gemm"):
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010 - a name the module itself forgot


def _forget_missing_te_linear() -> None:
    """Latent attention takes its wrapper's import for Transformer Engine: `isinstance` of a mock raises."""
    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        setattr(multi_latent_attention, "HAVE_TE", False)  # noqa: B010 - a constant of the module


def _leave_expert_biases() -> None:
    """Leave the count of experts' tokens, and the move of expert biases, to `actor/router_losses.py`.

    Megatron counts in a function that is compiled, which ends a run without a C++ compiler. It counts padding,
    and moves biases in steps that are skipped later.
    """
    setattr(router.TopKRouter, "_apply_expert_bias", lambda *_, **__: None)  # noqa: B010 - a method of Megatron's
    _finalize._update_router_expert_bias = lambda *_, **__: None


def release_last_microbatch(chunks: Sequence[torch.nn.Module]) -> None:
    """Drop the tensors that token dispatchers keep of the last forward pass: probabilities, with their graph.

    That graph holds the gradient hooks of data parallelism, which hold the model. Python cannot see through
    it: models, and process groups with their threads, would stay until the process ends.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        dispatcher: Any = getattr(module, "token_dispatcher", None)
        for holder in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if torch.is_tensor(value) and value.requires_grad:
                    setattr(holder, name, None)


def _find_groups_of_other_rates() -> None:
    """Find a checkpoint's parameter groups without learning rates: 0.19.2 raises KeyError if these differ.

    All groups here have one rate, which `build_schedule` sets after loading.
    """
    keys = tuple(key for key in optimizers.param_group_identifier_keys if key not in ("max_lr", "min_lr"))
    for module in (optimizers, distrib_optimizer):
        setattr(module, "param_group_identifier_keys", keys)  # noqa: B010 - a constant of the modules


def forget_stored_strides() -> None:
    """Let Megatron read the list of tensors in a checkpoint of torch 2.15; their strides raise a TypeError.

    Megatron passes all stored properties of a tensor to `torch.empty`. Without strides, torch reads such a
    checkpoint like one of torch 2.14.
    """
    set_state: Any = TensorProperties.__setstate__
    if len(TensorProperties().__getstate__()) == 5 or getattr(set_state, "is_megatron_dppo_fix", False):
        return

    def set_all_but_strides(self: Any, state: tuple[Any, ...]) -> None:
        set_state(self, state[:5])
        vars(self).pop("strides", None)

    set_all_but_strides.is_megatron_dppo_fix = True  # type: ignore[attr-defined]
    setattr(TensorProperties, "__setstate__", set_all_but_strides)  # noqa: B010 - a method of torch's


def detach_shards(optimizer: Any) -> None:
    """Detach the float32 shards of Megatron's distributed optimizer from autograd's graph.

    Megatron creates them as views of parameters with a graph. The graph keeps the hooks of data parallelism
    alive, and the hooks the model, until the process ends. (In torch 2.15, views that were created without a
    graph get no gradients.)

    Args:
        optimizer: Result of `get_megatron_optimizer`, before its first step.
    """
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        detached: dict[int, torch.Tensor] = {}
        for shards in getattr(member, "shard_fp32_groups", ()):
            for index, shard in enumerate(shards):
                detached[id(shard)] = shard.detach()
                vars(detached[id(shard)]).update(vars(shard))
                shards[index] = detached[id(shard)]
        for group in member.optimizer.param_groups if detached else ():
            group["params"][:] = [detached.get(id(each), each) for each in group["params"]]


def _restore_adam_step() -> None:
    """Keep torch AdamW's per-parameter `step` across a checkpoint of the distributed optimizer.

    Loading forgets it (KeyError 'step'), and `load_state_dict` gives all parameters one and the same step
    tensor, which AdamW then advances once per parameter: the resumed run is silently wrong.
    """
    optimizer: Any = distrib_optimizer.DistributedOptimizer
    if getattr(optimizer.load_state_dict, "is_megatron_dppo_fix", False):
        return
    set_states, load_state_dict = optimizer._set_main_param_and_optimizer_states, optimizer.load_state_dict

    def set_states_with_step(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        set_states(self, model_param, tensors)

    def load_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    load_with_own_steps.is_megatron_dppo_fix = True  # type: ignore[attr-defined]
    optimizer._set_main_param_and_optimizer_states = set_states_with_step
    optimizer.load_state_dict = load_with_own_steps


def prime_adam_states(optimizer: Any) -> None:
    """Allocate AdamW's states with zeros, as its first step would: Megatron saves and loads none without.

    Args:
        optimizer: Result of `get_megatron_optimizer` (one optimizer, or a chain of them).
    """
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = member.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter].update(
                        step=torch.tensor(0.0),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )


def plan_save(state: dict[str, Any], folder: Path) -> Any:
    """Return Megatron's request of a distributed save, which the caller then writes and finalizes.

    Newer versions plan it with `nvidia-resiliency-ext`, unless Megatron's own writer is selected.
    """
    # Their planner needs nvidia-resiliency-ext 0.6.0, which is not on PyPI, and their queue a GPU.
    parameters = inspect.signature(dist_checkpointing.save).parameters
    own_writer: dict[str, Any] = {"async_strategy": "mcore"} if "async_strategy" in parameters else {}
    return dist_checkpointing.save(state, str(folder), async_sharded_save=True, **own_writer)


def refuse_newer(folder: Path) -> None:
    """Refuse a distributed checkpoint that only a newer Megatron-Core reads; this one would fail obscurely."""
    fields = [field.name for field in dataclasses.fields(CheckpointingConfig)]
    if "common_backend" in fields and not (folder / "common.pt").exists():
        raise CheckpointError(
            f"{folder} was written by a newer Megatron-Core than this one, {megatron.core.__version__}. "
            "Use that one, or convert the checkpoint there: megatron-dppo convert to-hf."
        )
