"""At full size: what `megatron-dppo check` and `plan` say where the models and data are in place."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from experiments import ALGORITHMS, EXPERIMENTS, ROOT, Algorithm, model_of
from published_models import PUBLISHED

from megatron_dppo.checks import check
from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.plan import Machine, Options, make_plan

GB = 10**9
HOST_BYTES = 2000 * GB
FEWEST_GPUS = dict.fromkeys(EXPERIMENTS, 8) | dict.fromkeys(
    ("moe_base", "moe_base_r3", "moe_thinking", "moe_base_lora", "topk_ablation"), 16
)
"""Of 80 GB each, on nodes of eight, on which an experiment fits as it stands."""
DATA = (
    *("dapo_math_17k", "math_sanity", "math", "gem"),
    *("aime24", "aime25", "aime24_r1_distill", "aime25_r1_distill"),
)


@pytest.fixture(scope="module", autouse=True)
def downloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Models without their weights, and data sets of one problem, where the configs look for them."""
    folder = tmp_path_factory.mktemp("downloaded")
    for name, content in PUBLISHED.items():
        model = folder / "models" / name
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(content))
        (model / "tokenizer.json").write_text("{}")
        (model / "model.safetensors").touch()
    (folder / "data").mkdir()
    for name in DATA:
        row = {"id": "1", "prompt": "What is 1 + 1?", "answer": "2"}
        (folder / "data" / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def load(*layers: Path) -> Config:
    """The files of the repository, from the folder in which a user would stand."""
    return load_config([ROOT / layer for layer in layers])


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_check_finds_no_fault(algorithm: Algorithm) -> None:
    fewest = FEWEST_GPUS[algorithm.experiment]
    for num_gpus in {fewest, 16}:
        assert check(load(*algorithm.layers), num_gpus) == []


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_plan_says_that_it_fits(experiment: str) -> None:
    fewest, config = FEWEST_GPUS[experiment], load(Path("examples") / experiment / "base.toml")
    for num_gpus in {fewest, 16}:
        plan = make_plan(config, Machine(num_gpus, 80 * GB, HOST_BYTES), Options())
        assert plan.fits, plan.verdict
    if fewest > 8:
        assert not make_plan(config, Machine(fewest // 2, 80 * GB, HOST_BYTES), Options()).fits


def test_every_published_model_is_of_an_experiment() -> None:
    assert {model_of(experiment) for experiment in EXPERIMENTS} == PUBLISHED.keys()
