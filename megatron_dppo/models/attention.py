"""Core attention of the torch layer spec over packed sequences, on one rank or on several, and their packing.

The packing of a micro-batch is computed once, on the host, for all layers.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.attention
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_dppo.models.delta_rule import Chunks
from megatron_dppo.models.packed_attention import PaddedBatches, Spans, VarlenSequences
from megatron_dppo.runtime.process import compute_capability
from megatron_dppo.types import Microbatch

PackedAttentionForm = type[PaddedBatches] | type[VarlenSequences]


def head_dim_of(config: TransformerConfig) -> int:
    """Return the size of a head, the larger one if keys and values differ in size."""
    if isinstance(config, MLATransformerConfig):
        return max(config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim)
    assert config.kv_channels is not None, "the model's family sets it"
    return config.kv_channels


def attention_form(device_type: str, dtype: torch.dtype, head_dim: int) -> PackedAttentionForm:
    """Select the form of attention over packed sequences: flash attention if PyTorch supports it.

    Flash attention takes half-precision tensors on a GPU, and heads of up to 256 elements in steps of 8. All
    other cases, including float32 on a GPU, are computed in padded batches.
    """
    is_half = dtype in (torch.float16, torch.bfloat16)
    has_flash = device_type == "cuda" and is_half and head_dim % 8 == 0 and head_dim <= 256
    return VarlenSequences if has_flash else PaddedBatches


def choose_flash_attention(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, has_sinks: bool = False
) -> str:
    """Select the kernels of PyTorch's flash attention for this process; return their name, with the reason.

    They are FlashAttention-3's on GPUs of compute capability 9.0, if its package is installed and gives right
    results. All others keep PyTorch's own kernels, FlashAttention-2.
    """
    if attention_form(device.type, dtype, head_dim) is PaddedBatches:
        return f"padded batches: {dtype} on {device.type}, heads of {head_dim}"
    major, minor = compute_capability(device)
    if major != 9:
        return f"FlashAttention-2: FlashAttention-3 needs compute capability 9.0, not {major}.{minor}"
    return activate_flash_attention_3(device, dtype, head_dim, has_sinks=has_sinks)


def activate_flash_attention_3(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, has_sinks: bool = False
) -> str:
    """Make PyTorch's flash attention call FlashAttention-3, unless it fails or its results are wrong."""
    own = torch.nn.attention
    if not all(hasattr(own, f"{verb}_flash_attention_impl") for verb in ("activate", "current", "restore")):
        return f"FlashAttention-2: torch {torch.__version__} cannot activate FlashAttention-3"
    try:
        own.activate_flash_attention_impl("FA3")
        is_exact = _is_exact(device, dtype, head_dim, has_sinks=has_sinks)
        fault = None if is_exact else "its results are wrong"
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        fault = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if fault is None:
        return "FlashAttention-3: its package is installed, and its results are right"
    if own.current_flash_attention_impl() is not None:
        own.restore_flash_attention_impl()
    return f"FlashAttention-2: FlashAttention-3 cannot be used: {fault}"


def _is_exact(device: torch.device, dtype: torch.dtype, head_dim: int, *, has_sinks: bool) -> bool:
    """Compare flash attention with plain attention in float32, gradients too, with fewer queries than keys.

    The comparison with sinks also has a window of 24 keys.
    """
    generator, queries, keys = torch.Generator(device).manual_seed(0), (0, 16, 56), (0, 40, 104)
    shapes = [(56, 4, head_dim), (104, 2, head_dim), (104, 2, head_dim), *[(4,)] * has_sinks, (56, 4, head_dim)]
    *inputs, weight = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    starts_q, starts_k = (torch.tensor(each, dtype=torch.int32, device=device) for each in (queries, keys))
    packed, window = [x.clone().requires_grad_() for x in inputs], 24 if has_sinks else None
    query, key, value, *sinks = packed
    output = VarlenSequences(starts_q, starts_k, 40, 64, None).attend(query, key, value, None, window, *sinks)
    found = [output, *torch.autograd.grad(output, packed, weight)]
    plain, parts = [x.float().requires_grad_() for x in inputs], list[Tensor]()
    for index in range(2):
        rows, columns = slice(*queries[index : index + 2]), slice(*keys[index : index + 2])
        q, k, v = (x[part].transpose(0, 1) for x, part in zip(plain[:3], (rows, columns, columns), strict=True))
        k, v = (x.repeat_interleave(2, dim=0) for x in (k, v))
        num_queries, num_keys = q.shape[1], k.shape[1]
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
        if window is not None:
            seen = seen.triu(num_keys - num_queries + 1 - window)
        scores = (q @ k.mT / head_dim**0.5).masked_fill(~seen, -torch.inf)
        if has_sinks:
            scores = torch.cat([scores, plain[3][:, None, None].expand(-1, num_queries, 1)], dim=-1)
        parts.append((scores.softmax(-1)[..., :num_keys] @ v).transpose(0, 1))
    expected = torch.cat(parts)
    exact = [expected, *torch.autograd.grad(expected, plain, weight.float())]
    return all(torch.allclose(x.float(), y, rtol=0.02, atol=0.03) for x, y in zip(found, exact, strict=True))


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Megatron's parameters of packed sequences, with positions and the index tensors of attention."""

    position_ids: Tensor  # [T'] int64, from 0 in each sequence, of this rank's tokens
    attention: PaddedBatches | VarlenSequences
    chunks: Chunks | None = None  # of linear attention
    rotary_table: Tensor | None = None  # of latent attention, computed by the first layer

    @classmethod
    def of(
        cls,
        microbatch: Microbatch,
        spans: Spans,
        longest: int,
        form: PackedAttentionForm,
        *,
        is_split: bool,
        chunks: Chunks | None = None,
    ) -> "PackedSequences":
        """Return the packing of this rank's part of a micro-batch, on the host.

        Args:
            microbatch: Tokens to forward, with the `cu_seqlens` of all context-parallel ranks.
            spans: What attends to what.
            longest: Upper bound on the positions.
            form: Form of attention, see `attention_form`.
            is_split: Whether context-parallel ranks share the sequences.
            chunks: Chunks of the sequences, if the model has linear attention.
        """
        cu_seqlens = microbatch.cu_seqlens.cpu()
        # Transformer Engine's attention over several ranks needs it, though there is no gap between sequences.
        padded = cu_seqlens if is_split else None
        return cls(
            qkv_format="thd",
            cu_seqlens_q_padded=padded,  # type: ignore[arg-type]  # none by default
            cu_seqlens_kv_padded=padded,  # type: ignore[arg-type]
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            position_ids=microbatch.position_ids,
            attention=form.of(spans),
            chunks=chunks,
        )


class PackedAttention(torch.nn.Module):
    """Core attention over packed (`thd`) sequences; under context parallelism keys and values are gathered.

    A layer may have a window, and a learned sink of each head, which tensor-parallel ranks split.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_: Any,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **__: Any,
    ) -> None:
        super().__init__()
        assert pg_collection is not None, "Megatron gives the groups to each attention"
        self.softmax_scale = softmax_scale
        self.context: dist.ProcessGroup = pg_collection.cp
        skipped: Any = config.window_attn_skip_freq
        has_window = is_layer_window_attention(config.window_size, skipped, layer_number)
        self.window = config.window_size[0] + 1 if has_window and config.window_size is not None else None
        self.softmax_offset: torch.nn.Parameter | None = None  # as Megatron names the sinks
        if config.softmax_type == "learnable":
            own = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(own, dtype=config.params_dtype))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend causally within each sequence, ignoring `attention_mask`. Return [T, heads * D]."""
        assert isinstance(packed_seq_params, PackedSequences), "the actor always packs"
        if self.context.size() > 1:
            shapes = key.shape[1:], value.shape[1:]  # in one collective
            own = torch.cat((key.flatten(1), value.flatten(1)), dim=1)
            # of each rank, end to end; backward sums gradients over ranks
            gathered = gather_from_sequence_parallel_region(
                own, tensor_parallel_output_grad=True, group=self.context
            )
            parts = gathered.split([shape.numel() for shape in shapes], dim=1)
            key, value = (part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))
        attention, options = packed_seq_params.attention, (self.softmax_scale, self.window, self.softmax_offset)
        return attention.attend(query, key, value, *options).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the sinks as a shard of all heads'."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, dict.fromkeys(state, 0), sharded_offsets)
