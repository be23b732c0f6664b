"""Which layer spec a config comes to, and which fused kernels a model is built with."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.architectures.megatron_options import (
    choose_layer_spec,
    shares_prefixes,
    transformer_engine_limits,
)
from megatron_dppo.architectures.registry import model_sizes
from megatron_dppo.config import Config
from megatron_dppo.models.build import fusions
from megatron_dppo.runtime.libraries import Libraries, Library
from tests.support.plan_models import QWEN3_30B
from tests.support.published_models import QWEN3_NEXT
from tests.support.refusals import refused

USABLE, ABSENT = Library(), Library("ModuleNotFoundError: No module named 'transformer_engine'")


def _config(spec: str, **tables: Any) -> Config:
    model = {"layer_spec": spec} | tables.pop("model", {})
    return Config.model_validate({"model": model, **tables})


@pytest.mark.parametrize(
    ("tables", "library", "name", "reason"),
    [
        ({}, USABLE, "transformer_engine", "can be used"),
        ({}, ABSENT, "torch", "No module named"),
        ({"lora": {"rank": 8}}, USABLE, "torch", "lora.rank: 8"),
        ({"model": {"dtype": "float32"}}, USABLE, "torch", "exact"),
        ({"parallel": {"context": 2}}, USABLE, "torch", "context"),
    ],
)
def test_auto_chooses_a_capable_spec(tables: dict[str, Any], library: Library, name: str, reason: str) -> None:
    choice = choose_layer_spec(_config("auto", **tables), library)
    assert choice.name == name and reason in choice.reason


def test_several_ranks_of_a_sequence_are_refused() -> None:
    assert not list(transformer_engine_limits(_config("transformer_engine")))
    split = _config("transformer_engine", parallel={"context": 2})
    (problem,) = transformer_engine_limits(split)
    assert problem.where == "parallel.context" and "ring" in problem.expected
    assert "1" in problem.action and "model.layer_spec = 'torch'" in problem.action


@pytest.mark.parametrize("spec", ["torch", "transformer_engine"])
def test_explicit_spec_is_used(spec: str) -> None:
    assert choose_layer_spec(_config(spec), USABLE).name == spec


@pytest.mark.parametrize(
    ("spec", "parallel", "model", "is_shared"),
    [
        ("torch", {}, QWEN3_30B, True),
        ("transformer_engine", {}, QWEN3_30B, False),
        ("torch", {"context": 2}, QWEN3_30B, False),
        ("torch", {}, QWEN3_NEXT, False),
        ("torch", {"share_prefixes": False}, QWEN3_30B, False),
        ("torch", {"share_prefixes": True}, QWEN3_30B, True),
    ],
)
def test_prefixes_are_shared_if_supported(
    spec: Any, parallel: dict[str, Any], model: dict[str, Any], is_shared: bool
) -> None:
    """Before a GPU is there, "auto" is taken to be torch's layers."""
    sizes = model_sizes(model)
    assert shares_prefixes(_config("auto", parallel=parallel), sizes, spec) == is_shared
    assert shares_prefixes(_config(spec, parallel=parallel), sizes) == is_shared
    if spec == "torch":
        assert shares_prefixes(_config("auto", parallel=parallel), sizes) == is_shared


@pytest.mark.parametrize(
    ("wanted", "spec", "is_shared"),
    [(None, "transformer_engine", False), (False, "transformer_engine", False), (True, "torch", True)],
)
def test_auto_prefers_transformer_engine_unless_prefixes_must_be_shared(
    wanted: bool | None, spec: str, is_shared: bool
) -> None:
    config = _config("auto", parallel={"share_prefixes": wanted})
    choice = choose_layer_spec(config, USABLE)
    assert (choice.name, shares_prefixes(config, None, choice.name)) == (spec, is_shared)


def test_ranks_that_differ_do_not_start() -> None:
    from megatron_dppo.models.build import agreed_layer_spec

    runtime: Any = SimpleNamespace(all_gather=lambda name: [name, "transformer_engine"])
    with refused("model.layer_spec", "torch on rank 0, transformer_engine on rank 1"):
        agreed_layer_spec(_config("auto"), runtime)


def test_kernels_of_attention_are_logged_and_the_same_on_ranks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from megatron_dppo.models.build import agreed_layer_spec

    caplog.set_level(logging.INFO)
    sizes, cpu = model_sizes(QWEN3_30B), torch.device("cpu")
    alike: Any = SimpleNamespace(device=cpu, all_gather=lambda name: [name, name])
    agreed_layer_spec(_config("torch"), alike, sizes)
    assert "attention: padded batches: torch.bfloat16 on cpu, heads of 128" in caplog.messages
    mixed: Any = SimpleNamespace(device=cpu, all_gather=lambda name: [name, "torch, FlashAttention-3"])
    with refused("model.layer_spec", "torch, padded batches", "torch, FlashAttention-3 on rank 1"):
        agreed_layer_spec(_config("torch"), mixed, sizes)


@pytest.mark.parametrize("kernel", [USABLE, ABSENT])
def test_weight_gradients_are_fused_with_apexs_kernel_alone(kernel: Library) -> None:
    made = fusions(
        Libraries(transformer_engine=USABLE, apex=USABLE, fused_weight_gradient=kernel, deep_ep=ABSENT)
    )
    assert [name for name, is_on in made.items() if is_on] == (
        ["gradient_accumulation_fusion"] if kernel.is_usable else []
    )
