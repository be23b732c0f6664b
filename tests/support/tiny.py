"""A tiny Qwen3-MoE as a Hugging Face checkpoint, and random samples for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_dppo.types import (
    ModelRouting,
    Prompt,
    RolloutTopK,
    RoutedExperts,
    Sample,
    SampleGroup,
    WeightVersionSpan,
)

VOCAB, EXPERTS, TOP_K, LAYERS = 97, 8, 2, 3


def write_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a random model whose distributions and routers are far from flat."""
    settings: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.25,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def random_groups(
    num_groups: int,
    samples_per_group: int = 3,
    topk: int = 4,
    moe_layers: int = LAYERS,
    response_lengths: Sequence[int] = (),
    routing: ModelRouting | None = None,
    has_trees: bool = False,
) -> list[SampleGroup]:
    """Samples with random routes, top-K and rewards; the same on every rank.

    Responses are up to 13 tokens long, or as long as `response_lengths` say, over and over. Routes are of the
    tiny Qwen3-MoE with so many layers, or of `routing`. If `has_trees` is set, a sample begins with tokens and
    routes of the sample before it, and has its prompt.
    """
    routing = routing or ModelRouting(tuple(range(moe_layers)), EXPERTS, TOP_K)
    generator = torch.Generator().manual_seed(6 if has_trees else 5)  # sums that do not cancel

    before: list[Sample] = []

    def sample(group: int, index: int) -> Sample:
        prompt, response = (int(torch.randint(low, 14, (), generator=generator)) for low in (2, 1))
        if has_trees and index:
            prompt = before[-1].prompt_length
        if response_lengths:
            response = response_lengths[(group * samples_per_group + index) % len(response_lengths)]
        tokens = torch.randint(0, VOCAB, (prompt + response,), generator=generator)
        shape = prompt + response - 1, len(routing.layer_numbers), routing.num_experts
        routes = torch.rand(shape, generator=generator).topk(routing.top_k).indices.to(torch.uint8)
        if has_trees and index:
            most, routed = min(len(tokens), len(before[-1].tokens)), before[-1].routed_experts
            num = int(torch.randint(2, most + 1, (), generator=generator))
            tokens[:num] = before[-1].tokens[:num]
            num -= int(torch.randint(0, 2, (), generator=generator))  # its routes may differ
            assert routed is not None
            routes[: num - 1] = routed.indices[: num - 1]
        mu = torch.randn(response, VOCAB, generator=generator).mul(2).log_softmax(-1)
        best = mu.topk(topk)
        made = Sample(
            id=f"{group}+{index}",
            group_id=str(group),
            tokens=tokens,
            prompt_length=prompt,
            loss_mask=torch.rand(response, generator=generator) < 0.9,
            rollout_log_probs=mu.gather(1, tokens[prompt:, None])[:, 0],
            finish_reason="stop",
            topk=RolloutTopK(best.indices.int(), best.values),
            routed_experts=RoutedExperts(routes, routing.layer_numbers, routing.num_experts),
            weight_versions=(
                WeightVersionSpan(0, response // 2, index),
                WeightVersionSpan(response // 2, response, samples_per_group),
            ),
            reward=float(torch.rand((), generator=generator)),
        )
        before.append(made)
        return made

    return [
        SampleGroup(
            Prompt(str(g), "", "test", text="x"), tuple(sample(g, i) for i in range(samples_per_group)), g
        )
        for g in range(num_groups)
    ]


@torch.no_grad()
def gradients_of(actor: Any) -> dict[str, torch.Tensor]:
    """Return the accumulated gradients of the trained parameters in Hugging Face names.

    If the optimizer is distributed, a rank has only its shard of the reduced gradients.
    """
    from megatron_dppo.checkpoints.megatron_weights import export_hf_weights

    parameters = [parameter for chunk in actor.chunks for parameter in chunk.parameters()]
    gradients = [parameter.main_grad for parameter in parameters if parameter.requires_grad]
    exported = export_hf_weights(actor.chunks, actor.hf_table, gradients)
    return {name: gradient.clone() for name, gradient in exported}


def logits_of(actor: Any, microbatch: Any) -> torch.Tensor:
    """[T, V] of one micro-batch, of a model that one rank holds whole, with live routes; on the CPU."""
    from megatron_dppo.actor.forward import forward_packed, output_weight, to_device

    (chunk,) = actor.chunks
    weight = output_weight(chunk)
    return (forward_packed(chunk, to_device(microbatch, weight.device))[0] @ weight.T).cpu()
