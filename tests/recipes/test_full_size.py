"""At full size: what `megatron-dppo check` and `plan` say where the models and data are in place."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_tokenizers import qwen3_tokenizer, r1_tokenizer, save
from experiments import ALGORITHMS, EXPERIMENTS, ROOT, Algorithm, model_of
from published_models import PUBLISHED
from typer.testing import CliRunner

from megatron_dppo.checks import AT_ONCE, BEFORE_LOADING, Facts, check
from megatron_dppo.cli import app
from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.plan import Machine, make_plan
from megatron_dppo.plan.units import in_seconds
from megatron_dppo.runtime.jsonl import write_jsonl

GB = 10**9
HOST_BYTES = 2000 * GB
FEWEST_GPUS = dict.fromkeys(EXPERIMENTS, 8) | dict.fromkeys(
    ("moe_base", "moe_base_r3", "moe_thinking", "moe_base_lora", "topk_ablation"), 16
)
"""Of 80 GB each, on nodes of eight, on which an experiment fits as it stands."""
NUM_PROBLEMS = {"math-sanity": 1460}  # of the published set; the sets of AIME have as many as the others here


@pytest.fixture(scope="module", autouse=True)
def downloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Models without their weights, and data sets made as examples/README.md says, of sources of our own."""
    folder = tmp_path_factory.mktemp("downloaded")
    for name, content in PUBLISHED.items():
        model = save(r1_tokenizer() if "R1-Distill" in name else qwen3_tokenizer(), folder / "models" / name)
        (model / "config.json").write_text(json.dumps(content))
        (model / "model.safetensors").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(Facts, "free_bytes", 10**15)
        for number, command in enumerate(preparations()):
            source = Path(f"source_{number}.jsonl")
            num_problems = NUM_PROBLEMS.get(command[0], 30)
            rows = ({"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(num_problems))
            write_jsonl(source, rows)
            made = CliRunner().invoke(app, ["prepare-data", *command, "--source", str(source)])
            assert made.exit_code == 0, made.output
        row = {"id": "1", "prompt": "What is 1 + 1?", "answer": "2"}
        Path("data/gem.jsonl").write_text(json.dumps(row) + "\n")
        yield


def preparations() -> list[list[str]]:
    """Returns the arguments of `megatron-dppo prepare-data`, for each file that the README has made."""
    text = (ROOT / "examples" / "README.md").read_text()
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("$prepare ")]


def load(*layers: Path) -> Config:
    """The files of the repository, from the folder in which a user would stand."""
    return load_config([ROOT / layer for layer in layers])


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_check_finds_no_fault(algorithm: Algorithm) -> None:
    fewest = FEWEST_GPUS[algorithm.experiment]
    config = load(*algorithm.layers)
    assert check(config, fewest, needs=BEFORE_LOADING) == []
    assert check(config, 16, needs=AT_ONCE) == []


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_plan_says_that_it_fits(experiment: str) -> None:
    fewest, config = FEWEST_GPUS[experiment], load(Path("examples") / experiment / "base.toml")
    for num_gpus in {fewest, 16}:
        plan = make_plan(config, Machine(num_gpus, 80 * GB, HOST_BYTES))
        assert plan.fits, plan.conclusion
    if fewest > 8:
        assert not make_plan(config, Machine(fewest // 2, 80 * GB, HOST_BYTES)).fits


@pytest.mark.parametrize("experiment", sorted(set(EXPERIMENTS) - {"moe_base_lora"}))
def test_readmes_quote_the_plan(experiment: str) -> None:
    text = (ROOT / "examples" / experiment / "README.md").read_text().replace("\n", " ")
    numbers = r"for (\d+) GPUs of 80 GB: (\S+) GiB at the peak of a GPU, (\S+) GiB of a host's memory, (\S+ s) "
    quoted = re.search(numbers, text)
    assert quoted
    machine = Machine(int(quoted.group(1)), 80 * GB)
    plan = make_plan(load(Path("examples") / experiment / "base.toml"), machine)
    assert plan.memory is not None
    assert plan.time is not None
    per_node = f"{plan.memory.host.per_node / 2**30:.0f}"
    assert quoted.groups()[1:] == (f"{plan.memory.peak / 2**30:.1f}", per_node, in_seconds(plan.time.total))


def test_the_readme_shows_what_the_command_prints() -> None:
    text = (ROOT / "megatron_dppo" / "plan" / "README.md").read_text()
    blocks = re.findall(r"```\n\$ megatron-dppo (plan .*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        command, *shown = block.splitlines()
        arguments = [str(ROOT / word) if word.startswith("examples/") else word for word in command.split()]
        printed = CliRunner().invoke(app, arguments).stdout.splitlines()
        assert [line for line in shown if line != "..." and line not in printed] == []


def test_every_published_model_is_of_an_experiment() -> None:
    assert {model_of(experiment) for experiment in EXPERIMENTS} == PUBLISHED.keys()


@pytest.mark.parametrize(("prompts", "reward"), [("data/math.jsonl", "dapo"), ("data/aime24.jsonl", "math")])
def test_prompts_of_another_template_than_the_reward_reads_are_refused(prompts: str, reward: str) -> None:
    """What copying the wrong command, or reward, would cost: zero-variance groups for days."""
    config = load_config(
        [ROOT / "examples/dense_base/base.toml"], [f"data.prompts={prompts}", f"data.reward={reward}"]
    )
    problems = check(config, 8, needs=BEFORE_LOADING)
    assert problems[0].where == "data.reward"
    assert all("nearly all of their responses are wrong" in problem.found for problem in problems)
