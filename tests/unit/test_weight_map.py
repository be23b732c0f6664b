"""The weight table against a hand-made layout and against what transformers writes; checkpoint folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_dppo.architectures.qwen3 import QWEN3_MOE
from megatron_dppo.architectures.weight_map import BACKBONE, DENSE_MLP
from megatron_dppo.architectures.weight_table import WeightTable
from megatron_dppo.checkpoints.hf_folder import INDEX, HFWeights, write_hf_checkpoint
from megatron_dppo.errors import ConversionError

QKV = next(rule for rule in BACKBONE if rule.fusion == "qkv")
GATE_UP = DENSE_MLP[0]


def table(heads: int = 4, groups: int = 2, head_dim: int = 3) -> WeightTable:
    of_attention = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head_dim}
    others = dict.fromkeys(("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"), 1)
    return QWEN3_MOE.weight_table(of_attention | others | {"max_position_embeddings": 1})


def test_qkv_is_interleaved_by_group() -> None:
    query = torch.arange(4.0)[:, None] * 10 + torch.arange(3.0)  # head h, row r: 10 h + r
    key, value = (torch.arange(2.0)[:, None] * 10 + torch.arange(3.0) + start for start in (100, 200))
    parts = [x.reshape(-1, 1) for x in (query, key, value)]
    fused = table().fuse(QKV, parts)[:, 0].tolist()
    group_0 = [0, 1, 2, 10, 11, 12, 100, 101, 102, 200, 201, 202]
    group_1 = [20, 21, 22, 30, 31, 32, 110, 111, 112, 210, 211, 212]
    assert fused == group_0 + group_1


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (8, 1), (32, 4)])
@pytest.mark.parametrize("columns", [(), (5,)])
def test_unfuse_inverts_fuse(heads: int, groups: int, columns: tuple[int, ...]) -> None:
    weights = table(heads, groups)
    parts = [torch.randn(n * 3, *columns) for n in (heads, groups, groups)]
    back = weights.unfuse(QKV, weights.fuse(QKV, parts))
    assert all(torch.equal(x, y) for x, y in zip(parts, back, strict=True))
    pair = [torch.randn(6, 2), torch.randn(6, 2)]
    assert all(
        torch.equal(x, y)
        for x, y in zip(pair, weights.unfuse(GATE_UP, weights.fuse(GATE_UP, pair)), strict=True)
    )


def test_half_of_the_tensors_make_half_of_the_parameter() -> None:
    weights = table(8, 4)
    parts = [torch.randn(n * 3, 5) for n in (8, 4, 4)]
    halves = [weights.fuse(QKV, [part.chunk(2)[rank] for part in parts], 2) for rank in range(2)]
    assert torch.equal(torch.cat(halves), weights.fuse(QKV, parts))
    back = zip(*(weights.unfuse(QKV, half) for half in halves), strict=True)
    assert all(torch.equal(torch.cat(pair), part) for pair, part in zip(back, parts, strict=True))


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(ConversionError, match=r"mlp.shared_experts"):
        table().entry("decoder.layers.0.mlp.shared_experts.weight")


def model_folder(folder: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = dict(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        moe_intermediate_size=4,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings | changes)).save_pretrained(folder)
    return folder


def test_a_folder_is_written_in_shards_and_read_back(tmp_path: Path) -> None:
    source = HFWeights(model_folder(tmp_path / "source"))
    pairs = [(name, source.tensor(name)) for name in sorted(source.names)]
    write_hf_checkpoint(iter(pairs), tmp_path / "out", template=tmp_path / "source", shard_bytes=2000)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    back = HFWeights(tmp_path / "out")
    assert back.names == source.names
    assert all(torch.equal(tensor, back.tensor(name)) for name, tensor in pairs)
    assert json.loads((tmp_path / "out" / INDEX).read_text())["metadata"]["total_size"] == sum(
        t.numel() * 4 for _, t in pairs
    )
    assert Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out") is not None
    with pytest.raises(ConversionError, match="exists"):
        write_hf_checkpoint(iter(pairs), tmp_path / "out", template=tmp_path / "source")


def test_a_failed_write_leaves_no_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "source")

    def breaks() -> Any:
        yield "a", torch.zeros(2)
        raise RuntimeError("the gather failed")

    with pytest.raises(RuntimeError):
        write_hf_checkpoint(breaks(), tmp_path / "out", template=folder)
    assert not (tmp_path / "out").exists()


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"no \*.safetensors"):
        HFWeights(tmp_path)
    folder = model_folder(tmp_path / "m")
    with pytest.raises(ConversionError, match="'nothing' is missing"):
        HFWeights(folder).tensor("nothing")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ConversionError, match=r"gone.safetensors"):
        HFWeights(folder)
    (folder / INDEX).unlink()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConversionError, match="torn"):
        HFWeights(folder)
