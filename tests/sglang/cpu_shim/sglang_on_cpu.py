"""Patches that an unpatched SGLang needs without a GPU; a .pth file of its venv imports this at start-up.

Nothing happens until a module named below is imported, and nothing at all is changed where torch sees a GPU.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_kept: list[Any] = []  # torch forgets a library's schemas with the library


def _declare_vision_ops() -> None:
    """Torchvision looks for two compiled operators, which do not load next to a CPU build of torch.

    Their schemas suffice: nothing calls them.
    """
    import torch

    if torch.cuda.is_available():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def _keep_inputs_in_float32() -> None:
    """The convolution's inputs are kept in bfloat16 unless this is set, whatever the model's dtype is."""
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")


def _name_operators() -> None:
    """Qwen3.5's modules name operators of the compiled kernels when they are imported."""
    import torch

    if not torch.cuda.is_available():
        importlib.import_module("sgl_kernel.mamba")


def _leave_buffers_unpinned(module: ModuleType) -> None:
    """The buffer of captured routes is allocated in pinned memory, which torch refuses without a GPU."""
    import torch

    if torch.cuda.is_available():
        return

    class Unpinned(ModuleType):
        """torch, as this one module sees it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def zeros(*size: Any, pin_memory: bool = False, **options: Any) -> Any:
            return torch.zeros(*size, **options)

    module.torch = Unpinned("torch")  # type: ignore[attr-defined]


def _register_nothing(module: ModuleType) -> None:
    """The same buffer is registered with CUDA's runtime."""
    import torch

    if not torch.cuda.is_available():
        module._cuda_host_register = lambda *_, **__: None  # type: ignore[attr-defined]


def _prefill_from_latents(module: ModuleType) -> None:
    """Prefill of latent attention would take keys and values from a cache that holds latents.

    Its absorbed form takes latents, and is what decoding computes.
    """
    import torch

    if not torch.cuda.is_available():
        method = module.AttnForwardMethod.MLA
        module.AttentionBackendRegistry.register("torch_native", lambda attention, batch: method)


def _rotate_without_yarn(module: ModuleType) -> None:
    """Latent attention's rotary table is made for CPUs where frequencies are YaRN's, and refused otherwise."""
    import torch

    if torch.cuda.is_available():
        return
    with_yarn = module.get_rope_cpu

    def get_rope_cpu(*arguments: Any) -> Any:
        *sizes, scaling, dtype, partial, _ = arguments  # as get_rope_wrapper passes them
        if scaling is not None and scaling["rope_type"] != "default":
            return with_yarn(*arguments)
        return module.get_rope(*sizes, None, dtype, partial)

    module.get_rope_cpu = get_rope_cpu  # type: ignore[attr-defined]


def _weigh_without_triton(module: ModuleType) -> None:
    """What Qwen2-MoE's shared expert gives is weighed and added by a Triton kernel on every device but AMX."""
    import torch

    if torch.cuda.is_available():
        return

    def add_weighed(hidden: Any, gate: Any, shared: Any, routed: Any) -> None:
        routed.add_(torch.sigmoid(hidden @ gate)[:, None] * shared)

    module.fused_gate_sigmoid_mul_add = add_weighed  # type: ignore[attr-defined]


def _normalise_without_triton(module: ModuleType) -> None:
    """MiniMax-M2's norms over all heads are two Triton kernels on every device but AMX."""
    import torch

    if torch.cuda.is_available():
        return

    def sums_of_squares(queries: Any, keys: Any) -> Any:
        return torch.stack([heads.float().square().sum(-1) for heads in (queries, keys)])

    def apply(*given: Any) -> tuple[Any, ...]:
        queries, keys, of_queries, of_keys, sums, num_ranks, eps = given
        pairs = ((queries, of_queries), (keys, of_keys))
        scales = (
            torch.rsqrt(sums[n] / heads.shape[-1] / num_ranks + eps) for n, (heads, _) in enumerate(pairs)
        )
        return tuple(
            (heads.float() * scale[:, None] * weight.float()).to(heads.dtype)
            for (heads, weight), scale in zip(pairs, scales, strict=True)
        )

    module.rms_sumsq_serial = sums_of_squares  # type: ignore[attr-defined]
    module.rms_apply_serial = apply  # type: ignore[attr-defined]


def _gate_without_triton(module: ModuleType) -> None:
    """The gated norm of linear attention is a Triton kernel on every device but AMX."""
    import torch

    if torch.cuda.is_available():
        return

    def norm_and_gate(norm: Any, x: Any, gate: Any, *_: Any, **__: Any) -> Any:
        assert norm.activation in ("silu", "swish")
        normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=norm.eps).to(x.dtype)
        return (norm.weight * normed * torch.nn.functional.silu(gate.float()).view(x.shape)).to(x.dtype)

    for name in ("FusedRMSNormGated", "RMSNorm"):  # of the two modules
        if hasattr(module, name):
            getattr(module, name).forward = norm_and_gate


def _allow_determinism(module: ModuleType) -> None:
    """Deterministic inference is refused without kernels of a GPU; here it only seeds the sampling."""
    import torch

    if not torch.cuda.is_available():
        module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")  # type: ignore[attr-defined]


def _leave_kernels(module: ModuleType) -> None:
    """Kernels whose sums do not depend on the batch are written for GPUs."""
    import torch

    if not torch.cuda.is_available():
        module.enable_batch_invariant_mode = lambda *_, **__: None  # type: ignore[attr-defined]


def _hash_with_torch(module: ModuleType) -> None:
    """The hash that seeds the sampling is a compiled kernel on a CPU too."""
    import torch

    if torch.cuda.is_available():
        return
    ones = 0xFFFFFFFF

    def mixed(hashed: Any, block: Any) -> Any:
        block = (block * 0xCC9E2D51) & ones
        block = (((block << 15) | (block >> 17)) & ones) * 0x1B873593 & ones
        hashed = hashed ^ block
        hashed = ((hashed << 13) | (hashed >> 19)) & ones
        return (hashed * 5 + 0xE6546B64) & ones

    def murmur_hash32(seed: Any, positions: Any, columns: Any) -> Any:
        seed = seed.view(torch.int64)[:, None]
        hashed = mixed(mixed(torch.zeros_like(seed), seed & ones), (seed >> 32) & ones)
        hashed = mixed(mixed(hashed, positions.long()[:, None] & ones), columns.long()[None, :]) ^ 16
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            hashed = ((hashed ^ (hashed >> shift)) * factor) & ones
        return hashed

    module.murmur_hash32 = murmur_hash32  # type: ignore[attr-defined]


def _multiply_dequantized(module: ModuleType) -> None:
    """Linears of 8-bit floats with block scales multiply by kernels of a GPU; here by dequantised weights.

    Inputs are not rounded to 8 bits, and float32 is allowed. The code that runs on a GPU creates, loads and
    processes the weights.
    """
    import torch

    if torch.cuda.is_available():
        return
    from types import SimpleNamespace

    def linear(*, input: Any, weight: Any, block_size: Any, weight_scale: Any, bias: Any, **_: Any) -> Any:
        return torch.nn.functional.linear(input, plain(weight, weight_scale, block_size, input.dtype), bias)

    def plain(weight: Any, scale: Any, blocks: Any, dtype: Any) -> Any:
        from sglang.srt.layers.quantization import fp8_utils  # type: ignore[import-not-found]

        return fp8_utils.block_quant_dequant(weight, scale, blocks, dtype)

    def apply_experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
        from sglang.srt.layers.moe import (  # type: ignore[import-not-found]
            fused_moe_native,
            token_dispatcher,
        )

        hidden, blocks = dispatch_output.hidden_states, method.weight_block_size
        experts = SimpleNamespace(
            num_experts=layer.num_experts,
            w13_weight=plain(layer.w13_weight, layer.w13_weight_scale_inv, blocks, hidden.dtype),
            w2_weight=plain(layer.w2_weight, layer.w2_weight_scale_inv, blocks, hidden.dtype),
        )
        output = fused_moe_native.moe_forward_native(
            experts, hidden, dispatch_output.topk_output, method.moe_runner_config
        )
        return token_dispatcher.StandardCombineInput(hidden_states=output)

    module._is_cpu = False  # type: ignore[attr-defined]
    module.dispatch_w8a8_block_fp8_linear = lambda **_: linear  # type: ignore[attr-defined]
    module.Fp8MoEMethod.apply = apply_experts
    of_gpu = module.Fp8Config.get_supported_act_dtypes()
    module.Fp8Config.get_supported_act_dtypes = classmethod(lambda _: [*of_gpu, torch.float32])


_BEFORE: dict[str, Callable[[], None]] = {
    "torchvision": _declare_vision_ops,
    "sglang.srt.configs.mamba_utils": _keep_inputs_in_float32,
    "sglang.srt.models.qwen3_5": _name_operators,
}
_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.state_capturer.base": _leave_buffers_unpinned,
    "sglang.srt.mem_cache.pool_host.common": _register_nothing,
    "sglang.srt.models.deepseek_common.attention_backend_handler": _prefill_from_latents,
    "sglang.srt.layers.rotary_embedding.factory": _rotate_without_yarn,
    "sglang.srt.models.qwen2_moe": _weigh_without_triton,
    "sglang.srt.models.minimax_m2": _normalise_without_triton,
    "sglang.kernels.ops.attention.fla.fused_norm_gate": _gate_without_triton,
    "sglang.kernels.ops.attention.fla.layernorm_gated": _gate_without_triton,
    "sglang.srt.arg_groups.choices": _allow_determinism,
    "sglang.srt.batch_invariant_ops": _leave_kernels,
    "sglang.kernels.ops.sampling.murmur_hash": _hash_with_torch,
    "sglang.srt.layers.quantization.fp8": _multiply_dequantized,
}


class _Hook(importlib.abc.MetaPathFinder):
    """Runs each entry of the two tables once, around the first import of the entry's module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if before := _BEFORE.pop(fullname, None):
            before()
        after = _AFTER.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if after else None
        if after is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            after(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Hook())
