"""Published models by names, shapes and sizes: no weight of them is needed, and none is here."""

import copy
import math
from typing import Any

import pytest
import torch
import transformers

from megatron_dppo.architectures.layout import layers_of_stages, layout_problems
from megatron_dppo.architectures.parameters import model_shape
from megatron_dppo.architectures.registry import family_of, model_sizes, variant_problems
from megatron_dppo.checkpoints.convert.stored_tensors import pieces_of
from megatron_dppo.config import ParallelConfig
from megatron_dppo.engines.embedded.engine import checkpoint_targets
from tests.support.published_models import DEEPSEEK_V3, GLM45_AIR, GLM47_FLASH, MOONLIGHT, PUBLISHED

published = pytest.mark.parametrize("name", PUBLISHED)


@published
def test_published_model_is_admitted_with_transformers_names_and_shapes(name: str) -> None:
    hf, _, _ = PUBLISHED[name]
    assert list(variant_problems(hf)) == []
    model_class: Any = getattr(transformers, hf["architectures"][0])
    own = {key: value for key, value in hf.items() if key != "quantization_config"}
    config = model_class.config_class(**copy.deepcopy(own))  # which writes into tables that it is given
    with torch.device("meta"):
        model = model_class(config)
    expected = {each: tuple(tensor.shape) for each, tensor in checkpoint_targets(model).items()}
    assert family_of(hf).hf_shapes(hf) == expected
    assert model_shape(hf).num_parameters == model.num_parameters()


@published
def test_parameter_count_matches_the_models_name(name: str) -> None:
    hf, billions, active = PUBLISHED[name]
    shape = model_shape(hf)
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.04)
    assert shape.num_active_parameters / 1e9 == pytest.approx(active, abs=1.7)  # with both vocabulary layers


@published
def test_each_tensor_is_in_one_piece_of_a_converted_checkpoint(name: str) -> None:
    hf, _, _ = PUBLISHED[name]
    pieces = list(pieces_of(hf))
    names = [each for piece in pieces for each in piece.hf]
    assert len(names) == len(set(names)) and set(names) == set(family_of(hf).hf_shapes(hf))
    wholes = {piece.key: math.prod(piece.whole) for piece in pieces}
    assert sum(piece.num_elements for piece in pieces) == sum(wholes.values())


@pytest.mark.parametrize("num_stages", range(1, 33))
@pytest.mark.parametrize("num_layers", [27, 46, 47, 48, 61, 92, 94])
def test_stages_share_the_layers_and_the_ends_have_no_more_than_the_others(
    num_layers: int, num_stages: int
) -> None:
    of_stages = layers_of_stages(num_layers, num_stages)
    if of_stages is None:
        assert num_layers % num_stages
        return
    assert len(of_stages) == num_stages and sum(of_stages) == num_layers
    assert min(of_stages) >= 1
    assert len(set(of_stages[1:-1])) <= 1
    assert of_stages[-1] <= of_stages[0] <= max(of_stages)


@pytest.mark.parametrize(
    ("hf", "parallel", "world_size"),
    [
        (MOONLIGHT, {"pipeline": 2, "expert": 4}, 8),
        (GLM47_FLASH, {"pipeline": 4, "expert": 8}, 32),
        (GLM45_AIR, {"tensor": 8, "pipeline": 4, "expert": 8, "expert_tensor": 1}, 64),
        (DEEPSEEK_V3, {"tensor": 8, "pipeline": 8, "expert": 32, "expert_tensor": 1}, 256),
        (DEEPSEEK_V3, {"pipeline": 16, "expert": 16}, 256),
    ],
)
def test_usual_layouts_are_admitted(hf: dict[str, Any], parallel: dict[str, int], world_size: int) -> None:
    assert layout_problems(ParallelConfig.model_validate(parallel), world_size, model_sizes(hf)) == []


@pytest.mark.parametrize(
    ("hf", "parallel", "found"),
    [
        (DEEPSEEK_V3, {"pipeline": 32, "expert": 1}, "parallel.pipeline * virtual_pipeline: found 32"),
        (MOONLIGHT, {"pipeline": 2, "virtual_pipeline": 2}, "parallel.pipeline * virtual_pipeline: found 4"),
        (GLM45_AIR, {"tensor": 16}, "key-value heads, 8"),
        (GLM47_FLASH, {"tensor": 8}, "attention heads, 20"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(hf: dict[str, Any], parallel: dict[str, int], found: str) -> None:
    problems = layout_problems(ParallelConfig.model_validate(parallel), 32, model_sizes(hf))
    assert any(found in str(problem) for problem in problems), list(map(str, problems))
