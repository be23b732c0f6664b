"""The embedded engine against plain Hugging Face forwards of the same weights."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from megatron_dppo.engines.base import EngineCounts, Request, RolloutEngine, SamplingParams
from megatron_dppo.engines.embedded.continuous_batch import ContinuousBatch
from megatron_dppo.engines.embedded.engine import (
    TransformersEngine,
    WeightChecksum,
    checkpoint_targets,
    round_to_fp8,
)
from megatron_dppo.engines.embedded.slot_decoder import FusedLinears, padded_experts_forward
from megatron_dppo.errors import RolloutError, WeightSyncError
from megatron_dppo.types import Sample
from tests.support.hf_reference import Reference
from tests.support.roundoff import COARSEST, FLOOR, OF_FLOAT64

VOCAB = 40


def moe_config(**overrides: Any) -> Qwen3MoeConfig:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return Qwen3MoeConfig(**values | overrides)


def reference_model(config: Any, seed: int = 0) -> Any:
    """A float32 model with weights large enough that neither tokens nor experts are evenly likely."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5)
    return model


def checkpoint(model: Any) -> dict[str, Tensor]:
    """The model's weights under the names that a Hugging Face checkpoint has."""
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            half = tensor.shape[1] // 2
            for expert in range(tensor.shape[0]):
                prefix = f"{name.removesuffix('gate_up_proj')}{expert}"
                weights[f"{prefix}.gate_proj.weight"] = tensor[expert, :half]
                weights[f"{prefix}.up_proj.weight"] = tensor[expert, half:]
        elif name.endswith("experts.down_proj"):
            for expert in range(tensor.shape[0]):
                weights[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = tensor[expert]
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            weights[name] = tensor
    return weights


def engine_of(model: Any, **options: Any) -> TransformersEngine:
    options = {"weights": "float32", "eos_token_ids": (), "batch_size": 4} | options
    engine = TransformersEngine(model.config, **options)
    engine.load_weights(checkpoint(model).items(), version=7)
    return engine


def requests_of(lengths: Sequence[int], seed: int = 0) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Request(f"r{i}", tuple(torch.randint(VOCAB, (length,), generator=generator).tolist()), (3, 1, i))
        for i, length in enumerate(lengths)
    ]


@torch.no_grad()
def teacher_forced(model: Any, request: Request, completion: Sample) -> tuple[Tensor, Tensor]:
    """Logits of the response positions `[R, V]` by one full forward, and the gates' own choices."""
    tokens = torch.tensor([[*request.prompt_tokens, *completion.tokens.tolist()]])[:, :-1]
    choices: list[Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(lambda _m, _i, output: choices.append(output[2])) for gate in gates]
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(request.prompt_tokens) - 1 :]
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(choices, dim=1) if choices else torch.empty(0)


reference_of = functools.cache(Reference.of)


def largest_error(model: Any, request: Request, completion: Sample) -> float:
    """Return the largest error of its log-probs: a multiple of float32's own on this machine."""

    def log_probs(of: Any) -> Tensor:
        return teacher_forced(of, request, completion)[0].log_softmax(-1)

    single, double = reference_of(model).compute(log_probs)
    return min(max(OF_FLOAT64 * float((single - double).abs().max()), FLOOR), COARSEST)


MIXED_LENGTHS = (5, 1, 9, 3, 7, 7, 2, 12, 4, 1, 6)


@pytest.fixture(scope="module")
def model() -> Any:
    return reference_model(moe_config())


def test_greedy_equals_hugging_face_generate(model: Any) -> None:
    requests = requests_of(MIXED_LENGTHS)
    engine: RolloutEngine = engine_of(model)
    completions = engine.generate(requests, SamplingParams(max_response_tokens=10, temperature=0.0))
    for request, completion in zip(requests, completions, strict=True):
        prompt = torch.tensor([request.prompt_tokens])
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False, pad_token_id=0
        )
        assert completion.tokens.tolist() == expected[0, prompt.shape[1] :].tolist()
        logits, _ = teacher_forced(model, request, completion)
        at_temperature_one = torch.log_softmax(logits, -1).gather(1, completion.tokens[:, None])[:, 0]
        torch.testing.assert_close(
            completion.log_probs, at_temperature_one, atol=largest_error(model, request, completion), rtol=0
        )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_topk_equal_a_full_forward(model: Any, temperature: float) -> None:
    requests = requests_of(MIXED_LENGTHS)
    params = SamplingParams(max_response_tokens=9, temperature=temperature, num_topk_log_probs=5)
    for request, completion in zip(requests, engine_of(model).generate(requests, params), strict=True):
        logits, _ = teacher_forced(model, request, completion)
        expected = torch.log_softmax(logits / temperature, -1)
        sampled = expected.gather(1, completion.tokens[:, None])[:, 0]
        assert completion.log_probs.dtype == torch.float32
        torch.testing.assert_close(
            completion.log_probs, sampled, atol=largest_error(model, request, completion), rtol=0
        )
        topk = completion.topk
        assert topk is not None
        assert topk.ids.dtype == torch.int32 and topk.log_probs.dtype == torch.float32
        values, ids = expected.topk(5, -1)
        torch.testing.assert_close(
            topk.log_probs, values, atol=largest_error(model, request, completion), rtol=0
        )
        assert torch.equal(topk.ids.long(), ids)


def test_first_tokens_follow_the_distribution(model: Any) -> None:
    requests = [Request(f"r{i}", (1, 2, 3), (0, 0, i)) for i in range(2000)]
    completions = engine_of(model, batch_size=512).generate(requests, SamplingParams(max_response_tokens=1))
    tokens = torch.stack([completion.tokens[0] for completion in completions])
    with torch.no_grad():
        probs = torch.softmax(model(torch.tensor([[1, 2, 3]])).logits[0, -1].double(), -1)
    rare = probs * 2000 < 5  # pooled into one cell, as the test requires
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([probs[~rare], probs[rare].sum()[None]]) * 2000
    degrees = counts.numel() - 1
    assert degrees >= 4
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < degrees + 3.5 * (2 * degrees) ** 0.5 + 4


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_results_do_not_depend_on_batch_or_order(model: Any, batch_size: int) -> None:
    requests = requests_of(MIXED_LENGTHS)
    params = SamplingParams(max_response_tokens=8, num_topk_log_probs=3, capture_routes=True)
    expected = {c.request_id: c for c in engine_of(model, batch_size=5).generate(requests, params)}
    shuffled = [requests[i] for i in torch.randperm(len(requests)).tolist()]
    completions = engine_of(model, batch_size=batch_size).generate(shuffled, params)
    assert [c.request_id for c in completions] == [r.id for r in shuffled]
    for request, completion in zip(shuffled, completions, strict=True):
        other = expected[completion.request_id]
        assert torch.equal(completion.tokens, other.tokens)
        torch.testing.assert_close(
            completion.log_probs, other.log_probs, atol=largest_error(model, request, completion), rtol=0
        )
        assert completion.routed_experts and other.routed_experts
        assert torch.equal(completion.routed_experts.indices, other.routed_experts.indices)


@pytest.mark.parametrize(
    ("batch_size", "prefill_tokens", "prefills", "num_cached"),
    [
        (12, 16384, [(3, 8)], 3 * (2 + 8 + 4)),
        (12, 16, [(2, 8), (1, 4)], 3 * (2 + 8 + 4)),  # the bound is of what is forwarded
        (6, 16384, [(2, 8), (2, 8)], 3 * 2 + 8 + 8 + 3 * 4),  # a group that two admissions split
    ],
)
def test_requests_of_one_prompt_share_its_prefill(
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    batch_size: int,
    prefill_tokens: int,
    prefills: list[tuple[int, int]],
    num_cached: int,
) -> None:
    monkeypatch.setattr(ContinuousBatch, "PREFILL_TOKENS", prefill_tokens)
    prompts = [request.prompt_tokens for request in requests_of((3, 9, 5))]
    requests = [Request(f"p{i // 4}+{i % 4}", prompts[i // 4], (3, 1, i)) for i in range(12)]
    params = SamplingParams(max_response_tokens=8, capture_routes=True)
    engine = engine_of(model, batch_size=batch_size)
    forwarded: list[tuple[int, int]] = []
    embedding = engine._decoder.model.model.embed_tokens
    embedding.register_forward_hook(lambda _m, inputs, _o: forwarded.append(tuple(inputs[0].shape)))
    completions = engine.generate(requests, params)
    assert [shape for shape in forwarded if shape[1] > 1] == prefills
    assert engine.counts == EngineCounts(num_prompt_tokens=4 * (3 + 9 + 5), num_cached_tokens=num_cached)
    assert sum(completion.num_cached_tokens for completion in completions) == num_cached
    assert len({tuple(completion.tokens.tolist()) for completion in completions}) > 6
    for request, completion in zip(requests, completions, strict=True):
        (alone,) = engine_of(model).generate([request], params)
        assert torch.equal(completion.tokens, alone.tokens)
        torch.testing.assert_close(
            completion.log_probs, alone.log_probs, atol=largest_error(model, request, completion), rtol=0
        )
        assert completion.routed_experts and alone.routed_experts
        assert torch.equal(completion.routed_experts.indices, alone.routed_experts.indices)


@pytest.mark.parametrize("sweep_fraction", [1 / 8, 0.7])  # 0.7: finished rows wait, some at the cache's end
@pytest.mark.parametrize("batch_size", [6, 24])
def test_responses_that_end_early_are_refilled_correctly(
    model: Any, monkeypatch: pytest.MonkeyPatch, batch_size: int, sweep_fraction: float
) -> None:
    monkeypatch.setattr(ContinuousBatch, "SWEEP_FRACTION", sweep_fraction)
    requests = requests_of([1 + 6 * (i % 4 > 0) for i in range(80)])
    eos = tuple(range(0, VOCAB, 5))
    completions = engine_of(model, eos_token_ids=eos, batch_size=batch_size).generate(
        requests, SamplingParams(max_response_tokens=8)
    )
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    assert len({c.tokens.numel() for c in completions}) > 4
    for request, completion in zip(requests, completions, strict=True):
        ends = torch.isin(completion.tokens, torch.tensor(eos))
        assert not ends[:-1].any()
        assert completion.finish_reason == ("stop" if ends[-1] else "length")
        assert completion.tokens.numel() == 8 or completion.finish_reason == "stop"
        logits, _ = teacher_forced(model, request, completion)
        expected = torch.log_softmax(logits, -1).gather(1, completion.tokens[:, None])[:, 0]
        torch.testing.assert_close(
            completion.log_probs, expected, atol=largest_error(model, request, completion), rtol=0
        )
        (span,) = completion.weight_versions
        assert (span.start, span.stop, span.version) == (0, completion.tokens.numel(), 7)


@pytest.mark.parametrize(
    ("overrides", "moe_layers"),
    [
        ({}, (0, 1, 2)),
        ({"mlp_only_layers": [1]}, (0, 2)),
        ({"decoder_sparse_step": 2, "num_hidden_layers": 4}, (1, 3)),
        ({"num_experts": 300, "num_experts_per_tok": 3, "moe_intermediate_size": 8}, (0, 1, 2)),
    ],
)
def test_routes_are_the_gates_own_choice(overrides: dict[str, Any], moe_layers: tuple[int, ...]) -> None:
    model = reference_model(moe_config(**overrides))
    requests = requests_of(MIXED_LENGTHS)
    params = SamplingParams(max_response_tokens=6, capture_routes=True)
    for request, completion in zip(requests, engine_of(model).generate(requests, params), strict=True):
        routes = completion.routed_experts
        assert routes is not None
        assert routes.layer_numbers == moe_layers
        assert routes.num_experts == model.config.num_experts
        assert routes.indices.dtype == (torch.uint8 if routes.num_experts <= 256 else torch.int16)
        _, choices = teacher_forced(model, request, completion)
        assert torch.equal(routes.indices.long(), choices)


def test_bfloat16_routes_are_the_topk_of_the_float32_softmax(model: Any) -> None:
    engine = engine_of(model, weights="bfloat16", batch_size=32)
    logits: list[Tensor] = []
    for layer in engine._decoder.model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, output: logits.append(output[0]))
    request = requests_of((9,))[0]
    (completion,) = engine.generate([request], SamplingParams(max_response_tokens=1, capture_routes=True))
    assert completion.routed_experts is not None
    layers = range(3)
    rows = [torch.cat([logits[layer], logits[3 + layer]]) for layer in layers]  # prefill, then one decode step
    expected = torch.stack([torch.softmax(row.float(), -1).topk(2).indices for row in rows], dim=1)
    assert torch.equal(completion.routed_experts.indices.long(), expected)


def test_a_model_without_experts(model: Any) -> None:
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    dense = reference_model(config)
    requests = requests_of((4, 2, 6))
    engine = engine_of(dense)
    with pytest.raises(RolloutError, match="capture_routes"):
        engine.generate(requests, SamplingParams(4, capture_routes=True))
    for request, completion in zip(requests, engine.generate(requests, SamplingParams(5)), strict=True):
        logits, _ = teacher_forced(dense, request, completion)
        expected = torch.log_softmax(logits, -1).gather(1, completion.tokens[:, None])[:, 0]
        torch.testing.assert_close(
            completion.log_probs, expected, atol=largest_error(dense, request, completion), rtol=0
        )


def test_top_p_reports_the_renormalised_distribution(model: Any) -> None:
    requests = requests_of(MIXED_LENGTHS)
    params = SamplingParams(max_response_tokens=6, top_p=0.5, num_topk_log_probs=VOCAB)
    for request, completion in zip(requests, engine_of(model).generate(requests, params), strict=True):
        logits, _ = teacher_forced(model, request, completion)
        assert completion.topk is not None
        inside = completion.topk.ids >= 0
        torch.testing.assert_close(completion.topk.log_probs.exp().sum(-1), torch.ones(6))
        probs = torch.softmax(logits, -1)
        for position, token in enumerate(completion.tokens.tolist()):
            nucleus = completion.topk.ids[position][inside[position]].long()
            assert token in nucleus
            mass = probs[position, nucleus]
            assert mass.sum() >= 0.5 - 1e-5 and mass.sum() - mass.min() < 0.5 + 1e-5
            expected = (probs[position, token] / mass.sum()).log()
            torch.testing.assert_close(
                completion.log_probs[position], expected, atol=largest_error(model, request, completion), rtol=0
            )


def test_completions_can_enter_a_loss(model: Any) -> None:
    (completion,) = engine_of(model).generate(requests_of((3,)), SamplingParams(4))
    scale = torch.ones(4, requires_grad=True)
    (scale * completion.log_probs).sum().backward()
    assert scale.grad is not None
    assert completion.log_probs.untyped_storage().nbytes() == 4 * 4


def test_weights_land_where_hugging_face_holds_them(model: Any) -> None:
    engine = engine_of(model)
    held = engine._decoder.model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(held[name], tensor), name
    assert set(checkpoint_targets(model)) == set(checkpoint(model))


def test_the_checksum_is_of_what_was_received(model: Any) -> None:
    expected = WeightChecksum()
    for name, tensor in checkpoint(model).items():
        expected.update(name, tensor)
    for weights in ("float32", "bfloat16_fp8"):
        engine = TransformersEngine(model.config, weights=weights, eos_token_ids=())
        assert engine.weight_version == -1
        assert engine.load_weights(checkpoint(model).items(), version=3) == expected.hexdigest()
        assert engine.weight_version == 3


@pytest.mark.parametrize(
    ("weights", "step", "expected"),
    [
        ("float32", 0.0, 0.0),
        ("float32", 1e-4, 1.0),
        ("bfloat16", 1e-4, 0.0),  # half of the distance of neighbours at 1 is 2e-3
        ("bfloat16", 0.5, 1.0),
        ("bfloat16_fp8", 1e-4, 0.0),
        ("modelopt_fp8", 0.5, None),
    ],
)
def test_the_share_of_weights_that_a_push_changes_is_of_what_is_served(
    model: Any, weights: Any, step: float, expected: float | None
) -> None:
    engine = TransformersEngine(model.config, weights=weights, eos_token_ids=())
    ones = {name: torch.ones_like(tensor) for name, tensor in checkpoint(model).items()}
    engine.load_weights(ones.items(), version=1)
    assert engine.changed_fraction is None
    engine.load_weights({name: tensor + step for name, tensor in ones.items()}.items(), version=2)
    assert engine.changed_fraction == expected
    moved = {name: tensor + step + (name.endswith("norm.weight")) for name, tensor in ones.items()}
    engine.load_weights(moved.items(), version=3)
    num_moved = sum(tensor.numel() for name, tensor in ones.items() if name.endswith("norm.weight"))
    if expected is not None:
        assert engine.changed_fraction == num_moved / sum(tensor.numel() for tensor in ones.values())
    engine.release_weights()
    engine.load_weights(moved.items(), version=4)
    assert engine.changed_fraction is None


def test_the_engine_copies_the_weights(model: Any) -> None:
    weights = {name: tensor.clone() for name, tensor in checkpoint(model).items()}
    engine = TransformersEngine(model.config, weights="float32", eos_token_ids=())
    engine.load_weights(weights.items(), version=1)
    for tensor in weights.values():
        tensor.zero_()
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in engine._decoder.model.state_dict().items())


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: [(n, t) for n, t in w if n != EXPERT], f"{EXPERT}: missing"),
        (lambda w: [*w, (EXPERT, torch.zeros(24, 32))], f"{EXPERT}: arrived 2 times"),
        (lambda w: [*w, ("model.extra.weight", torch.zeros(1))], "model.extra.weight: not a weight"),
        (lambda w: [(n, t.T if n == EXPERT else t) for n, t in w], f"{EXPERT}: shape"),
    ],
    ids=["missing", "twice", "unknown", "misshaped"],
)
def test_an_incomplete_load_is_named_and_never_served(model: Any, change: Any, message: str) -> None:
    engine = engine_of(model)
    with pytest.raises(WeightSyncError, match=message.replace(".", r"\.")):
        engine.load_weights(change(list(checkpoint(model).items())), version=8)
    assert engine.weight_version == -1
    with pytest.raises(RolloutError, match="load_weights"):
        engine.generate(requests_of((3,)), SamplingParams(4))
    engine.load_weights(checkpoint(model).items(), version=9)
    assert engine.generate(requests_of((3,)), SamplingParams(4))[0].weight_versions[0].version == 9


def test_a_sender_that_dies_leaves_the_engine_refusing(model: Any) -> None:
    def dying() -> Any:
        yield from list(checkpoint(model).items())[:5]
        raise ConnectionError

    engine = engine_of(model)
    with pytest.raises(ConnectionError):
        engine.load_weights(dying(), version=8)
    assert engine.weight_version == -1


def test_fp8_rounds_linear_weights_only(model: Any) -> None:
    held = checkpoint(engine_of(model, weights="bfloat16_fp8")._decoder.model)
    for name, tensor in checkpoint(model).items():
        linear = name.endswith("_proj.weight")
        assert torch.equal(held[name], (round_to_fp8(tensor) if linear else tensor).bfloat16()), name
        assert not linear or not torch.equal(held[name], tensor.bfloat16())


def test_fp8_values() -> None:
    weight = torch.tensor([[448.0, 17.0, -0.3], [0.0, 0.0, 0.0], [4.48, 0.17, 0.0]])
    # e4m3 has 3 bits of mantissa: next to 17 stand 16 and 18 (tie: even), and -0.3 falls on -0.3125
    expected = torch.tensor([[448.0, 16.0, -0.3125], [0.0, 0.0, 0.0], [4.48, 0.16, 0.0]])
    torch.testing.assert_close(round_to_fp8(weight), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skew", [0.0, 50.0], ids=["even", "one_expert_draws_most"])
def test_padded_experts_equal_the_eager_loop(model: Any, dtype: torch.dtype, skew: float) -> None:
    experts = reference_model(moe_config()).model.layers[0].mlp.experts.to(dtype)
    hidden = torch.randn(50, 32).to(dtype)
    scores = torch.rand(50, 8)
    scores[:, 3] += skew
    weights, indices = scores.softmax(-1).topk(2)
    with torch.no_grad():
        ours = padded_experts_forward(experts, hidden, indices, weights.to(dtype))
        experts.config._experts_implementation = "eager"
        eager = experts(hidden, indices, weights.to(dtype))
    assert ours.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2 * float(eager.abs().max())
    torch.testing.assert_close(ours, eager, atol=tolerance, rtol=0)


def test_bfloat16_differs_from_float32_but_not_much(model: Any) -> None:
    requests = requests_of(MIXED_LENGTHS)
    for weights in ("bfloat16", "bfloat16_fp8"):
        gaps = []
        completions = engine_of(model, weights=weights).generate(requests, SamplingParams(8))
        for request, completion in zip(requests, completions, strict=True):
            logits, _ = teacher_forced(model, request, completion)
            trained = torch.log_softmax(logits, -1).gather(1, completion.tokens[:, None])[:, 0]
            gaps.append((trained.exp() - completion.log_probs.exp()).abs())
        assert 1e-5 < float(torch.cat(gaps).mean()) < 0.1


@pytest.mark.parametrize("bias", [True, False])
def test_linears_of_one_input_are_one_product(bias: bool) -> None:
    """In any order of calls, for each input, and with weights that are loaded one by one later."""
    linears = [torch.nn.Linear(16, size, bias=bias, dtype=torch.float64) for size in (8, 4, 4)]
    FusedLinears(linears)
    for _ in range(2):
        first, second = torch.randn(2, 5, 16, dtype=torch.float64)
        for inputs, order in ((first, (0, 1, 2)), (second, (2, 0, 1))):
            for linear in (linears[index] for index in order):
                expected = torch.nn.functional.linear(inputs, linear.weight, linear.bias)
                torch.testing.assert_close(linear(inputs), expected)
        for linear in linears:
            linear.weight.detach().copy_(torch.randn_like(linear.weight))
    assert len({linear.weight.untyped_storage().data_ptr() for linear in linears}) == 1


def test_building_an_engine_draws_no_random_numbers(model: Any) -> None:
    before = torch.get_rng_state()
    engine_of(model)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("request_", "params", "message"),
    [
        (Request("a", (), (0, 0, 0)), SamplingParams(4), "found 0 prompt tokens"),
        (Request("a", (1,) * 61, (0, 0, 0)), SamplingParams(4), "found 61 prompt tokens.*at most 64"),
        (Request("a", (1, VOCAB), (0, 0, 0)), SamplingParams(4), "token ids 1 to 40"),
        (Request("a", (1, -1), (0, 0, 0)), SamplingParams(4), "token ids -1"),
        (Request("a", (1,), (-1, 0, 0)), SamplingParams(4), "noise_key"),
        (Request("a", (1,), (0, 0, 0)), SamplingParams(0), "max_response_tokens"),
        (Request("a", (1,), (0, 0, 0)), SamplingParams(4, temperature=-1.0), "temperature"),
        (Request("a", (1,), (0, 0, 0)), SamplingParams(4, top_p=0.0), "top_p"),
        (Request("a", (1,), (0, 0, 0)), SamplingParams(4, num_topk_log_probs=VOCAB + 1), "vocabulary of 40"),
    ],
)
def test_impossible_requests_are_refused_before_sampling(
    model: Any, request_: Request, params: SamplingParams, message: str
) -> None:
    with pytest.raises(RolloutError, match=message):
        engine_of(model).generate([*requests_of((3,)), request_], params)


def test_the_longest_prompt_that_fits_and_no_requests(model: Any) -> None:
    engine = engine_of(model)
    (completion,) = engine.generate(requests_of((60,)), SamplingParams(4))
    assert completion.tokens.numel() == 4
    assert engine.generate([], SamplingParams(4)) == []


def test_prompt_tokens_are_counted_over_calls(model: Any) -> None:
    engine, (request,) = engine_of(model), requests_of((4,))
    (begun,) = engine.generate([request], SamplingParams(2))
    engine.generate([*requests_of((3, 5)), replace(request, id="resumed", partial=begun)], SamplingParams(3))
    assert engine.counts == EngineCounts(num_prompt_tokens=4 + 3 + 5 + 4 + begun.tokens.numel())


def test_sliding_window_attention_is_refused() -> None:
    with pytest.raises(RolloutError, match="sliding_window"):
        TransformersEngine(moe_config(use_sliding_window=True, sliding_window=8), eos_token_ids=())
