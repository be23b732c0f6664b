"""Measures the distance between a model and its quantised folder: one samples, both forward the samples."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig

from megatron_dppo.architectures.registry import read_model_sizes
from megatron_dppo.architectures.sizes import end_tokens, read_model_config
from megatron_dppo.checkpoints.block_fp8 import BlockFP8, round_groups
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.checkpoints.weight_formats import QuantizedFolder, WeightFormat, round_values
from megatron_dppo.engines.embedded.engine import checkpoint_targets
from megatron_dppo.engines.embedded.sampling import log_softmax
from megatron_dppo.errors import ConversionError
from megatron_dppo.metrics.engine_comparison import MeasuredResponse, token_statistics
from megatron_dppo.routing_replay.routes import overlap

BATCH = 16  # prompts sampled at a time


@dataclass(frozen=True)
class Forward:
    """Results of forwarding one prompt of P and response of R tokens."""

    log_probs: Tensor  # [R] float32, of the response's tokens
    best: Tensor  # [R] int64, the most probable token of each position
    experts: Mapping[int, Tensor]  # by layer, [P + R - 1, top_k]


def measure(
    hf: Path, quantized: Path, prompts: Sequence[Tensor], max_tokens: int, device: torch.device
) -> dict[str, float]:
    """Measure the distance of the original, pi, from the quantised model, mu, on mu's samples.

    mu is read back from its files: dequantised weights, and inputs of linears rounded to its format.
    Both multiply in bfloat16, so that equal weights are no distance apart.

    Args:
        hf: The original's folder.
        quantized: What was written.
        prompts: [P] int64 each, on the device.
        max_tokens: Most tokens of a response.
        device: Where to compute; holds one model.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.bfloat16, trust_remote_code=False)
    model.to(device).eval()
    weights, roundings = read_quantized(quantized)
    fill(model, weights, quantized)
    with rounding_inputs(model, roundings):
        ends = end_tokens(hf, model.config.eos_token_id)
        responses = sample_responses(model, prompts, max_tokens, ends)
        of_mu = forward(model, prompts, responses, "quantised")
    original = HFWeights(hf)
    fill(model, ((name, original.tensor(name)) for name in sorted(original.names)), hf)
    of_pi = forward(model, prompts, responses, "original")
    return figures(prompts, responses, of_mu, of_pi, read_model_sizes(hf).num_experts or 0)


Rounding = Callable[[Tensor], Tensor]
"""Rounds the inputs of a linear."""


def read_quantized(folder: Path) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Rounding]]:
    """Return a folder's weights, dequantised, and how to round each linear's inputs, by the weight's name."""
    form = BlockFP8.of(read_model_config(folder)[1])
    if form is not None:
        stored = HFWeights(folder)
        weights = ((name, stored.tensor(name)) for name in sorted(stored.names))
        return weights, {name: round_groups for name in stored.names if form.quantizes(name)}
    modelopts = QuantizedFolder(folder)
    scales = modelopts.input_scales()
    return modelopts.weights(), {n: rounding_of(modelopts.weight_format, scales[n]) for n in scales}


def rounding_of(weight_format: WeightFormat, scale: Tensor) -> Rounding:
    """Return the rounding to one of modelopt's formats, with a scale `[]` float32."""
    return lambda values: round_values(values.float(), weight_format, scale.to(values.device)).to(values.dtype)


@torch.no_grad()
def fill(model: nn.Module, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Copy a checkpoint into a transformers model."""
    targets = checkpoint_targets(model)
    is_tied = "lm_head.weight" not in targets
    received: set[str] = set()
    for name, tensor in weights:
        if name == "lm_head.weight" and is_tied:
            continue
        if name not in targets or tensor.shape != targets[name].shape:
            raise ConversionError(
                f"{folder}: found {name!r} of shape {tuple(tensor.shape)}; expected a tensor of the original. "
                "Quantise it again."
            )
        targets[name].copy_(tensor)
        received.add(name)
    missing = sorted(set(targets) - received)
    if missing:
        raise ConversionError(
            f"{folder}: {len(missing)} tensors are missing (first: {missing[:3]}); expected the original's. "
            "Quantise it again."
        )


@contextmanager
def rounding_inputs(model: nn.Module, roundings: Mapping[str, Rounding]) -> Iterator[None]:
    """Round the inputs of a model's linears, inside the block.

    Args:
        model: With Hugging Face's modules; experts fused, as transformers 5 has them.
        roundings: Rounding of each linear's inputs, by the weight's name; a layer's experts share one.
    """
    modules = dict(model.named_modules())
    handles, wrapped = [], list[Any]()

    def hook(rounding: Rounding, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounding(inputs[0]), *inputs[1:])

    try:
        for name, module in modules.items():
            first, last = (roundings.get(f"{name}.0.{linear}_proj.weight") for linear in ("gate", "down"))
            rounding = roundings.get(f"{name}.weight", first)
            if rounding is not None:
                handles.append(module.register_forward_pre_hook(partial(hook, rounding)))
            if last is not None:
                experts: Any = module
                wrapped.append(experts)
                experts._apply_gate = _then(experts._apply_gate, last)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for experts in wrapped:
            del experts._apply_gate


def _then(first: Any, second: Any) -> Any:
    return lambda values: second(first(values))


@torch.no_grad()
def sample_responses(
    model: Any, prompts: Sequence[Tensor], max_tokens: int, end_token_ids: Sequence[int]
) -> list[Tensor]:
    """Sample a response to each prompt from the model's distribution; the same for the same seed and batch.

    Returns:
        [R] int64 each, the token that ends it included; R is at least 1.
    """
    room = model.config.max_position_embeddings - max(prompt.numel() for prompt in prompts)
    settings = GenerationConfig(
        max_new_tokens=min(max_tokens, room),
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        eos_token_id=list(end_token_ids) or None,
        pad_token_id=0,
    )
    responses: list[Tensor] = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for start in tqdm(range(0, len(prompts), BATCH), desc="sampling", unit="batch"):
            batch = prompts[start : start + BATCH]
            width = max(prompt.numel() for prompt in batch)
            tokens = torch.stack([nn.functional.pad(prompt, (width - prompt.numel(), 0)) for prompt in batch])
            is_real = torch.stack(
                [nn.functional.pad(torch.ones_like(prompt), (width - prompt.numel(), 0)) for prompt in batch]
            )
            output = model.generate(tokens, attention_mask=is_real, generation_config=settings)
            responses += [_until_end(row, end_token_ids) for row in output[:, width:]]
    return responses


def _until_end(tokens: Tensor, end_token_ids: Sequence[int]) -> Tensor:
    ends = torch.isin(tokens, torch.tensor(tuple(end_token_ids), device=tokens.device)).nonzero()
    return tokens[: int(ends[0]) + 1] if ends.numel() else tokens


@torch.no_grad()
def forward(model: Any, prompts: Sequence[Tensor], responses: Sequence[Tensor], which: str) -> list[Forward]:
    """Forward each prompt with its response, one at a time."""
    blocks = [layer.mlp for layer in model.base_model.layers]
    gates = {layer: block.gate for layer, block in enumerate(blocks) if hasattr(block, "gate")}
    experts: dict[int, Tensor] = {}

    def record(layer: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        experts[layer] = output[2].cpu()  # (logits, weights, indices)

    hooks = [gate.register_forward_hook(partial(record, layer)) for layer, gate in gates.items()]
    found: list[Forward] = []
    pairs_of_tokens = list(zip(prompts, responses, strict=True))
    try:
        for prompt, response in tqdm(pairs_of_tokens, desc=f"forward, {which}", unit="response"):
            tokens = torch.cat([prompt, response])[:-1]
            logits = model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0, prompt.numel() - 1 :]
            log_probs = log_softmax(logits).gather(1, response.unsqueeze(1))[:, 0]
            found.append(Forward(log_probs.cpu(), logits.argmax(-1).cpu(), dict(experts)))
    finally:
        for handle in hooks:
            handle.remove()
    return found


def figures(
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    of_mu: Sequence[Forward],
    of_pi: Sequence[Forward],
    num_experts: int,
) -> dict[str, float]:
    """Return the names of `token_statistics`, `top1_agreement` and `agreement_layer_<n>`."""
    measured = [
        MeasuredResponse(prompt.cpu(), response.cpu(), mu.log_probs, {"live": pi.log_probs}, {})
        for prompt, response, mu, pi in zip(prompts, responses, of_mu, of_pi, strict=True)
    ]
    values = token_statistics(measured, "live")
    best = [torch.cat([forward.best for forward in forwards]) for forwards in (of_mu, of_pi)]
    values["top1_agreement"] = float((best[0] == best[1]).double().mean())
    for layer in of_mu[0].experts:
        mu, pi = (torch.cat([forward.experts[layer] for forward in forwards]) for forwards in (of_mu, of_pi))
        values[f"agreement_layer_{layer}"] = float(overlap(pi, mu, num_experts).double().mean())
    return values
