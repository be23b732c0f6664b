"""Replaces functions that differ between CPU and GPU, or that a trace cannot run; memory stays the same.

Nothing is restored, because each trace runs in a new process.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
import torch.optim.adam as adam
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from megatron_dppo.actor import actor as actor_module
from megatron_dppo.actor import forward, offload
from megatron_dppo.mcore import cpu
from megatron_dppo.trace.ledger import Ledger
from megatron_dppo.trace.tensors import is_on_device, on_device


def install(ledger: Ledger) -> None:
    """Replace functions of PyTorch, Megatron and the actor, for the rest of this process."""
    cpu.install()
    _replace_operators()
    _replace_reads(ledger)
    _replace_dispatch(ledger)
    _replace_memory(ledger)
    actor: Any = actor_module
    actor.load_weights = lambda *_: None
    to_device: Any = forward._move
    forwarding: Any = forward
    forwarding._move = lambda value, device: _marked(to_device(value, device))
    attention_form = forward.attention_form
    forwarding.attention_form = lambda _, *model: attention_form("cuda", *model)


def _replace_operators() -> None:
    module: Any = torch.nn.Module
    module._apply = lambda self, *_, **__: self  # all parameters have their dtype and device from the start
    norm: Any = torch.nn.RMSNorm
    norm.forward = lambda self, x: _FusedNorm.apply(x, self.weight)
    functional: Any = F
    functional.scaled_dot_product_attention = _attention
    optimizer: Any = adam
    optimizer._default_to_fused_or_foreach = lambda *_, **__: (False, True)  # as for parameters on a GPU


class _FusedNorm(torch.autograd.Function):
    """A GPU's fused RMSNorm; the CPU's RMSNorm keeps float32 copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
    return _FlashAttention.apply(query, key, value, attn_mask)


class _FlashAttention(torch.autograd.Function):
    """Keep flash attention's saved tensors: inputs, result [B, L, heads, D] and one float32 per result row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, length, width = query.shape
        result = query.new_empty(batch, length, heads, width).transpose(1, 2)
        statistics = query.new_empty(batch, heads, length, dtype=torch.float32)
        bias = None if mask is None else query.new_empty(mask.shape)
        ctx.save_for_backward(query, key, value, result, statistics, bias)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _replace_reads(ledger: Ledger) -> None:
    """Count tensor reads from Python without an operator, which copy nothing on a CPU."""
    tensor_class: Any = torch.Tensor
    for name in ("tolist", "numpy", "cpu"):
        setattr(tensor_class, name, _counted(ledger, name, getattr(torch.Tensor, name)))
    library: Any = torch
    make = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Make a tensor from numbers and fake tensors, and count a read for each fake tensor, as on a GPU."""
        kwargs.pop("device", None)
        return make(tree_map(lambda x: x.item() if isinstance(x, FakeTensor) else x, data), *args, **kwargs)

    library.tensor = cast(Any, cpu._torch_on_cpu()).tensor = tensor


def _counted(ledger: Ledger, name: str, read: Callable[..., Any]) -> Callable[..., Any]:
    def counted(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_on_device(self):
            return read(self, *args, **kwargs)
        ledger.wait(name)
        with _disable_current_modes():
            copy = _on_host(self)
        return copy if name == "cpu" else read(copy, *args, **kwargs)

    return counted


def _on_host(tensor: Tensor) -> Tensor:
    """Return a real copy without the device mark."""
    return torch.ones(tensor.shape, dtype=tensor.dtype) if isinstance(tensor, FakeTensor) else tensor.clone()


def _replace_dispatch(ledger: Ledger) -> None:
    """Copy the sizes of the experts' inputs as on a GPU: in a side stream, with one wait for all of them."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if not is_on_device(tensor):
            return tensor
        with _disable_current_modes():
            copy = _on_host(tensor)
        return copy.numpy() if as_numpy else copy

    for module in (token_dispatcher, moe_utils):
        dispatching: Any = module
        dispatching.maybe_move_tensor_to_cpu = to_host
    stream: Any = cpu._Stream
    stream.synchronize = lambda *_: ledger.wait("synchronize")


def _replace_memory(ledger: Ledger) -> None:
    """Free the memory of tensors that move to the host, without allocating it on the host."""
    residence: Any = offload.Residence

    def leave(self: Any, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        for storage in offload._storages([*kept, *dropped]):
            self._away[storage._cdata] = (storage, storage.nbytes(), True)
            storage.resize_(0)
            ledger.resized(storage)

    def come_back(self: Any) -> None:
        for storage, num_bytes, _ in self._away.values():
            storage.resize_(num_bytes)
            ledger.resized(storage)
        self._away.clear()

    residence.leave, residence.come_back = leave, come_back


def _marked(value: Any) -> Any:
    """Return a host tensor as a device tensor, and any other object unchanged."""
    if not isinstance(value, Tensor) or is_on_device(value):
        return value
    return torch.empty_like(value) if value.is_floating_point() else on_device(value.clone())
