"""Decodes many sequences with a transformers model, each in its own slot of one key-value cache."""

# PyTorch does not annotate fork_rng, tolist and unique.
# pyright: reportUnknownMemberType=false
import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.initialization import no_init_weights
from transformers.integrations.moe import grouped_mm_experts_forward

from megatron_dppo.architectures.published_names import stays_float32
from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.errors import RolloutError

_WINDOWED = "sliding_attention"  # in transformers' layer_types


class SlotCache(Cache):
    """Keys and values of `slots` sequences, per layer `[slots, kv_heads, max_length, head_dim]`.

    Before a forward, `prefill_into` or `decode_at` sets where `update` writes and what attention reads. A
    layer's memory is allocated at its first write, because keys and values may have heads of different sizes.
    A layer with linear attention has two states per sequence instead: the convolution's last inputs, and
    the recurrent state. A sequence that starts must find zeros there, see `clear`.
    """

    def __init__(self, slots: int, max_length: int, linear: Mapping[int, Any], dtype: torch.dtype) -> None:
        """Allocate the states of `linear`, the layers with linear attention by index."""
        super().__init__(layers=[])
        self._slots, self._max_length = slots, max_length
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        self.states: dict[int, Tensor] = {}
        for index, layer in linear.items():
            device = layer.conv1d.weight.device
            sizes = layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
            self.inputs[index] = torch.zeros(
                slots, layer.conv_dim, layer.conv_kernel_size, dtype=dtype, device=device
            )
            self.states[index] = torch.zeros(slots, *sizes, device=device)
        self._into: Tensor | None = None
        self._source: Tensor | None = None
        self._positions: Tensor | None = None
        self._rows: Tensor | None = None
        self._live_length = 0

    def clear(self, first_slot: int) -> None:
        """Let sequences start in the slots from `first_slot` on."""
        for stored in (*self.inputs.values(), *self.states.values()):
            stored[first_slot:] = 0

    def prefill_into(self, slots: Tensor, source: Tensor) -> None:
        """Let the next forward fill fresh slots from position 0; it attends to its own tokens only.

        Slot `slots[i]` gets row `source[i]` of the forwarded batch.
        """
        self._into, self._source, self._positions = slots, source, None

    def decode_at(self, positions: Tensor, live_length: int) -> None:
        """Let the next forward append a token to slot i at `positions[i]`; attention reads `live_length`."""
        self._positions, self._live_length = positions, live_length
        self._rows = torch.arange(positions.numel(), device=positions.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values `[n, kv_heads, tokens, head_dim]`; return all that attention reads."""
        if layer_idx not in self.keys:
            self.keys[layer_idx], self.values[layer_idx] = map(self._memory, (key_states, value_states))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        count, _, tokens, _ = key_states.shape
        if self._positions is None:
            assert self._source is not None, "prefill_into or decode_at was called"
            keys[self._into, :, :tokens] = key_states[self._source]
            values[self._into, :, :tokens] = value_states[self._source]
            return key_states, value_states
        assert tokens == 1, "decoding appends one token"
        keys[self._rows, :, self._positions] = key_states.squeeze(2)
        values[self._rows, :, self._positions] = value_states.squeeze(2)
        return keys[:count, :, : self._live_length], values[:count, :, : self._live_length]

    def _memory(self, states: Tensor) -> Tensor:
        """Return zeros for a layer's keys or values; masked entries must be finite."""
        return states.new_zeros(self._slots, states.shape[1], self._max_length, states.shape[3])

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the convolution's last inputs `[n, channels, width]`, which decoding updates in place."""
        return None if self._positions is None else self.inputs[layer_idx][: self._positions.numel()]

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        """Store the last of a prefill's inputs `[n, channels, tokens]`; return all of them."""
        assert self._positions is None and self._source is not None, "decoding updates the inputs in place"
        stored = self.inputs[layer_idx]
        last = conv_states[self._source, :, -stored.shape[2] :]
        stored[self._into, :, stored.shape[2] - last.shape[2] :] = last
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a layer's recurrent state before the tokens to decode `[n, heads, key size, value size]`."""
        return None if self._positions is None else self.states[layer_idx][: self._positions.numel()]

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        """Store the recurrent state after the forwarded tokens."""
        stored = self.states[layer_idx]
        if self._positions is None:
            stored[self._into] = recurrent_states[self._source]
        else:
            stored[: len(recurrent_states)] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: no earlier state is kept."""
        return False

    def keep(self, slots: Tensor, live_length: int) -> None:
        """Move `slots` to the front, in that order."""
        for stored in (*self.keys.values(), *self.values.values()):
            stored[: slots.numel(), :, :live_length] = stored[slots, :, :live_length]
        for stored in (*self.inputs.values(), *self.states.values()):
            stored[: slots.numel()] = stored[slots]


def padded_experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Forward all experts of a layer as two batched matmuls over rows padded to the busiest expert.

    Use it for bfloat16 on CPU. There, grouped_mm is a loop of small matmuls, each with the cost of a oneDNN
    call. 256 tokens and 32 experts take 0.5 ms here and 1.4-1.8 ms with grouped_mm (in float32 both are equal,
    or grouped_mm is faster when experts are uneven). This function multiplies in bfloat16 and rounds at the
    same points as grouped_mm. If one expert has so many tokens that padding costs more than it saves, this
    function calls grouped_mm.
    """
    num_tokens, top_k = top_k_index.shape
    expert_ids = top_k_index.reshape(-1)
    counts = torch.bincount(expert_ids, minlength=experts.num_experts)
    capacity = int(counts.max())
    if capacity * experts.num_experts > 4 * num_tokens * top_k:
        return grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    order = torch.argsort(expert_ids, stable=True)
    sorted_ids = expert_ids[order]
    rank_in_expert = torch.arange(order.numel(), device=order.device) - (counts.cumsum(0) - counts)[sorted_ids]
    rows = sorted_ids * capacity + rank_in_expert
    padded = hidden_states.new_zeros(experts.num_experts * capacity, hidden_states.shape[-1])
    padded[rows] = hidden_states[order // top_k]
    padded = padded.view(experts.num_experts, capacity, -1)
    activated = experts._apply_gate(torch.bmm(padded, experts.gate_up_proj.transpose(1, 2)))
    outputs = torch.bmm(activated, experts.down_proj.transpose(1, 2)).flatten(0, 1)
    rows_in_token_order = torch.empty_like(rows)
    rows_in_token_order[order] = rows
    weighted = outputs[rows_in_token_order].view(num_tokens, top_k, -1) * top_k_weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(hidden_states.dtype)


class FusedLinears:
    """Fuses linears with the same input into one matrix product. Each linear is called as before.

    The first linear's call computes the product, each call returns its part, and the last call frees it.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        """Move the weights into one tensor and the biases into another, and replace the linears' forwards."""
        self._sizes = [linear.out_features for linear in linears]
        self._weight = self._join([linear.weight for linear in linears])
        biases: list[Tensor | None] = [linear.bias for linear in linears]
        present = [bias for bias in biases if bias is not None]
        self._bias = self._join(present) if present else None
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        for index, linear in enumerate(linears):
            linear.forward = partial(self._part, index)

    def _join(self, parameters: Sequence[Tensor]) -> Tensor:
        joined = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, torch.split(joined, self._sizes), strict=True):
            parameter.data = part
        return joined

    def _part(self, index: int, input: Tensor) -> Tensor:
        if input is not self._input:
            self._input = input
            self._parts = torch.split(nn.functional.linear(input, self._weight, self._bias), self._sizes, -1)
        part = self._parts[index]
        if index == len(self._sizes) - 1:
            self._input, self._parts = None, ()
        return part


class SlotDecoder:
    """Forwards the model, and records its routers' choices. Each call of `generate` owns a cache."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        own: Any = copy.deepcopy(config)
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(own)]
        self._family = FAMILIES.get(model_class.__name__)
        has_windows = self._family is not None and _WINDOWED in self._family.layer_types
        self._window: int | None = own.sliding_window if has_windows else None
        if not has_windows and getattr(own, "sliding_window", None):  # null for none, but 0 for Qwen2-MoE
            raise RolloutError(
                f"the transformers engine: found sliding_window = {own.sliding_window}; expected full "
                "attention. Set rollout.engine = 'sglang' for this model."
            )
        if hasattr(own, "output_router_logits"):
            own.output_router_logits = False
        if hasattr(own, "quantization_config"):
            del own.quantization_config  # weights arrive dequantised
        # Its plain attention, for a model with sinks, which PyTorch's does not have.
        attention = "sdpa" if model_class._supports_sdpa else "eager"
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), no_init_weights(), device:  # decays are drawn all the same
            self.model: Any = cast(Any, AutoModelForCausalLM).from_config(
                own, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
        for module in self.model.modules():  # created in the weights' dtype, which would round their values
            for name, buffer in list(module.named_buffers(recurse=False)):
                if stays_float32(name):
                    setattr(module, name, torch.nn.Buffer(buffer.float()))
        self.model.tie_weights()
        self.model.requires_grad_(False).eval()
        layers = list(self.model.base_model.layers)
        self._linear = {i: each.linear_attn for i, each in enumerate(layers) if hasattr(each, "linear_attn")}
        for attention in [layer.self_attn for i, layer in enumerate(layers) if i not in self._linear]:
            projections = [getattr(attention, f"{name}_proj", None) for name in "qkv"]
            linears = [projection for projection in projections if isinstance(projection, nn.Linear)]
            if len(linears) == len(projections):
                FusedLinears(linears)
        self._dtype, self._device = dtype, device
        self._choices: list[Tensor] | None = None
        self.moe_layers, self.num_experts = self._tap_routers()

    def _tap_routers(self) -> tuple[tuple[int, ...], int]:
        """Hook every router, select the experts' forward, and return MoE layer indices and expert count."""
        moe_layers, num_experts = list[int](), 0
        for index, layer in enumerate(self.model.base_model.layers):
            experts: Any = getattr(layer.mlp, "experts", None)
            if experts is None:
                continue
            is_plain = experts.has_gate and experts.is_concatenated and not experts.has_bias
            is_plain = is_plain and not experts.is_transposed
            if not is_plain and (self._family is None or not self._family.has_interleaved_stacks):
                raise RolloutError(
                    f"layer {index}: found {type(experts).__name__}; expected experts with concatenated gate "
                    "and up projections and no bias. Set rollout.engine = 'sglang' for this model."
                )
            moe_layers.append(index)
            num_experts = int(experts.num_experts)
            router: nn.Module = layer.mlp.gate if hasattr(layer.mlp, "gate") else layer.mlp.router
            router.register_forward_hook(self._record_choice)
            if is_plain and self._device.type == "cpu" and self._dtype == torch.bfloat16:
                experts.forward = partial(padded_experts_forward, experts)
        return tuple(moe_layers), num_experts

    def _record_choice(self, _router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._choices is not None:
            self._choices.append(output[2])  # (logits, weights, indices)

    def new_cache(self, slots: int, max_length: int) -> SlotCache:
        """Return an empty cache that fits the model."""
        return SlotCache(slots, max_length, self._linear, self._dtype)

    def prefill(
        self,
        cache: SlotCache,
        tokens: Tensor,
        lengths: Tensor,
        first_slot: int,
        source: Tensor,
        capture: bool,
    ) -> Tensor | None:
        """Forward right-padded `tokens` `[m, P]`, and fill slots from `first_slot` on with rows `source` `[n]`.

        Causal attention hides padding from every real token, and decoding masks or overwrites cached padding.
        A recurrent state would contain the padding, so a model with such states forwards the rows of one of the
        `lengths` `[m]` at a time, without padding.

        Returns:
            Expert choices `[m, P, moe_layers, top_k]` when captured.
        """
        widths = lengths if self._linear else torch.full_like(lengths, tokens.shape[1])
        choices: Tensor | None = None
        for width in filter(None, cast(list[int], widths.unique().tolist())):
            rows, members = (widths == width).nonzero()[:, 0], (widths[source] == width).nonzero()[:, 0]
            cache.prefill_into(first_slot + members, torch.searchsorted(rows, source[members]))
            ahead = torch.ones(width, width, dtype=torch.bool, device=self._device).triu_(1)
            positions = torch.arange(width, device=self._device).unsqueeze(0)
            own = tokens[rows, :width]
            _, found = self._forward(self.model.base_model, cache, own, positions, ahead[None, None], capture)
            if found is not None:
                choices = found.new_zeros(*tokens.shape, *found.shape[1:]) if choices is None else choices
                choices[rows, :width] = found.unflatten(0, own.shape)
        return choices

    def decode(
        self, cache: SlotCache, tokens: Tensor, positions: Tensor, live_length: int, capture: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Append `tokens` `[n]` to slots 0..n-1 at `positions` `[n]`, all below `live_length`.

        Returns:
            Logits `[n, V]` of the next tokens, and expert choices `[n, moe_layers, top_k]` when captured.
        """
        cache.decode_at(positions, live_length)
        unseen = torch.arange(live_length, device=self._device) > positions.unsqueeze(1)
        output, choices = self._forward(
            self.model, cache, tokens.unsqueeze(1), positions.unsqueeze(1), unseen[:, None, None], capture
        )
        return output.logits.squeeze(1), choices

    def _forward(
        self, module: Any, cache: SlotCache, tokens: Tensor, positions: Tensor, hidden: Tensor, capture: bool
    ) -> tuple[Any, Tensor | None]:
        mask: Any = self._mask(hidden)
        if self._window is not None:  # a key is too far if its query sees the key that is a window later
            width = min(self._window, hidden.shape[-1])
            far = nn.functional.pad(~hidden[..., width:], (0, width))
            mask = {"full_attention": mask, _WINDOWED: self._mask(hidden | far)}
        elif self._linear:
            mask = {"full_attention": mask, "linear_attention": None}
        self._choices = [] if capture else None
        try:
            output = module(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,  # 4-D, or of kinds of layers: used unchanged
                past_key_values=cache,
                use_cache=True,
            )
            return output, torch.stack(self._choices, dim=1) if self._choices else None
        finally:
            self._choices = None

    def _mask(self, hidden: Tensor) -> Tensor:
        """Return a mask to add to scores, of the keys that each query does not see."""
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)
