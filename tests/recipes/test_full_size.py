"""Full size: the output of `megatron-dppo check` and `plan` once models and data are in place."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_dppo.checks import AT_ONCE, BEFORE_LOADING, Facts, check
from megatron_dppo.checks.facts import gather_facts
from megatron_dppo.checks.run_rules import checkpoint_bytes
from megatron_dppo.cli import app
from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.plan import Machine, Plan, make_plan
from megatron_dppo.plan.memory import Memory
from megatron_dppo.plan.units import in_seconds
from megatron_dppo.runtime.files import write_jsonl
from tests.support.byte_tokenizers import qwen3_tokenizer, r1_tokenizer, save
from tests.support.experiment_models import OF_EXPERIMENTS
from tests.support.experiments import ALGORITHMS, EXPERIMENTS, ROOT, Algorithm, model_of
from tests.support.traced_step.depths import BETWEEN, Trace, trace_run

GB = 10**9
HOST_BYTES = 2000 * GB
_ON_16 = ("moe_base", "moe_base_r3", "moe_base_async", "moe_thinking", "topk_ablation", "qwen35_35b")
_LARGER = {"glm_air": 48, "qwen3_235b": 128, "minimax_m2": 128}
FEWEST_GPUS = dict.fromkeys(EXPERIMENTS, 8) | dict.fromkeys(_ON_16, 16) | _LARGER
"""Of 80 GB each, on nodes of eight, on which an experiment fits as it stands."""
THINKING = ("moe_thinking", "qwen3_235b", "minimax_m2", "gpt_oss", "qwen35_35b")
"""Their responses are longer, so the cache holds responses of half the longest, too."""
NUM_PROBLEMS = {"math-sanity": 1460}  # of the published set; the sets of AIME have as many as the others here


@pytest.fixture(scope="module", autouse=True)
def downloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Models without weights, and data sets made from local sources by the commands in examples/README.md."""
    folder = tmp_path_factory.mktemp("downloaded")
    for name, content in OF_EXPERIMENTS.items():
        model = save(r1_tokenizer() if "R1-Distill" in name else qwen3_tokenizer(), folder / "models" / name)
        (model / "config.json").write_text(json.dumps(content))
        (model / "model.safetensors").touch()
        as_converted(model)
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


def as_converted(model: Path) -> None:
    """Write `NAME-megatron`, as `convert to-megatron` does, without weights."""
    folder = model.with_name(f"{model.name}-megatron")
    shutil.copytree(model, folder / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "megatron").mkdir()
    (folder / "megatron" / "metadata.json").write_text("{}")


def preparations() -> list[list[str]]:
    """Returns the arguments of `megatron-dppo prepare-data`, for each file that the README has made."""
    text = (ROOT / "examples" / "README.md").read_text()
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("$prepare ")]


def load(*layers: Path, overrides: Sequence[str] = ()) -> Config:
    """The files of the repository, from the folder in which a user would stand."""
    return load_config([ROOT / layer for layer in layers], list(overrides))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_check_finds_no_fault(algorithm: Algorithm) -> None:
    fewest = FEWEST_GPUS[algorithm.experiment]
    config = load(*algorithm.layers)
    assert check(config, fewest, needs=BEFORE_LOADING) == []
    assert check(config, max(fewest, 16), needs=AT_ONCE) == []
    converted = load_config(
        [ROOT / layer for layer in algorithm.layers], [f"model.load={config.model.load}-megatron"]
    )
    assert check(converted, max(fewest, 16), needs=AT_ONCE) == []


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_plan_says_that_it_fits_and_which_layout_to_take(experiment: str) -> None:
    """Of layouts with a tenth of a GPU to spare in training, none is clearly faster. No GPU has confirmed it.

    Those that take more to the host than the config are left out: that costs more than its time.
    """
    fewest, config = FEWEST_GPUS[experiment], load(Path("examples") / experiment / "base.toml")
    for num_gpus in {fewest, max(fewest, 16)}:
        plan = make_plan(config, Machine(num_gpus, 80 * GB, HOST_BYTES))
        assert plan.fits, plan.conclusion
        if num_gpus == fewest:
            assert plan.found is not None and plan.time is not None
            found = [each for each in plan.found.proposals if not each.settings.get("optimizer.offload")]
            roomy = [each for each in found if peak_in_training(each.memory) <= 0.9 * 80 * GB]
            assert plan.time.total <= 1.05 * min(each.time.total for each in roomy)
            assert plan.load is not None
            assert not plan.load.retracts  # at a mean of a quarter of the longest response
            largest_graph = config.sglang.get("cuda_graph_max_bs_decode", 256)
            assert plan.load.num_open <= largest_graph, "SGLang would decode without graphs"
            twice = replace(plan.load, response_tokens=2 * plan.load.response_tokens)
            assert experiment not in THINKING or not twice.retracts
    if fewest > 8:
        assert not make_plan(config, Machine(fewest // 2, 80 * GB, HOST_BYTES)).fits


def peak_in_training(memory: Memory) -> int:
    """Returns the bytes of the worst rank while the engine sleeps; its share in a rollout is a setting."""
    return max(stage.total(moment) for stage in memory.stages for moment in ("loss", "backward", "step"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_readmes_quote_the_plan(experiment: str) -> None:
    text = (ROOT / "examples" / experiment / "README.md").read_text().replace("\n", " ")
    numbers = r"for (\d+) GPUs of 80 GB: (\S+) GiB at the peak of a GPU, (\S+) GiB of a host's memory, (\S+ s) "
    quoted = re.search(numbers, text)
    length = re.search(r"Its (\d+) rollouts are (\S+) h of training, (\d+) GPU hours?, at worst", text)
    assert quoted
    assert length
    machine = Machine(int(quoted.group(1)), 80 * GB)
    config = load(Path("examples") / experiment / "base.toml")
    plan = make_plan(config, machine)
    assert plan.memory is not None
    assert plan.time is not None
    per_node = f"{plan.memory.host.per_node / 2**30:.0f}"
    assert quoted.groups()[1:] == (f"{plan.memory.peak / 2**30:.1f}", per_node, in_seconds(plan.time.total))
    hours = plan.time.total * config.num_gradient_steps / 3600
    assert length.groups() == (
        str(config.run.num_rollouts),
        f"{hours:.1f}",
        f"{hours * machine.num_gpus:.0f}",
    )


def test_the_readme_of_gem_tasks_quotes_the_plan_of_sudoku() -> None:
    text = (ROOT / "examples" / "gem_tasks" / "README.md").read_text()
    overlays = [each for each in ALGORITHMS if each.name.startswith("sudoku")]
    plans = [make_plan(load(*each.layers), Machine(8, 80 * GB)) for each in overlays]
    assert len(plans) == 2 and all(plan.fits and plan.time is not None for plan in plans)
    quoted = re.findall(r"Sudoku's conversations are longer: (\S+ s) for a gradient step", text)
    assert {in_seconds(plan.time.total) for plan in plans if plan.time is not None} == set(quoted)
    num_steps = {load(*each.layers).num_gradient_steps for each in overlays}
    length = re.search(r"and (\S+) h of training, (\d+) GPU hours, for its (\d+) rollouts", text)
    assert length is not None
    assert plans[0].time is not None
    hours = plans[0].time.total * num_steps.pop() / 3600
    assert not num_steps
    num_rollouts = load(*overlays[0].layers).run.num_rollouts
    assert length.groups() == (f"{hours:.1f}", f"{hours * 8:.0f}", str(num_rollouts))


def test_the_guide_of_clusters_quotes_check_and_plan() -> None:
    """Prompts as in examples/README.md, figures as the commands print them, and admitted changes."""
    guide = (ROOT / "examples" / "guides" / "cluster.md").read_text()
    text = guide.replace("\n", " ")
    prepared = [shlex.split(line)[1:] for line in guide.splitlines() if line.startswith("$prepare ")]
    assert len(prepared) == 3
    assert all(command in preparations() for command in prepared)
    layers = (Path("examples/moe_base/base.toml"), Path("examples/moe_base/dppo_binary_tv.toml"))
    config = load(*layers)
    num_bytes = checkpoint_bytes(config, gather_facts(config, 16))
    assert num_bytes is not None
    assert f"{num_bytes / 2**30:.1f} GiB" in text
    assert f"{num_bytes / GB:.0f} GB for each checkpoint" in text
    plan = make_plan(config, Machine(16, 80 * GB, HOST_BYTES))
    assert plan.memory is not None
    assert plan.time is not None
    rollout_s = plan.time.total * config.algorithm.minibatches_per_rollout
    assert (
        f"{plan.memory.peak / 2**30:.1f} of 74.5 GiB and a node {plan.memory.host.per_node / 2**30:.0f} GiB"
        in text
    )
    assert f"{in_seconds(plan.time.total)} for a gradient step" in text
    assert (
        f"{config.run.num_rollouts} x {rollout_s:.0f} s, {config.run.num_rollouts * rollout_s / 3600:.0f} hours"
        in text
    )
    assert f"step_{config.num_gradient_steps:08d}" in text
    assert "runs/moe_base/dppo_binary_tv/slurm" in text and config.run.folder == Path(
        "runs/moe_base/dppo_binary_tv"
    )
    sets = [set_.split() for set_ in re.findall(r"((?:--set \S+\s?)+)`", guide)]
    for words, world_size in [([], 32), *((words, 32) for words in sets)]:
        changed = load_config([ROOT / layer for layer in layers], [word for word in words if word != "--set"])
        assert check(changed, world_size, needs=AT_ONCE) == [], words
    for script in re.findall(r"examples/\S+?\.sbatch", guide):
        assert (ROOT / script).exists()


def test_the_guide_of_clusters_quotes_the_length_of_dense_base() -> None:
    text = (ROOT / "examples" / "guides" / "cluster.md").read_text()
    config = load(Path("examples/dense_base/base.toml"))
    time = make_plan(config, Machine(8, 80 * GB)).time
    assert time is not None
    assert f"{time.total * config.num_gradient_steps / 3600:.0f} for `dense_base`" in text


ONE_GPU = (ROOT / "examples/guides/cluster.md").read_text().partition("## One GPU")[2].partition("## After")[0]


def plan_on_one_gpu(experiment: str, *overrides: str) -> Plan:
    file = ROOT / "examples" / experiment / "base.toml"
    return make_plan(load_config([file], ["optimizer.offload=true", *overrides]), Machine(1, 80 * GB))


def test_the_guide_shows_what_plan_prints_for_one_gpu() -> None:
    """And what it trains with is what was planned, admitted by `check`."""
    (block,) = re.findall(r"```text\n\$ megatron-dppo (.*?)```", ONE_GPU.replace("\\\n", ""), re.DOTALL)
    command, *shown = block.splitlines()
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in command.split()]
    printed = CliRunner().invoke(app, words).stdout.splitlines()
    assert [line for line in shown if line != "..." and line not in printed] == []
    (trained,) = re.findall(r"megatron-dppo train (.*?)```", ONE_GPU.replace("\\\n", ""), re.DOTALL)
    overrides = re.findall(r"--set (\S+)", trained)
    assert set(re.findall(r"--set (\S+)", command)) < set(overrides)
    config = load_config([ROOT / "examples" / "efficiency" / "base.toml"], overrides)
    assert check(config, 1, needs=AT_ONCE) == []
    assert make_plan(config, Machine(1, 80 * GB)).fits


def test_the_guide_says_what_fits_one_gpu() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", ONE_GPU, re.MULTILINE)
    assert len(rows) == 4
    for experiment, rest in rows:
        model, settings, *figures = rest.split(" | ")
        overrides = re.findall(r"`(\S+)`", settings)
        plan = plan_on_one_gpu(experiment, *overrides)
        assert plan.fits
        assert plan.memory is not None and plan.time is not None
        gib = [plan.memory.peak / 2**30, plan.memory.host.per_node / 2**30]
        assert figures == [f"{gib[0]:.1f}", f"{gib[1]:.0f}", in_seconds(plan.time.total)]
        assert model == model_of(experiment)
    for experiment in ("clipped_tokens", "dense_base", "moe_base_lora"):
        plan = plan_on_one_gpu(experiment)
        assert plan.found is not None
        assert not plan.fits and plan.found.proposals == ()


def test_the_reference_shows_what_the_command_prints() -> None:
    text = (ROOT / "docs/reference/planning.md").read_text()
    blocks = re.findall(r"```\n\$ megatron-dppo (plan .*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        command, *shown = block.splitlines()
        arguments = [str(ROOT / word) if word.startswith("examples/") else word for word in command.split()]
        printed = CliRunner().invoke(app, arguments).stdout.splitlines()
        assert [line for line in shown if line != "..." and line not in printed] == []


def test_the_guide_of_expected_speed_has_the_plans_numbers() -> None:
    text = (ROOT / "examples" / "guides" / "expected_speed.md").read_text()
    (command,) = re.findall(r"```bash\nmegatron-dppo (plan .*?)```", text, re.DOTALL)
    words = command.replace("\\\n", "").split()
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    steps, parts = found["steps_per_rollout"], found["configured_step_s"]
    rows = dict(re.findall(r"^\| train: `(\w+)` \| ([\d.]+) \|", text, re.MULTILINE))
    expected = {name: steps * seconds for name, seconds in parts.items() if seconds and name != "total"}
    assert rows == {name: f"{seconds:.1f}" for name, seconds in expected.items()}
    rates = {name: rate["value"] for name, rate in found["split"]["rates"].items()}
    rollout_s = 2048 * rates["response_tokens"] / rates["serving_rate"] / 16
    together, train_s = found["split"]["ways"][0]["rollout_s"], sum(expected.values())
    assert together == pytest.approx(rollout_s + train_s + rates["switch_s"])
    least, most = (round(together + sync_s) for sync_s in (10, 20))
    gpu_seconds = f"{round(16 * least, -1):,} to {round(16 * most, -1):,} GPU-seconds"
    for said in (
        f"| rollout | {rollout_s:.0f} |",
        f"| switch of trainer and servers | {rates['switch_s']:.1f} |",
        f"| sum | {least} to {most} | {gpu_seconds} |",
        f"{expected['expert']:.1f} of {train_s:.0f} s of training",
        f"{expected['optimizer']:.1f} of {train_s:.0f} s.",
    ):
        assert said in text


TOPK = Algorithm("topk_ablation", "dppo_topk_tv")


def distinct_layouts() -> list[tuple[Path, ...]]:
    """Returns the config of one experiment for each model and layout, and one with a Top-K divergence."""
    configs = {}
    for experiment in EXPERIMENTS:
        path = Path("examples") / experiment / "base.toml"
        config = load_config([ROOT / path])
        key = (
            config.model.load,
            str(config.parallel),
            config.lora.rank,
            config.rollout.routing_replay == "off",
        )
        configs.setdefault(key, (path,))
    return [*configs.values(), TOPK.layers]


def depth_of(config: Config) -> int:
    """Returns the layers to trace: enough for a dense one and two with experts on each stage."""
    return max(8, 3 * config.parallel.pipeline)


_NAMES = ("moe_base", "dense_base", "moonlight")
MOE, DENSE, LATENT = (ROOT / "examples" / name / "base.toml" for name in _NAMES)
SHORT = ("data.max_prompt_tokens=2048", "rollout.max_response_tokens=1024")
WITHOUT_AN_EXAMPLE = {
    "shared prompts": (MOE, "parallel.context=1", "parallel.tensor=2", *SHORT),
    "shared prompts, all logits": (DENSE, *SHORT, "algorithm.loss_from=logits"),
    "shared prompts of latents": (LATENT, "parallel.pipeline=2", "parallel.expert=4", *SHORT),
    "context": (MOE, "parallel.tensor=2", "parallel.context=4"),
    "interleaved": (MOE, "parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.context=1"),
    "recompute": (
        DENSE,
        *("megatron.recompute_granularity=full", "megatron.recompute_method=uniform"),
        *("megatron.recompute_num_layers=1", "optimizer.offload=true"),
    ),
    "uneven": (LATENT, "parallel.pipeline=2", "parallel.expert=4"),
    "latents in context": (LATENT, "parallel.tensor=1", "parallel.context=4", "parallel.expert=4"),
    "selective": (
        MOE,
        "megatron.recompute_granularity=selective",
        'megatron.recompute_modules=["core_attn"]',
    ),
}


@pytest.mark.parametrize("name", WITHOUT_AN_EXAMPLE)
def test_a_traced_step_of_other_layouts_holds_the_plan(name: str) -> None:
    file, *overrides = WITHOUT_AN_EXAMPLE[name]
    config, num_gpus = load_config([Path(file)], overrides), FEWEST_GPUS[Path(file).parent.name]
    plan = make_plan(config, Machine(num_gpus, 80 * GB))
    tree = plan.job.workload.tree(plan.job.layout.data)
    assert plan.job.shares_prefixes == (config.parallel.context == 1)
    assert plan.job.shares_prefixes >= tree.is_shared >= name.startswith("shared")
    require_plan(trace_run(plan, depth_of(config)), config)


@pytest.mark.parametrize("layers", distinct_layouts(), ids=lambda layers: "-".join(layers[-1].parts[1:]))
def test_a_traced_step_holds_the_plan(layers: tuple[Path, ...]) -> None:
    # Linear attention takes a step for each chunk of the longest sequence: seven minutes at full length.
    shorter = {"qwen35_35b": ["data.max_prompt_tokens=256", "rollout.max_response_tokens=768"]}
    experiment = layers[0].parts[1]
    overrides = shorter.get(experiment, [])
    config, num_gpus = load(*layers, overrides=overrides), FEWEST_GPUS[experiment]
    trace = trace_run(make_plan(config, Machine(num_gpus, 80 * GB)), depth_of(config))
    require_plan(trace, config)
    assert trace.peak <= 80 * GB


def require_plan(trace: Trace, config: Config) -> None:
    """What is held is what is planned, and nothing waits but the dispatch of tokens."""
    traced = trace.traced  # the first stage of several has no loss
    planned = {moment: trace.planned[moment] for moment in traced}
    assert traced[BETWEEN] == pytest.approx(planned[BETWEEN], rel=1e-3)
    assert traced == pytest.approx(planned, rel=0.05)
    waits = {key: n for key, n in trace.waits_between.items() if key[0] != "step" and n}
    dispatches = 1 + ("moe" in config.megatron.get("recompute_modules", ()))
    dispatches *= trace.settings.layout.expert > 1
    assert sum(waits.values()) == dispatches * trace.layers_between * trace.settings.num_microbatches, waits
    assert all("token_dispatcher.py" in place for _, place in waits)


def test_every_published_model_is_of_an_experiment() -> None:
    assert {model_of(experiment) for experiment in EXPERIMENTS} == OF_EXPERIMENTS.keys()


@pytest.mark.parametrize(("prompts", "reward"), [("data/math.jsonl", "dapo"), ("data/aime24.jsonl", "math")])
def test_prompts_of_another_template_than_the_reward_reads_are_refused(prompts: str, reward: str) -> None:
    """What copying the wrong command, or reward, would cost: zero-variance groups for days."""
    config = load_config(
        [ROOT / "examples/dense_base/base.toml"], [f"data.prompts={prompts}", f"data.reward={reward}"]
    )
    problems = check(config, 8, needs=BEFORE_LOADING)
    assert problems[0].where == "data.reward"
    assert all("nearly all of their responses are wrong" in problem.found for problem in problems)
