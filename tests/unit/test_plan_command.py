"""`megatron-dppo plan`: its text, its JSON and exit status, and what it refuses."""

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dppo.checks import check
from megatron_dppo.cli import app
from megatron_dppo.config import load_config
from megatron_dppo.plan import Machine, make_plan
from megatron_dppo.plan.cost import step_time
from megatron_dppo.plan.memory import COMPONENTS, MOMENTS
from megatron_dppo.plan.units import as_overrides, in_seconds
from tests.support.plan_models import ON_16_GPUS, QWEN3_30B, RECOMPUTED

BASE = ON_16_GPUS.replace(
    "samples_per_prompt = 16", 'samples_per_prompt = 8\nrouting_replay = "replay"\nnum_topk_log_probs = 20'
)
MEMORY = ("--gpu-memory", "80GB")
GPUS = ("--gpus", "16", *MEMORY)
ALONE = "rollout.sglang.colocated=false"


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with base.toml and a model folder that holds nothing but config.json."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(QWEN3_30B))
    Path("base.toml").write_text(BASE)
    return Path("base.toml")


def _plan(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def _as_overridden(line: str) -> list[str]:
    """The settings on a line of the text."""
    words = shlex.split(line)
    return [value for option, value in itertools.pairwise(words) if option == "--set"]


def test_the_text_of_a_run_that_fits(base: Path) -> None:
    result = _plan(base, *GPUS, "--host-memory", "2TB")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "Fits: 59.2 of 74.5 GiB in the optimizer's step, most of it optimizer (28.5 GiB)."
    assert "Qwen3MoeForCausalLM, 30.53 B parameters (3.35 B active), bfloat16" in lines
    assert "16 GPUs, 8 to a node, 74.5 GiB each, hosts of 1862.6 GiB" in lines
    assert "layout: tensor 4, context 2, expert 8, data 2, expert_tensor 1; recompute none" in lines
    (header,) = (line for line in lines if line.split() == list(MOMENTS))
    rows = {line[:26].strip(): line for line in lines if len(line.split()) > len(MOMENTS)}
    rows = {name: line for name, line in rows.items() if name in {*COMPONENTS, "total"}}
    assert set(rows) == {*COMPONENTS, "total"}
    assert {len(row) for row in rows.values()} == {len(header)}
    assert rows["parameters"].split()[1:] == ["7.49", "7.49", "7.49", "-", "-"]
    for column, moment in enumerate(MOMENTS):
        values = [row.split()[-5 + column] for name, row in rows.items() if name != "total"]
        total = sum(float(value) for value in values if value != "-")
        assert total == pytest.approx(float(rows["total"].split()[1 + column]), abs=0.06), moment
    assert "Engine and trainer take turns: " in result.stdout
    assert "Advice" not in result.stdout
    smaller = _plan(base, *GPUS, "--set", "parallel.context=4").stdout.splitlines()
    assert "optimizer.offload is not needed" in next(line for line in smaller if line.startswith("Advice: "))
    assert "not yet" not in result.stdout
    assert "the fewest" not in result.stdout


@pytest.mark.parametrize(
    ("changes", "num_gpus", "is_needless"),
    [
        ((), 16, False),  # its states do not fit beside the activations
        ((), 32, True),
        (("parallel.context=4",), 16, True),
        (("parallel.context=4", "optimizer.offload=false"), 16, False),
        (("rollout.sglang.colocated=false", "rollout.sglang.weight_sync=disk"), 16, True),  # no residue
        ((), 12, False),  # no layout
        (("sglang.tp_size=0",), 16, False),  # refused by its own rule
    ],
)
def test_an_offload_that_memory_does_not_need_is_named_with_its_cost(
    base: Path, changes: tuple[str, ...], num_gpus: int, is_needless: bool
) -> None:
    overrides = itertools.chain.from_iterable(("--set", change) for change in changes)
    options = (base, *overrides, "--world-size", str(num_gpus))
    checked = CliRunner().invoke(app, ["check", *map(str, options)]).output
    found = re.search(
        r"note: optimizer\.offload is not needed: \S+ of 74\.5 GiB without it\. It takes (\S+) s", checked
    )
    assert bool(found) == is_needless, checked
    if found is not None:
        job = make_plan(load_config([base], changes), Machine(num_gpus, 80 * 10**9)).job
        assert found[1] == in_seconds(step_time(job, job.layout).optimizer).removesuffix(" s")


def test_the_step_time_comes_with_what_it_assumes(base: Path) -> None:
    lines = _plan(base, *GPUS).stdout.splitlines()
    found = re.fullmatch(
        r"A gradient step: about (\d+) s; 8 steps to a rollout, (\d+) s\. Sampling is not estimated\.", lines[1]
    )
    assert found
    assert lines[2:7] == [
        "Times are estimates, of responses of full length. No run on several GPUs has confirmed them.",
        "Measured on one NVIDIA H200 (examples/guides/gpu_measurements.md): layers at 341 TFLOP/s, the output",
        "    layer at 573 TFLOP/s, updates of 23.6 billion parameters/s.",
        "Assumed: 45 GB/s to the host, transfers at 70% of 450 GB/s in a node and 50 between.",
        "",
    ]
    recomputed = _plan(base, *GPUS, "--set", "algorithm.anchor=recomputed").stdout.splitlines()
    said = (
        r"Recomputing log-probs takes (\d+) s, 2\d% of it; algorithm\.anchor = 'rollout' has no such forward\."
    )
    assert re.fullmatch(said, recomputed[2]) and recomputed[3:7] == lines[2:6]
    content = json.loads(_plan(base, *GPUS, "--json").stdout)
    seconds = content["configured_step_s"]["total"]
    assert content["steps_per_rollout"] == 8
    assert (round(seconds), round(8 * seconds)) == (int(found.group(1)), int(found.group(2)))
    parts = [value for name, value in content["configured_step_s"].items() if name != "total"]
    assert sum(parts) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--gpus", 24), "rollout.prompts_per_rollout: found 256; expected a multiple of 24"),
        (("--gpus", 1024), "rollout.prompts_per_rollout: found 256; expected a multiple of 1024"),
        (
            ("--gpus", 16, "--set", "parallel.tensor=8"),
            "parallel.tensor: found 8; expected a divisor of the model's key-value heads, 4",
        ),
        (
            ("--gpus", 12),
            "parallel.tensor * pipeline * context: found 8; expected a divisor of the 12 processes",
        ),
    ],
)
def test_what_train_refuses_does_not_fit(base: Path, arguments: tuple[object, ...], problem: str) -> None:
    result = _plan(base, *arguments, *MEMORY)
    assert result.exit_code == 1
    first, *lines = result.stdout.splitlines()
    assert first == f"Refused: train does not start with this config on {arguments[1]} GPUs."
    assert lines[0].startswith(f"- {problem}")
    assert "Fits" not in result.stdout
    assert "GPU memory of the worst rank" not in result.stdout
    assert "A gradient step: " not in result.stdout


def _unbroken(text: str) -> list[str]:
    """Its lines, of which none is wider than 100 columns, with those that were broken made one again."""
    assert max(map(len, text.splitlines())) <= 100
    lines: list[str] = []
    for line in text.splitlines():
        is_rest = line.startswith("    ") and not re.match(r" +(\d+\. |and \d+ more|a step )", line)
        if lines and is_rest:
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    return lines


def test_each_proposal_is_the_overrides_that_make_it(base: Path) -> None:
    lines = _unbroken(_plan(base, "--gpus", 24, *MEMORY).stdout)
    proposals = [line for line in lines if re.match(r" +\d\. ", line)]
    assert len(proposals) == 5
    for line in proposals:
        overrides = _as_overridden(line)
        assert overrides
        followed = _plan(base, "--gpus", 24, *MEMORY, *(word for each in overrides for word in ("--set", each)))
        assert followed.exit_code == 0, followed.output
        assert f"{line.split()[3]} of 74.5 GiB" in followed.stdout.splitlines()[0]
        named = {problem.where for problem in check(load_config([base], overrides), 24)}
        assert named <= {
            "data.prompts",
            "data.reward",
            "model.load",
            "run.folder",
        }  # files and a disk that a plan does without


def test_no_layout_of_eight_gpus_fits_and_sixteen_are_named(base: Path) -> None:
    result = _plan(base, "--gpus", 8, *MEMORY)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    most = "most of it optimizer (56.9 GiB)"
    assert lines[0] == f"Does not fit: 88.9 of 74.5 GiB in the optimizer's step, {most}."
    assert "Of 82 layouts that train admits on 8 GPUs, none fits with 2% of a GPU to spare." in lines
    (found,) = (index for index, line in enumerate(lines) if "are the fewest that are enough" in line)
    assert lines[found] == (
        "16 GPUs are the fewest that are enough (tried: 1 to 8, then 2, 3, 4, 6 ... 64 nodes), with:"
    )
    overrides = [word for each in _as_overridden(lines[found + 2]) for word in ("--set", each)]
    assert _plan(base, "--gpus", 16, *MEMORY, *overrides).exit_code == 0
    assert "--offload-optimizer" not in result.stdout
    assert "Advice: What decides optimizer: optimizer.offload." in lines


def test_advice_names_the_keys_that_decide(base: Path) -> None:
    result = _plan(base, *GPUS, "--set", "parallel.max_tokens_per_microbatch=65536")
    assert result.exit_code == 1
    keys = "parallel.max_tokens_per_microbatch and megatron.recompute_granularity"
    assert f"Advice: What decides activations: {keys}." in _unbroken(result.stdout)


def test_problems_that_no_layout_solves_end_the_search(base: Path) -> None:
    result = _plan(base, *GPUS, "--set", "rollout.max_response_tokens=30000", "--set", "algorithm.delta=-1")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[1].startswith("- algorithm.delta: found -1.0")
    assert lines[2].startswith("- parallel.max_tokens_per_microbatch: found 20480; expected at least 31024")
    assert lines[-1] == "No layout helps before this is solved; then plan again."


def test_an_embedded_engine_that_fits_nowhere_is_named(base: Path) -> None:
    embedded = ("--set", "rollout.engine=transformers", "--set", "sglang={}")
    result = _plan(base, "--gpus", 8, "--gpu-memory", "60GB", *embedded)
    assert result.exit_code == 1
    lines = _unbroken(result.stdout)
    assert lines[-1].startswith("Nothing fits on up to 512 GPUs ")
    assert "Set rollout.engine = 'sglang', whose weights are split over sglang.tp_size GPUs." in lines[-1]


def test_a_run_that_just_fits_needs_no_more_gpus(base: Path) -> None:
    small = QWEN3_30B | {"num_hidden_layers": 2, "num_experts": 8, "vocab_size": 1000}
    Path("model/config.json").write_text(json.dumps(small))
    settings = {f"parallel.{key}": 1 for key in ("tensor", "context", "expert")} | RECOMPUTED
    settings |= {"rollout.max_data_gib": 100.0, "rollout.sglang.colocated": False}
    arguments = ("--gpus", 1, *shlex.split(as_overrides(settings)))
    peak = json.loads(_plan(base, *arguments, *MEMORY, "--json").stdout)["configured"]["peak_bytes"]
    result = _plan(base, *arguments, "--gpu-memory", f"{peak / 2**20 + 1:.0f}MiB")
    assert result.exit_code == 0
    assert result.stdout.startswith("Fits: ")
    assert "Of 1 layout that train admits on 1 GPU, none fits with 2% of a GPU to spare." in result.stdout
    assert "the fewest" not in result.stdout


def test_what_fits_nowhere_is_said_with_the_reason(base: Path) -> None:
    result = _plan(base, "--gpus", 8, "--gpu-memory", "10GB")
    assert result.exit_code == 1
    reason = "The engine's cache holds 0 tokens next to 7.1 GiB of weights, and the longest sequence has 17408."
    nothing = "Nothing fits on up to 512 GPUs (tried: 1 to 8, then 2, 3, 4, 6 ... 64 nodes)."
    remedy = "Raise sglang.mem_fraction_static or sglang.tp_size, or lower rollout.max_response_tokens."
    assert _unbroken(result.stdout)[-1] == f"{nothing} {reason} {remedy}"
    assert "layouts that train admits on 8 GPUs, none fits with 2% of a GPU to spare." in result.stdout


def test_json_has_the_same_numbers_in_bytes(base: Path) -> None:
    result = _plan(base, *GPUS, "--json", "--proposals", "2")
    content: dict[str, Any] = json.loads(result.stdout)
    assert set(content) == {
        "model",
        "machine",
        "loss",
        "assumptions",
        "fits",
        "conclusion",
        "problems",
        "advice",
        "not_counted",
        "configured",
        "configured_step_s",
        "steps_per_rollout",
        "server_load",
        "proposals",
        "num_admitted_layouts",
        "num_fitting_layouts",
        "fewest_gpus",
    }
    assert content["fits"] is True
    assert content["problems"] == []
    assert content["fewest_gpus"] is None
    assert content["model"]["parameters"] == 30_532_122_624
    configured = content["configured"]
    (stage,) = configured["stages"]
    assert set(stage["moments"]) == set(MOMENTS)
    assert configured["peak_bytes"] == sum(stage["moments"][configured["worst_moment"]].values())
    assert configured["recompute"]["granularity"] == "none"
    assert len(content["proposals"]) == 2
    assert content["num_admitted_layouts"] >= content["num_fitting_layouts"] > 2
    for proposal in content["proposals"]:
        assert proposal["step_s"]["total"] > 0
        assert set(proposal) >= {"set", "layout", "peak_bytes", "node_bytes"}


def test_json_of_a_refused_run_has_problems_and_of_too_few_gpus_how_many_are_enough(base: Path) -> None:
    refused = json.loads(_plan(base, "--gpus", 4, *MEMORY, "--json").stdout)
    assert refused["fits"] is False
    assert refused["configured"] is None
    assert refused["configured_step_s"] is None
    assert [problem["where"] for problem in refused["problems"]] == [
        "parallel.tensor * pipeline * context",
        "parallel.expert * expert_tensor * pipeline",
    ]
    assert refused["proposals"] == []
    assert refused["fewest_gpus"]["num_gpus"] == 16
    assert refused["fewest_gpus"]["proposal"]["set"]


def test_a_pipeline_shows_each_stage(base: Path) -> None:
    sizes = ("parallel.tensor=1", "parallel.context=1", "parallel.pipeline=4", "parallel.expert=4", ALONE)
    result = _plan(base, *GPUS, *(word for each in sizes for word in ("--set", each)))
    assert "of pipeline stage 0" in result.stdout
    assert "peak of each pipeline stage: " in result.stdout
    line = next(line for line in result.stdout.splitlines() if "peak of each pipeline stage: " in line)
    peaks = [float(number) for number in re.findall(r"[0-9]+\.[0-9]+", line.partition(": ")[2])]
    configured = json.loads(
        _plan(base, *GPUS, *(w for each in sizes for w in ("--set", each)), "--json").stdout
    )
    assert len(peaks) == 4 and max(peaks) == pytest.approx(
        configured["configured"]["peak_bytes"] / 2**30, abs=0.06
    )


def test_recompute_is_read_from_the_pass_through_table_of_all_layers(base: Path) -> None:
    Path("more.toml").write_text(
        '[megatron]\nrecompute_granularity = "full"\nrecompute_method = "uniform"\nrecompute_num_layers = 2\n'
    )
    result = _plan(base, "more.toml", "--set", "parallel.max_tokens_per_microbatch=18432", *GPUS)
    assert "recompute full (uniform, 2)" in result.stdout
    assert "of up to 18432 tokens" in result.stdout


def test_the_loss_is_read_from_the_config(base: Path) -> None:
    chunks = ("--set", "algorithm.logits_chunk_bytes=268435456")
    result = _plan(base, *GPUS, *chunks)
    assert "loss: from hidden states, logits made 0.25 GiB at a time" in result.stdout
    whole = "loss: from the logits of a whole micro-batch"
    assert whole in _plan(base, *GPUS, "--set", "algorithm.loss_from=logits").stdout
    content = json.loads(_plan(base, *GPUS, *chunks, "--json").stdout)
    assert content["loss"] == {
        "loss_from": "hidden_states",
        "logits_chunk_bytes": 268435456,
        "logits_dtype": "model",
    }


def test_what_the_sums_do_not_know_is_named(base: Path) -> None:
    modules = 'megatron.recompute_modules=["moe", "layernorm"]'
    selective = "megatron.recompute_granularity=selective"
    offloading = "megatron.fine_grained_activation_offloading=true"
    arguments = [word for each in (modules, selective, offloading) for word in ("--set", each)]
    result = _plan(base, *GPUS, *arguments)
    assert "not counted: megatron.fine_grained_activation_offloading = True" in result.stdout
    assert "not counted: megatron.recompute_modules: 'layernorm' is taken to save nothing" in result.stdout


def test_an_engine_of_its_own_is_left_out(base: Path) -> None:
    result = _plan(base, *GPUS, "--set", ALONE)
    assert "engine: SGLang on GPUs of its own, which are not counted" in result.stdout
    assert "engine cache" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*GPUS[:2], "--gpu-memory", "80"), "ConfigError: --gpu-memory: found '80'; expected"),
        ((*GPUS, "--host-memory", "much"), "ConfigError: --host-memory: found 'much'"),
        ((*GPUS, "--set", "model.load=elsewhere"), "ConfigError: model.load: found elsewhere"),
        ((*GPUS, "--set", "parallel.tensr=2"), "Did you mean parallel.tensor?"),
        ((*GPUS, "--set", "sglang.tp_size=0"), "ConfigError: sglang.tp_size: found 0"),
        (
            (*GPUS, "--set", "megatron.recompute_granularity=some"),
            "ConfigError: megatron.recompute_granularity",
        ),
        ((*GPUS, "--set", "megatron.recompute_granularity=full"), "megatron.recompute_method: found none"),
        ((*GPUS, "--set", "megatron.recompute_modules=moe"), "ConfigError: megatron.recompute_modules"),
        (MEMORY, "--gpus"),
        (("--gpus", "0", *MEMORY), "--gpus"),
        ((*GPUS, "--offload-optimizer"), "No such option: --offload-optimizer"),
        ((*GPUS, "--trace"), "'--trace': plan traces no step anymore. Without the option it prints the memory"),
        ((*GPUS, "--trace-layers", "8"), "'--trace-layers': plan traces no step anymore. Without the option"),
    ],
)
def test_bad_input_is_refused_with_2_and_no_traceback(
    base: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = _plan(base, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_model_that_is_not_known_is_refused(base: Path) -> None:
    Path("model/config.json").write_text(json.dumps(QWEN3_30B | {"architectures": ["GPT2LMHeadModel"]}))
    result = _plan(base, *GPUS)
    assert result.exit_code == 2
    assert "found GPT2LMHeadModel" in result.stderr


def test_help_teaches_with_an_example() -> None:
    result = _plan("--help")
    assert "megatron-dppo plan base.toml --gpus 16 --gpu-memory 80GB" in result.stdout
    assert "optimizer.offload=true" in result.stdout
    assert "Exit code 0" in result.stdout
    for option in ("--offload-optimizer", "--recompute", "--moments", "--trace", "--layer-spec"):
        assert option not in result.stdout
