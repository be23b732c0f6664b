"""A checkpoint of our `torch` spec names its tensors as Megatron's Transformer Engine spec does."""

from pathlib import Path

import pytest

from megatron_dppo.runtime.process import Runtime
from tests.support.ranks import run_ranks
from tests.support.tiny import EXPERTS, LAYERS
from tests.support.tiny_families import write_family

ENDS = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"}
ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
}
HEAD_NORMS = {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
QKV_BIAS = {"self_attention.linear_qkv.bias"}
SPARSE = {
    "pre_mlp_layernorm.weight",
    "mlp.router.weight",
    "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.experts.linear_fc2.weight",
}
SIGMOID = SPARSE | {
    "mlp.router.expert_bias",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
}
LATENT = {
    "input_layernorm.weight",
    *(f"self_attention.linear_{x}_down_proj.weight" for x in ("q", "kv")),
    *(f"self_attention.linear_{x}_up_proj.layer_norm_weight" for x in ("q", "kv")),
    *(f"self_attention.linear_{x}_up_proj.weight" for x in ("q", "kv")),
    "self_attention.linear_proj.weight",
}
DENSE = {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}


def _layer(prefix: str, *parts: set[str]) -> set[str]:
    return {f"{prefix}{name}" for part in parts for name in part}


ALIKE, FIRST, SECOND, THIRD = "decoder.layers.", "decoder.layers.0.", "decoder.layers.1.", "decoder.layers.2."
MODELS = {
    "experts": ("Qwen3MoeForCausalLM", {}),
    "experts and a dense layer": ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1]}),
    "dense": ("Qwen3ForCausalLM", {}),
    "dense, biases, tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "shared experts": ("Glm4MoeForCausalLM", {}),
    "latent attention": ("DeepseekV3ForCausalLM", {}),
}
EXPECTED = {
    "experts": ENDS | _layer(ALIKE, ATTENTION, HEAD_NORMS, SPARSE),
    "experts and a dense layer": ENDS
    | _layer(FIRST, ATTENTION, HEAD_NORMS, SPARSE)
    | _layer(SECOND, ATTENTION, HEAD_NORMS, DENSE)
    | _layer(THIRD, ATTENTION, HEAD_NORMS, SPARSE),
    "dense": ENDS | _layer(ALIKE, ATTENTION, HEAD_NORMS, DENSE),
    "dense, biases, tied": (ENDS - {"output_layer.weight"}) | _layer(ALIKE, ATTENTION, QKV_BIAS, DENSE),
    "shared experts": ENDS
    | _layer(FIRST, ATTENTION, QKV_BIAS, DENSE)
    | _layer(SECOND, ATTENTION, QKV_BIAS, SIGMOID)
    | _layer(THIRD, ATTENTION, QKV_BIAS, SIGMOID),
    "latent attention": ENDS
    | _layer(FIRST, LATENT, DENSE)
    | _layer(SECOND, LATENT, SIGMOID)
    | _layer(THIRD, LATENT, SIGMOID),
}


def written(runtime: Runtime, folder: str, names: list[str]) -> dict[str, dict[str, tuple[int, ...]]]:
    """On one process: the global shape of each tensor in a checkpoint of each model."""
    import torch
    from megatron.core import dist_checkpointing

    from megatron_dppo.architectures.layout import Layout
    from megatron_dppo.architectures.registry import read_hf_config
    from megatron_dppo.checkpoints.megatron_folder import WEIGHTS, load_weights
    from megatron_dppo.mcore import cpu, fixes
    from megatron_dppo.mcore.groups import initialize_groups, megatron_sizes
    from megatron_dppo.models.build import build_model, transformer_config
    from tests.support.saving import save_weights

    cpu.install()
    fixes.apply()
    layout = Layout(world_size=1)
    initialize_groups(layout, seed=0)
    shapes = {}
    for name in names:
        model, out = Path(folder, name), Path(folder, f"{name}.megatron")
        hf = read_hf_config(model)
        chunks = build_model(hf, transformer_config(hf, torch.float32, megatron_sizes(layout), {}))
        load_weights(chunks, model, hf)
        save_weights(chunks, out, template=model)
        tensors = dist_checkpointing.load_tensors_metadata(str(out / WEIGHTS))
        shapes[name] = {key: tuple(tensor.global_shape) for key, tensor in tensors.items()}
    return shapes


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[int, ...]]]:
    folder = tmp_path_factory.mktemp("keys")
    for name, (architecture, changes) in MODELS.items():
        write_family(folder / name, architecture, **changes)
    return run_ranks(written, 1, folder, str(folder), list(MODELS))[0]


@pytest.mark.parametrize("name", MODELS)
def test_keys_equal_the_transformer_engine_spec(
    shapes: dict[str, dict[str, tuple[int, ...]]], name: str
) -> None:
    """The names follow from megatron.core 0.16.1, which builds that spec only if Transformer Engine imports.

    `models.gpt.gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec`: attention begins with a norm fused
    into `linear_qkv` (`input_layernorm` is an IdentityOp), so its weight is `linear_qkv.layer_norm_weight`, as
    `extensions.transformer_engine.TELayerNormColumnParallelLinear` calls it; `pre_mlp_layernorm` is a module of
    its own in a layer with experts and an IdentityOp in a dense one, whose `linear_fc1` has the norm fused
    (`get_mlp_module_spec_for_backend`); `q_layernorm` and `k_layernorm` exist with `qk_layernorm`.
    Latent attention has its `input_layernorm` apart, and the latents' norms fused into the projections up.
    `transformer.moe.experts.TEGroupedMLP.sharded_state_dict` stores all experts as `experts.linear_fc1` and
    `experts.linear_fc2`, below `transformer.moe.moe_layer.MoELayer.experts`; the router is their sibling.
    `transformer.transformer_block.TransformerBlock.sharded_state_dict` drops a layer's number where all layers
    are alike, and `models.common.language_module` stores a tied output layer as the embedding alone.

    Modules of both specs have `_extra_state` objects besides, not the same ones, empty without fp8: we never
    read them, and Megatron itself loads the other spec's checkpoint with `strict="log_all"`.
    """
    assert set(shapes[name]) == EXPECTED[name]


def test_experts_are_stored_as_one_tensor_with_axes_for_layers_and_experts(
    shapes: dict[str, dict[str, tuple[int, ...]]],
) -> None:
    width, hidden = 16, 32
    key = "mlp.experts.experts.linear_fc1.weight"
    assert shapes["experts"][f"{ALIKE}{key}"] == (LAYERS, EXPERTS, 2 * width, hidden)
    assert shapes["experts and a dense layer"][f"{FIRST}{key}"] == (EXPERTS, 2 * width, hidden)
