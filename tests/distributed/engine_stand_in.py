"""Plain PyTorch under the names of Transformer Engine's modules, which do not import without CUDA.

Contains only what Megatron builds for our models: the names, shapes and order of parameters, the
`_extra_state`, and the arithmetic, on tensors that are not split. It does not show how the real one computes.
"""

import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _Module(torch.nn.Module):
    """With the state that fp8 would fill."""

    bias: Tensor | None
    fp8 = fp8_calibration = False

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}

    def init_fp8_metadata(self, num_gemms: int) -> None: ...

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None: ...


def _weight(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape, torch.nan, dtype=dtype))


def _split_weight(*shape: int, dtype: torch.dtype, parallel_mode: str | None) -> torch.nn.Parameter:
    """Of a linear: marked as split, whether it is or not."""
    weight: Any = _weight(*shape, dtype=dtype)
    weight.tensor_model_parallel, weight.partition_stride = True, 1
    weight.partition_dim = 1 if parallel_mode == "row" else 0
    return weight


class Linear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        params_dtype: Any,
        parallel_mode: str | None,
        **_: Any,
    ) -> None:
        super().__init__()
        shape = out_features, in_features
        self.weight = _split_weight(*shape, dtype=params_dtype, parallel_mode=parallel_mode)
        self.register_parameter("bias", _weight(out_features, dtype=params_dtype) if bias else None)

    def forward(self, hidden: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


class LayerNormLinear(_Module):
    def __init__(
        self, in_features: int, out_features: int, bias: bool, params_dtype: Any, eps: float, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.layer_norm_weight = _weight(in_features, dtype=params_dtype)
        shape = out_features, in_features
        self.weight = _split_weight(*shape, dtype=params_dtype, parallel_mode="column")
        bias_shape = {"dtype": params_dtype, "parallel_mode": "column"}
        self.register_parameter("bias", _split_weight(out_features, **bias_shape) if bias else None)

    def forward(self, hidden: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        normed = F.rms_norm(hidden, hidden.shape[-1:], self.layer_norm_weight, self.eps)
        return F.linear(normed, self.weight, self.bias)


class GroupedLinear(_Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool,
        params_dtype: Any,
        parallel_mode: str | None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert not bias
        self.num_gemms, self.use_bias = num_gemms, bias
        for index in range(num_gemms):
            weight = _split_weight(out_features, in_features, dtype=params_dtype, parallel_mode=parallel_mode)
            self.register_parameter(f"weight{index}", weight)

    def forward(self, rows: Tensor, splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        parts = rows.split(splits)
        return torch.cat([F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)])


class RMSNorm(_Module):
    def __init__(self, hidden_size: int, eps: float, params_dtype: Any, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _weight(hidden_size, dtype=params_dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], self.weight, self.eps)


class DotProductAttention(_Module):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: None, cu_seqlens_q: Tensor, **_: Any
    ) -> Tensor:
        from megatron_dppo.models.packed_attention import PaddedBatches, Spans

        return PaddedBatches.of(Spans.of_sequences(cu_seqlens_q)).attend(query, key, value, None).flatten(1)


def install() -> None:
    """Have Megatron import this as Transformer Engine; after `runtime.start`, before Megatron is imported."""
    assert "megatron" not in sys.modules
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]

    def module(name: str, **content: Any) -> ModuleType:
        made = sys.modules[name] = ModuleType(name)
        made.__path__ = []  # a package: what Megatron looks for in it besides raises ModuleNotFoundError
        for key, value in content.items():
            setattr(made, key, value)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, made)
        return made

    def named(*names: str) -> dict[str, Any]:
        return {name: type(name, (), {}) for name in names}

    module("transformer_engine", __version__="2.9.0")
    module("transformer_engine.common")
    module("transformer_engine.common.recipe", **named("DelayedScaling"))
    modules = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, DotProductAttention)
    module("transformer_engine.pytorch", **{each.__name__: each for each in modules})
    operations = named("Sequential", "FusibleOperation", "SwiGLU")  # built or annotated with, and never called
    module("transformer_engine.pytorch.ops", **operations)
    module("transformer_engine.pytorch.fp8", **named("FP8GlobalStateManager", "fp8_autocast"))
    functions = ("CudaRNGStatesTracker", "checkpoint", "activation_recompute_forward")
    module("transformer_engine.pytorch.distributed", **named(*functions))
    router = named(
        "fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss"
    )
    module("transformer_engine.pytorch.router", **router)
    module("transformer_engine.pytorch.tensor", **named("QuantizedTensor"))
