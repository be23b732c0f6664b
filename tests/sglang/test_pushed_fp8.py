"""A push of 8-bit floats with block scales fills a server as a fresh load does, in place, for every family."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_dppo.architectures.registry import FAMILIES, QUANTIZED, family_of
from megatron_dppo.checkpoints.block_fp8 import BlockFP8, quantize_blocks
from megatron_dppo.checkpoints.hf_folder import HFWeights, write_hf_checkpoint
from megatron_dppo.engines.sglang.model import has_own_output
from megatron_dppo.engines.sglang.options import server_environment, shipped_options
from megatron_dppo.engines.sglang.quantization import METHODS
from megatron_dppo.engines.sglang.server import free_port
from megatron_dppo.engines.weight_sync.factory import travelling_together, with_own_output
from megatron_dppo.engines.weight_sync.transports import Buffer
from tests.sglang.test_parameters import complete_config
from tests.support.serving import PYTHON, ROOT
from tests.support.tiny_families import write_family

SCRIPT = Path(__file__).with_name("fp8_reading.py")
WIDE: dict[str, Any] = {
    "hidden_size": 192,  # one whole block and a half
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 128,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 128}
OWN: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": EXPERTS,
    "Qwen2MoeForCausalLM": EXPERTS | {"shared_expert_intermediate_size": 128},
    "Glm4MoeForCausalLM": EXPERTS,
    "DeepseekV3ForCausalLM": LATENT | {"q_lora_rank": 128},
    "Glm4MoeLiteForCausalLM": LATENT | {"q_lora_rank": 128},
}
IN_PART = "Qwen3MoeForCausalLM, in part, powers of two"
IGNORED = ("model.layers.1.mlp.experts.0.up_proj", "layers.0.self_attn.o_proj")
CASES: dict[str, tuple[dict[str, Any], BlockFP8]] = {
    **{
        name: (OWN.get(name, {}), BlockFP8())
        for name, family in FAMILIES.items()
        # One is published in MXFP4, and layers with linear attention are set up for a CPU in another way.
        if not family.has_interleaved_stacks and "linear_attention" not in family.layer_types
    },
    IN_PART: (EXPERTS, BlockFP8(IGNORED, is_power_of_two=True)),
    "DeepseekV3ForCausalLM, no query rank": (LATENT | {"q_lora_rank": None}, BlockFP8()),
}


def write_pair(folder: Path, case: str) -> None:
    """Two quantised folders of other weights, and the buckets in which a push sends the second one's."""
    architecture, (changes, form) = case.split(",")[0], CASES[case]
    if FAMILIES[architecture].sglang.derives_head_dim:
        changes = changes | {"hidden_size": 256}
    first = write_family(folder / "plain", architecture, torch.bfloat16, **WIDE | changes)
    hf = complete_config(first, architecture, **{QUANTIZED: form.described()})
    stored = HFWeights(first)
    weights = [{name: stored.tensor(name) for name in family_of(hf).hf_shapes(hf)}]
    weights.append({name: tensor * 2.7 + 0.01 for name, tensor in weights[0].items()})
    for name, of_folder in zip(("first", "second"), weights, strict=True):
        write_hf_checkpoint(form.quantized(of_folder.items()), folder / name, first)
    sent = with_own_output(weights[1].items()) if has_own_output(hf) else weights[1].items()
    (folder / "pushed").mkdir()
    buckets = Buffer(60_000, together=travelling_together(hf)).fill(form.quantized(sent))
    for index, bucket in enumerate(buckets):
        parts = bucket.flat.split([torch.Size(shape).numel() for shape in bucket.shapes])
        tensors = {
            n: part.view(s).clone() for n, s, part in zip(bucket.names, bucket.shapes, parts, strict=True)
        }
        save_file(tensors, folder / "pushed" / f"{index:05d}.safetensors")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script prints, of every form."""
    folder = tmp_path_factory.mktemp("fp8")
    for number, case in enumerate(CASES):
        write_pair(folder / str(number), case)
    weight = torch.randn(300, 200, dtype=torch.bfloat16) * 0.03
    weight[:128, :128] = 0
    tensors = {"weight": weight}
    for name, is_power_of_two in (("plain", False), ("ue8m0", True)):
        values, scales = quantize_blocks(weight, is_power_of_two=is_power_of_two)
        tensors |= {f"{name}.values": values, f"{name}.scales": scales}
    save_file(tensors, folder / "weight.safetensors")
    cases = [str(folder / str(number)) for number in range(len(CASES))]
    done = subprocess.run(
        [
            str(PYTHON),
            "-W",
            "ignore",
            str(SCRIPT),
            str(free_port()),
            str(folder / "weight.safetensors"),
            *cases,
        ],
        env=server_environment(is_on_cpu=True) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout.splitlines()[-1])
    return content | {"cases": dict(zip(CASES, content["cases"], strict=True))}


def test_a_push_leaves_what_a_fresh_load_leaves(found: dict[str, Any]) -> None:
    nothing: dict[str, list[str]] = {"differ": [], "unchanged": [], "moved": []}
    of_cases = {case: {key: of_case[key] for key in nothing} for case, of_case in found["cases"].items()}
    refused = {name for name, family in FAMILIES.items() if family.sglang.drops_block_scales}
    for name in refused:
        scales = of_cases.pop(name)["unchanged"]
        assert scales and all(scale.endswith("weight_scale_inv") for scale in scales)
    assert of_cases == dict.fromkeys(CASES.keys() - refused, nothing)


def test_sglang_quantises_the_linears_that_a_push_quantises(found: dict[str, Any]) -> None:
    whole, part = (found["cases"][case]["quantised"] for case in ("Qwen3MoeForCausalLM", IN_PART))
    assert len(whole) == 2 * 4  # qkv, o, w13 and w2 of each layer
    assert set(whole) - set(part) == {
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.1.mlp.experts.w13_weight",
        "model.layers.1.mlp.experts.w2_weight",
    }


def test_fp8_values_and_scales_equal_sglangs(found: dict[str, Any]) -> None:
    assert found["scaling"] and all(found["scaling"].values())


def test_weights_quantised_by_a_server_cannot_be_loaded_again_and_blocks_can(found: dict[str, Any]) -> None:
    assert found["keep"] == {"fp8": False, "w8a8_fp8": False, "blocks": True}


def test_every_method_is_known(found: dict[str, Any]) -> None:
    named = {
        name
        for version in ("0.5.22", "0.5.23")
        for name in shipped_options(version)["quantization"].choices or ()
    }
    assert named | set(found["methods"]) == set(METHODS)
