"""Runs the gradient step of one rank in this process, which is unusable afterwards.

Functions that differ between CPU and GPU, or that a trace cannot run, are replaced and never restored. Memory
stays the same.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from megatron_dppo.actor.actor import Actor
from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.registry import model_sizes, read_hf_config
from megatron_dppo.config.schema import Config
from megatron_dppo.mcore import cpu
from megatron_dppo.mcore.fixes import prime_adam_states
from megatron_dppo.plan.job import Tree
from megatron_dppo.routing_replay.routes import index_dtype
from megatron_dppo.types import Microbatch, ModelRouting, RolloutTopK, RoutedExperts, TrainBatch
from tests.support.traced_step.tensors import (
    FORWARD,
    STEP,
    FakeFloats,
    Ledger,
    PretendedWorld,
    is_on_device,
    on_device,
)


@dataclass(frozen=True)
class StepSettings:
    """Settings of one traced step.

    Attributes:
        config: Config of the run.
        num_layers: Number of layers of the traced model, which replaces the configured one.
        layout: Layout of the simulated processes.
        rank: Traced rank.
        num_tokens: Number of forwarded tokens of each micro-batch, over its context-parallel ranks.
        tree: The longest samples that share a prompt.
        num_microbatches: Number of micro-batches in the step.
    """

    config: Config
    num_layers: int
    layout: Layout
    rank: int
    num_tokens: int
    tree: Tree
    num_microbatches: int


@dataclass(frozen=True)
class TracedStep:
    """Memory and waits of one rank's step.

    Attributes:
        own_layers: Number of this rank's layers.
        held: Live bytes between steps.
        peaks: Most live bytes in each phase.
        waits: Waits of the host after the build, by phase and by operator with its source line.
    """

    own_layers: int
    held: int
    peaks: dict[str, int]
    waits: Counter[tuple[str, str]]


def run_step(settings: StepSettings) -> TracedStep:
    """Build the actor of one rank and take one gradient step."""
    layout, config = settings.layout, settings.config
    hf = read_hf_config(config.model.load) | {"num_hidden_layers": settings.num_layers}
    ledger = Ledger()
    own = settings.num_tokens // layout.context // layout.tensor
    world = PretendedWorld(settings.rank, layout.world_size, (own, 1, hf["hidden_size"]))
    _replace_functions(ledger)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf))
        model = config.model.model_copy(update={"load": Path(folder), "layer_spec": "torch"})
        config = config.model_copy(update={"model": model})
        batch = _batch(settings, config, hf)
        with FakeFloats(ledger, world):
            actor = Actor(config, world.runtime)
            prime_adam_states(actor.optimizer)
            with actor.memory.states_here():
                pass
            held = ledger.num_bytes
            ledger.waits.clear()
            _watch(actor, ledger)
            with ledger.during(FORWARD):
                actor.train_step(batch, is_first=False)
    chunks: list[Any] = actor.chunks
    own_layers = sum(len(chunk.decoder.layers) for chunk in chunks)
    return TracedStep(own_layers, held, ledger.peaks, ledger.waits)


def _watch(actor: Actor, ledger: Ledger) -> None:
    """Set the ledger's phase when the loss starts and ends, and when the optimizer's step starts."""
    head: Any = actor._head
    policy_loss, step = head.policy_loss, actor.optimizer.step

    def watched_loss(*args: Any) -> Any:
        ledger.is_in_loss = True
        return policy_loss(*args)

    def watched_step(*args: Any) -> Any:
        with ledger.during(STEP):
            return step(*args)

    def end_loss(_: torch.Tensor) -> None:
        ledger.is_in_loss = False

    def follow(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(end_loss)

    head.policy_loss, actor.optimizer.step = watched_loss, watched_step
    last: Any = actor.chunks[-1]
    if last.post_process:
        last.decoder.final_layernorm.register_forward_pre_hook(follow)


def _batch(settings: StepSettings, config: Config, hf: dict[str, Any]) -> TrainBatch:
    """Return equal micro-batches on the host, full of the longest sequences.

    Every token is trained, or, of sequences that share a prompt, every token of the responses.
    """
    routing = model_sizes(hf).routing if config.has_routes else None
    trees, num_topk = _trees(settings.num_tokens, settings.tree), config.rollout.num_topk_log_probs
    lengths = [length for tree in trees for length in tree]
    num, distinct = sum(lengths), _distinct(trees, settings.tree.prompt_tokens)
    ids, floats, topk = distinct.remainder(hf["vocab_size"]), torch.full((num,), -1.0), None
    if num_topk:
        columns = torch.arange(num_topk, dtype=torch.int32).expand(num, -1).contiguous()
        topk = RolloutTopK(columns, torch.full((num, num_topk), -4.0))
    positions = torch.cat([torch.arange(length) for length in lengths])
    one = Microbatch(
        tokens=ids,
        targets=ids,
        position_ids=positions,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        loss_mask=positions >= settings.tree.prompt_tokens * settings.tree.is_shared,
        rollout_log_probs=floats,
        advantages=floats,
        token_weights=torch.ones(num),
        old_log_probs=floats,
        ref_log_probs=floats,
        topk=topk,
        routed_experts=None if routing is None else _routes(distinct, routing),
    )
    count = settings.num_microbatches
    return TrainBatch((one,) * count, count * num * settings.layout.data, count * len(lengths))


def _trees(num_tokens: int, tree: Tree) -> list[list[int]]:
    """Return the lengths of the sequences of each tree, which have this number of distinct tokens in all."""
    longest = tree.prompt_tokens + tree.response_tokens
    whole, rest = divmod(num_tokens, tree.num_tokens)
    trees = [[longest] * tree.num_samples] * whole
    if rest > longest:
        num, left = divmod(rest - tree.prompt_tokens, tree.response_tokens)
        return [*trees, [longest] * num + [tree.prompt_tokens + left] * (left > 0)]
    return [*trees, *[[rest]] * (rest > 0)]


def _distinct(trees: Sequence[Sequence[int]], prompt_tokens: int) -> Tensor:
    """Number the tokens: a tree's prompt has the same numbers in each response, other tokens are unique."""
    parts, start = list[Tensor](), 0
    for first, *others in trees:
        prompt = torch.arange(start, start + min(prompt_tokens, first))
        parts.append(torch.arange(start, start + first))
        start += first
        for length in others:
            own = length - len(prompt)
            parts += [prompt, torch.arange(start, start + own)]
            start += own
    return torch.cat(parts)


def _routes(numbers: Tensor, routing: ModelRouting) -> RoutedExperts:
    """Return routes that use each expert in turn, by the numbers of tokens."""
    routes = (numbers[:, None] * routing.top_k + torch.arange(routing.top_k)).remainder(routing.num_experts)
    routes = routes[:, None]
    routes = routes.to(index_dtype(routing.num_experts))
    indices = routes.expand(-1, len(routing.layer_numbers), -1)
    return RoutedExperts(indices, routing.layer_numbers, routing.num_experts)


def _replace_functions(ledger: Ledger) -> None:
    """Replace functions of PyTorch, Megatron and the actor, for the rest of this process."""
    cpu.install()
    _replace_operators()
    _replace_reads(ledger)
    _replace_dispatch(ledger)
    _replace_memory(ledger)
    actor: Any = actor_module
    actor.load_weights = lambda *_: None
    to_device: Any = forward.to_device
    forwarding: Any = forward
    forwarding.to_device = lambda value, device: _mark(to_device(value, device))
    attention_form = forward.attention_form
    forwarding.attention_form = lambda _, *model: attention_form("cuda", *model)


def _replace_operators() -> None:
    module: Any = torch.nn.Module
    module._apply = lambda self, *_, **__: self  # all parameters have their dtype and device from the start
    functional: Any = F
    functional.rms_norm = lambda x, _shape, weight=None, eps=None: _FusedNorm.apply(x, weight)
    functional.scaled_dot_product_attention = _attention
    optimizer: Any = adam
    optimizer._default_to_fused_or_foreach = lambda *_, **__: (False, True)  # as for parameters on a GPU


class _FusedNorm(torch.autograd.Function):
    """A GPU's fused RMSNorm; the CPU's RMSNorm keeps float32 copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        of_weight = None if weight is None else torch.empty_like(weight)
        return torch.empty_like(x, memory_format=torch.contiguous_format), of_weight


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
        setattr(tensor_class, name, _count_reads(ledger, name, getattr(torch.Tensor, name)))
    library: Any = torch
    make = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Make a tensor from numbers and fake tensors, and count a read for each fake tensor, as on a GPU."""
        kwargs.pop("device", None)
        return make(tree_map(lambda x: x.item() if isinstance(x, FakeTensor) else x, data), *args, **kwargs)

    library.tensor = cast(Any, cpu._torch_on_cpu()).tensor = tensor


def _count_reads(ledger: Ledger, name: str, read: Callable[..., Any]) -> Callable[..., Any]:
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
            ledger.resize(storage)

    def reload(self: Any) -> None:
        for storage, num_bytes, _ in self._away.values():
            storage.resize_(num_bytes)
            ledger.resize(storage)
        self._away.clear()

    residence.leave, residence.reload = leave, reload


def _mark(value: Any) -> Any:
    """Return a host tensor as a device tensor, and any other object unchanged."""
    if not isinstance(value, Tensor) or is_on_device(value):
        return value
    return torch.empty_like(value) if value.is_floating_point() else on_device(value.clone())
