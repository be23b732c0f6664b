"""Which variants of each architecture are admitted, and that their rotary frequencies are transformers'."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from examples.make_tiny import OWN_SIZES
from megatron_dppo.architectures.deepseek_v3 import DEEPSEEK_V3
from megatron_dppo.architectures.gpt_oss import GPT_OSS
from megatron_dppo.architectures.parameters import model_shape
from megatron_dppo.architectures.published_names import stays_float32
from megatron_dppo.architectures.qwen3 import QWEN3
from megatron_dppo.architectures.registry import (
    FAMILIES,
    family_of,
    model_sizes,
    read_hf_config,
    read_model_sizes,
    variant_problems,
)
from megatron_dppo.architectures.sizes import rope_scaling_factor
from megatron_dppo.engines.embedded.engine import checkpoint_targets
from megatron_dppo.errors import ConfigError, ConversionError
from tests.support.published_models import GPT_OSS_20B, PUBLISHED

SIZES: dict[str, Any] = dict(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    moe_intermediate_size=4,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    num_experts=4,
    num_experts_per_tok=2,
    tie_word_embeddings=False,
)
SIGMOID: dict[str, Any] = dict(n_routed_experts=4, n_shared_experts=2, first_k_dense_replace=1)
LATENT: dict[str, Any] = SIGMOID | dict(
    num_key_value_heads=4,
    q_lora_rank=5,
    kv_lora_rank=3,
    qk_nope_head_dim=6,
    qk_rope_head_dim=2,
    v_head_dim=7,
    n_group=1,
    topk_group=1,
)
HYBRID: dict[str, Any] = dict(
    full_attention_interval=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=3,
    linear_value_head_dim=5,
    linear_conv_kernel_dim=4,
)
OWN: dict[str, dict[str, Any]] = {
    "Glm4MoeForCausalLM": SIGMOID | dict(attention_bias=True),
    "DeepseekV3ForCausalLM": LATENT,
    "Glm4MoeLiteForCausalLM": {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
    "MixtralForCausalLM": dict(num_local_experts=4),
    "Qwen2MoeForCausalLM": dict(num_experts=4, shared_expert_intermediate_size=24),
    "MiniMaxM2ForCausalLM": dict(num_local_experts=4),
    "GptOssForCausalLM": dict(num_local_experts=4),
    "Qwen3NextForCausalLM": dict(num_experts=4, shared_expert_intermediate_size=24, **HYBRID),
    "Qwen3_5ForCausalLM": HYBRID,
    "Qwen3_5MoeForCausalLM": dict(num_experts=4, shared_expert_intermediate_size=24, **HYBRID),
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN: dict[str, Any] = PUBLISHED["DeepSeek-V3"][0]["rope_scaling"]
LATENTS = ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
LLAMA_3_1: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "max_position_embeddings": 131072,
    "rope_theta": 5e5,
    "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
}


def variant_of_tiny_model(architecture: str) -> dict[str, Any]:
    """What the family's tiny model sets of the keys that select a variant."""
    own, variants = OWN_SIZES.get(architecture, {}), FAMILIES[architecture].variants
    return {key: value for key, value in own.items() if key in variants}


def written_by_transformers(architecture: str, folder: Path) -> dict[str, Any]:
    config = getattr(transformers, architecture).config_class(architectures=[architecture])
    config.save_pretrained(folder)
    return transformers.PreTrainedConfig.get_config_dict(folder)[0] | variant_of_tiny_model(architecture)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_each_has_a_family_and_its_usual_variant_is_admitted(architecture: str, tmp_path: Path) -> None:
    hf = written_by_transformers(architecture, tmp_path) | {"norm_topk_prob": True}
    assert family_of(hf).architecture == architecture
    assert list(variant_problems(hf)) == []
    assert rope_scaling_factor(hf) is None


@pytest.mark.parametrize(
    ("architecture", "changes", "found"),
    [
        *[(name, {"hidden_act": "gelu"}, "hidden_act = 'gelu'") for name in FAMILIES],
        *[(name, {"quantization_config": {}}, "quantization_config") for name in FAMILIES],
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("Qwen3ForCausalLM", {"attention_bias": True}, "attention_bias = True"),
        ("Qwen3ForCausalLM", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, "use_sliding_window = True"),
        (
            "Qwen2ForCausalLM",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types with sliding_attention",
        ),
        ("LlamaForCausalLM", {"attention_bias": True}, "attention_bias = True"),
        ("LlamaForCausalLM", {"mlp_bias": True}, "mlp_bias = True"),
        ("LlamaForCausalLM", {"pretraining_tp": 2}, "pretraining_tp = 2"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ("LlamaForCausalLM", {"rope_scaling": [2.0]}, "a rope of [[2.0]]"),
        ("LlamaForCausalLM", {"rope_scaling": {**LLAMA3, "factor": None}}, "factor = None"),
        ("LlamaForCausalLM", {"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}}, "low_freq_factor = 2.0"),
        ("LlamaForCausalLM", {"rope_scaling": {**LLAMA3, "high_freq_factor": None}}, "high_freq_factor = None"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 4096},
            "original_max_position_embeddings = 4096",
        ),
        ("LlamaForCausalLM", {"rope_scaling": YARN}, "rope_type = 'yarn'"),
        ("DeepseekV3ForCausalLM", {"rope_scaling": LLAMA3}, "rope_type = 'llama3'"),
        ("DeepseekV3ForCausalLM", {"rope_scaling": {**YARN, "factor": None}}, "factor = None"),
        ("DeepseekV3ForCausalLM", {"rope_scaling": {**YARN, "truncate": False}}, "truncate = False"),
        (
            "DeepseekV3ForCausalLM",
            {"rope_scaling": {**YARN, "attention_factor": 1.2}},
            "attention_factor = 1.2",
        ),
        ("DeepseekV3ForCausalLM", {"rope_scaling": {**YARN, "mscale": None}}, "mscale_all_dim and no mscale"),
        ("DeepseekV3ForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("DeepseekV3ForCausalLM", {"num_experts_per_tok": 4}, "topk_group = 4 of n_group = 8"),
        ("Glm4MoeForCausalLM", {"n_group": 4, "topk_group": 2}, "topk_group = 2 of n_group = 4"),
        ("Glm4MoeForCausalLM", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
        *[(name, {"rope_interleave": False}, "rope_interleave = False") for name in LATENTS],
        *[(name, {"attention_bias": True}, "attention_bias = True") for name in LATENTS],
        *[
            (name, {"norm_topk_prob": False}, "norm_topk_prob = False")
            for name in ("Glm4MoeForCausalLM", *LATENTS)
        ],
        *[(name, {"scoring_func": "softmax"}, "scoring_func = 'softmax'") for name in LATENTS],
        (
            "DeepseekV3ForCausalLM",
            {"num_attention_heads": 4, "num_key_value_heads": 2},
            "num_key_value_heads = 2",
        ),
        ("MixtralForCausalLM", {"sliding_window": 4096}, "sliding_window = 4096"),
        ("Qwen2MoeForCausalLM", {"qkv_bias": False}, "qkv_bias = False"),
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [1, 0]}, "attn_type_list with [0]"),
        ("MiniMaxM2ForCausalLM", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("MiniMaxM2ForCausalLM", {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'"),
        ("MiniMaxM2ForCausalLM", {"shared_intermediate_size": 8}, "shared_intermediate_size = 8"),
        ("MiniMaxM2ForCausalLM", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
        ("GptOssForCausalLM", {"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5"),
        ("GptOssForCausalLM", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
        ("GptOssForCausalLM", {"sliding_window": 0}, "sliding_window = 0"),
        ("GptOssForCausalLM", {"swiglu_limit": 0.0}, "swiglu_limit = 0.0"),
        ("GptOssForCausalLM", {"rope_scaling": LLAMA3}, "rope_type = 'llama3'"),
        ("GptOssForCausalLM", {"rope_scaling": {"rope_type": "default"}}, "rope_type = 'default'"),
        ("GptOssForCausalLM", {"rope_scaling": {**YARN, "attention_factor": 1.2}}, "attention_factor = 1.2"),
        ("GptOssForCausalLM", {"layer_types": ["chunked_attention"]}, "layer_types with chunked_attention"),
        (
            "GptOssForCausalLM",
            {"layer_types": ["full_attention"], "num_hidden_layers": 2},
            "layer_types of 1 layers",
        ),
        (
            "GptOssForCausalLM",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "quantization_config",
        ),
        *[
            (name, {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config")
            for name in FAMILIES
            if name != "GptOssForCausalLM"
        ],
        ("Qwen3NextForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("Qwen3NextForCausalLM", {"linear_num_value_heads": 24}, "linear_num_value_heads = 24"),
        (
            "Qwen3NextForCausalLM",
            {"num_hidden_layers": 2, "layer_types": ["linear_attention"]},
            "layer_types of 1 layers",
        ),
        (
            "Qwen3NextForCausalLM",
            {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 3},
            "linear_attention in all 2 layers",
        ),
        ("Qwen3NextForCausalLM", {"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ("Qwen3NextForCausalLM", {"attention_bias": True}, "attention_bias = True"),
        ("Qwen3_5ForCausalLM", {"attn_output_gate": False}, "attn_output_gate = False"),
        ("Qwen3_5MoeForCausalLM", {"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'"),
        ("MixtralForCausalLM", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (
            "LlamaForCausalLM",
            {"rope_theta": 1e4, "rope_parameters": LLAMA3},
            "rope_theta of [10000.0, 500000.0]",
        ),
        (
            "LlamaForCausalLM",
            {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling and another rope_parameters",
        ),
    ],
)
def test_other_variants_are_refused(architecture: str, changes: Mapping[str, Any], found: str) -> None:
    hf = {
        "architectures": [architecture],
        "norm_topk_prob": True,
        **variant_of_tiny_model(architecture),
        **changes,
    }
    assert [found in problem.found for problem in variant_problems(hf)] == [True], list(variant_problems(hf))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"mlp_only_layers": [1]},
        {"use_qk_norm": True, "attention_bias": False},
        {"q_lora_rank": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_rules_have_the_names_shapes_and_parameters_of_transformers(
    architecture: str, changes: dict[str, Any]
) -> None:
    model_class = getattr(transformers, architecture)
    settings = SIZES | OWN.get(architecture, {}) | changes
    if "kv_lora_rank" in settings:
        del settings["head_dim"]
    config = model_class.config_class(**settings)
    with torch.device("meta"):
        model = model_class(config)
    expected = {name: tuple(tensor.shape) for name, tensor in checkpoint_targets(model).items()}
    expected = {name: shape for name, shape in expected.items() if 0 not in shape}
    hf = config.to_dict() | {"architectures": [architecture]}
    assert family_of(hf).hf_shapes(hf) == expected
    assert model_shape(hf).num_parameters == model.num_parameters()


def test_an_architecture_without_a_family_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(ConfigError, match=r"Qwen3MoeForCausalLM or"):
        family_of({"architectures": ["BertForMaskedLM"]})


def test_block_wise_8_bit_weights_are_admitted_and_described_as_they_are_read(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    hf = {"architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "float8", "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    assert read_hf_config(tmp_path) == {"architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "bfloat16"}
    assert list(variant_problems(hf | {"quantization_config": {**config, "weight_block_size": [64, 64]}}))


def test_mxfp4_is_admitted_and_described_as_it_is_read(tmp_path: Path) -> None:
    hf = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    assert read_hf_config(tmp_path) == {"architectures": ["GptOssForCausalLM"]}


@pytest.mark.parametrize("is_truncated", [False, True])
@pytest.mark.parametrize(("factor", "head_dim"), [(32.0, 64), (4.0, 16)])
def test_yarn_s_frequencies_of_whole_heads_are_those_of_transformers(
    factor: float, head_dim: int, is_truncated: bool
) -> None:
    from megatron_dppo.mcore import cpu
    from megatron_dppo.models.build import yarn_embedding

    cpu.install()
    rope = GPT_OSS.defaults["rope_parameters"] | {"factor": factor, "truncate": is_truncated}
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](
        transformers.GptOssConfig(head_dim=head_dim, rope_parameters=dict(rope))
    )
    hf = {"architectures": ["GptOssForCausalLM"], "rope_scaling": rope, "head_dim": head_dim}
    assert list(variant_problems(hf)) == []
    found, own_scale = yarn_embedding(GPT_OSS_20B | hf).get_emb(2)
    assert own_scale == pytest.approx(scale, rel=1e-12)
    torch.testing.assert_close(found[1, 0, 0, : head_dim // 2], expected, rtol=1e-6, atol=0)


def test_expert_biases_come_last_and_latents_side_by_side() -> None:
    hf = SIZES | LATENT | {"architectures": ["DeepseekV3ForCausalLM"], "max_position_embeddings": 64}
    names, together = list(DEEPSEEK_V3.hf_shapes(hf)), DEEPSEEK_V3.travelling_together(hf)
    assert [stays_float32(name) for name in names] == [False] * (len(names) - 2) + [True] * 2
    pairs = [
        [name for name in names if together.get(name) == group] for group in dict.fromkeys(together.values())
    ]
    assert [[name.split(".")[-2] for name in pair] for pair in pairs] == [
        ["q_a_proj", "kv_a_proj_with_mqa"]
    ] * 3
    assert all(names.index(second) == names.index(first) + 1 for first, second in pairs)


@pytest.mark.parametrize(
    "said", [{}, {"num_nextn_predict_layers": 0}, {"num_nextn_predict_layers": 1}], ids=str
)
def test_layers_that_predict_further_tokens_are_left_out_whatever_config_json_says(
    said: dict[str, int],
) -> None:
    of_model = ["model.layers.2.mlp.gate.weight", "model.layers.4.mlp.gate.weight", "lm_head.weight"]
    further = ["model.layers.3.eh_proj.weight", "model.layers.3.mlp.gate.weight", "mtp.layers.0.fc.weight"]
    for family in FAMILIES.values():
        assert family.left_out([*of_model, *further], {"num_hidden_layers": 3, **said}) == set(further)


@pytest.mark.parametrize("num_layers", [2, 4])
def test_layers_beyond_those_of_the_config_are_named(num_layers: int) -> None:
    hf = SIZES | {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 64}
    found = QWEN3.hf_shapes(hf)
    with pytest.raises(ConversionError, match=rf"layers 0 to 2, .* num_hidden_layers = {num_layers}"):
        QWEN3.require_shapes(
            hf | {"num_hidden_layers": num_layers}, found, Path("model"), Path("model").joinpath
        )


def test_a_file_that_holds_no_tensor_of_the_model_is_named() -> None:
    hf = SIZES | {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 64}
    found = QWEN3.hf_shapes(hf)
    stray = {"layers.0.attention.wq.weight": (3, 3)}

    def file_of(name: str) -> Path:
        return Path("model", "consolidated.safetensors" if name in stray else "model.safetensors")

    with pytest.raises(ConversionError, match=r"consolidated\.safetensors"):
        QWEN3.require_shapes(hf, found | stray, Path("model"), file_of)


REQUIRED = {
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "num_local_experts", "num_experts"),
    *("n_routed_experts", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "max_position_embeddings",
}
"""Sizes that config.json must have: a default of transformers for them would be of another model."""


@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_key_that_config_json_leaves_out_has_the_value_of_transformers(architecture: str, scale: int) -> None:
    """With all keys of transformers' config class and with the sizes alone, the model is the same."""
    config_class, family = getattr(transformers, architecture).config_class, FAMILIES[architecture]
    hidden_size = scale * config_class().hidden_size  # 2: a derived head_dim differs from a default one
    whole = config_class(hidden_size=hidden_size).to_dict() | {"architectures": [architecture]}
    sizes_alone = {key: value for key, value in whole.items() if key in REQUIRED | {"architectures"}}
    assert family.sizes_of(sizes_alone) == family.sizes_of(whole)
    assert family.megatron_config(sizes_alone) == family.megatron_config(whole)
    assert list(variant_problems(sizes_alone)) == list(variant_problems(whole))
    defaults = dict(family.defaults) | {key: default for key, (default, _) in family.variants.items()}
    compared = {key: value for key, value in defaults.items() if key in whole and value is not None}
    assert compared == {key: whole[key] for key in compared}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_size_that_config_json_leaves_out_is_named(architecture: str, tmp_path: Path) -> None:
    whole = getattr(transformers, architecture).config_class().to_dict() | {"architectures": [architecture]}
    for key in REQUIRED & whole.keys():
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in whole.items() if k != key}))
        if key == "intermediate_size" and len(model_sizes(whole).moe_layers) == whole["num_hidden_layers"]:
            continue  # of no dense layer
        if (architecture, key) == ("Qwen3MoeForCausalLM", "num_local_experts"):
            continue  # a dense model of this architecture
        with pytest.raises(ConfigError, match=rf"no {key}"):
            read_model_sizes(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "changes", "found"),
    [
        ("DeepseekV3ForCausalLM", {"routed_scaling_factor": None}, "routed_scaling_factor = null"),
        ("Glm4MoeForCausalLM", {"n_group": None}, "n_group = null"),
        ("LlamaForCausalLM", {"rms_norm_eps": None}, "rms_norm_eps = null"),
    ],
)
def test_null_is_refused_where_transformers_refuses_it(
    architecture: str, changes: dict[str, Any], found: str
) -> None:
    problems = list(variant_problems({"architectures": [architecture], **changes}))
    assert [found in problem.found for problem in problems] == [True], problems


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_base_of_rotary_frequencies_is_read_from_either_table(key: str) -> None:
    hf = SIZES | {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}
    assert model_sizes(hf | {key: {"rope_type": "default", "rope_theta": 5e5}}).rope_theta == 5e5


def test_weights_of_another_config_are_refused_before_any_is_read() -> None:
    hf = SIZES | {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 64}
    found, where = QWEN3.hf_shapes(hf), (Path("model"), lambda name: Path("model", f"{name}.safetensors"))
    QWEN3.require_shapes(hf, found, *where)
    with pytest.raises(ConversionError, match=r"model: 1 .*lm_head\.weight"):
        QWEN3.require_shapes(hf, {n: s for n, s in found.items() if n != "lm_head.weight"}, *where)
    with pytest.raises(
        ConversionError,
        match=r"'lm_head.weight' .*\(1, 2\); expected \(11, 8\)",
    ):
        QWEN3.require_shapes(hf, found | {"lm_head.weight": (1, 2)}, *where)


def test_qwen2_has_no_attention_bias_to_switch() -> None:
    assert list(variant_problems({"architectures": ["Qwen2ForCausalLM"], "attention_bias": False})) == []


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_frequencies_are_those_of_transformers(factor: float, head_dim: int) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    hf = LLAMA_3_1 | {"rope_scaling": {**LLAMA_3_1["rope_scaling"], "factor": factor}, "head_dim": head_dim}
    assert list(variant_problems(hf)) == []
    assert rope_scaling_factor(hf) == factor
    base: Any = 5e5
    make: Callable[..., Any] = RotaryEmbedding
    ours = make(
        head_dim,
        1.0,
        rotary_base=base,
        rope_scaling=True,
        rope_scaling_factor=factor,
        use_cpu_initialization=True,
    ).inv_freq
    plain = make(head_dim, 1.0, rotary_base=base, use_cpu_initialization=True).inv_freq
    theirs, scale = ROPE_INIT_FUNCTIONS["llama3"](transformers.LlamaConfig(**hf))
    assert scale == 1.0
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert float((plain / theirs).max()) == pytest.approx(factor), "low frequencies are divided by the factor"
