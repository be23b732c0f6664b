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
from megatron_dppo.kernels.output_layer import CHUNK_BYTES
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


def _set(*settings: str) -> tuple[str, ...]:
    return tuple(word for each in settings for word in ("--set", each))


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
    for absent in ("Advice", "not yet", "the fewest"):
        assert absent not in result.stdout


@pytest.mark.parametrize(
    ("changes", "num_gpus", "is_needless"),
    [
        ((), 16, False),  # its states do not fit next to the activations
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
    options = (base, *_set(*changes), "--world-size", str(num_gpus))
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
    found = re.match(r"A gradient step: about (\d+) s; 8 steps to a rollout, (\d+) s\.", lines[1])
    assert found
    assumptions = (
        "Times are estimates",
        "Measured on one NVIDIA H200",
        "    layer at 573",
        "Assumed: 45 GB/s",
        "",
    )
    assert all(map(str.startswith, lines[2:7], assumptions))
    recomputed = _plan(base, *GPUS, *_set("algorithm.anchor=recomputed")).stdout.splitlines()
    assert re.match(r"Recomputing log-probs takes \d+ s, 2\d% of it;", recomputed[2])
    assert recomputed[3:7] == lines[2:6]
    content = json.loads(_plan(base, *GPUS, "--json").stdout)
    seconds = content["configured_step_s"]["total"]
    assert content["steps_per_rollout"] == 8
    assert (round(seconds), round(8 * seconds)) == (int(found.group(1)), int(found.group(2)))
    parts = [value for name, value in content["configured_step_s"].items() if name != "total"]
    assert sum(parts) == pytest.approx(seconds)


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
        followed = _plan(base, "--gpus", 24, *MEMORY, *_set(*overrides))
        assert followed.exit_code == 0, followed.output
        assert f"{line.split()[3]} of 74.5 GiB" in followed.stdout.splitlines()[0]
        named = {problem.where for problem in check(load_config([base], overrides), 24)}
        assert named <= {
            "data.prompts",
            "data.reward",
            "model.load",
            "run.folder",
        }  # files and a disk that a plan does without


def test_sixteen_gpus_are_enough_if_no_layout_of_eight_fits(base: Path) -> None:
    lines = _plan(base, "--gpus", 8, *MEMORY).stdout.splitlines()
    (found,) = (index for index, line in enumerate(lines) if "are the fewest that are enough" in line)
    assert lines[found].startswith("16 GPUs ")
    assert _plan(base, "--gpus", 16, *MEMORY, *_set(*_as_overridden(lines[found + 2]))).exit_code == 0


REFUSED = "Refused: train does not start with this config on "
NOWHERE = "Nothing fits on up to 512 GPUs (tried: 1 to 8, then 2, 3, 4, 6 ... 64 nodes). "
NO_LAYOUT = "layouts that train admits on 8 GPUs, none fits with 2% of a GPU to spare."
MODULES = 'megatron.recompute_modules=["moe", "layernorm"]'
OFFLOADS = "megatron.fine_grained_activation_offloading"
# Refusals and what fits are compared with `check` and with the search elsewhere; here are places in the text.
TEXTS: list[tuple[tuple[object, ...], int, list[str]]] = [
    (("--gpus", 24), 1, [f"{REFUSED}24 GPUs.", "- rollout.prompts_per_rollout: found 256; expected a mul"]),
    (_set("parallel.tensor=8"), 1, [f"{REFUSED}16 GPUs.", "- parallel.tensor: found 8; expected a divisor of"]),
    (_set("algorithm.delta=-1"), 1, ["- algorithm.delta: found -1.0", "No layout helps before this is solved"]),
    (("--gpus", 8), 1, ["Does not fit: 88.9 of 74.5 GiB in the optimizer's step", f"Of 82 {NO_LAYOUT}"]),
    (("--gpus", 8), 1, ["Advice: What decides optimizer: optimizer.offload."]),
    (("--gpus", 8, "--gpu-memory", "10GB"), 1, [f"{NOWHERE}The engine's cache holds 0 tokens next to 7.1 GiB"]),
    (_set("parallel.context=4"), 0, ["Advice: optimizer.offload is not needed"]),
    (_set("algorithm.loss_from=logits"), 0, ["loss: from the logits of a whole micro-batch"]),
    (
        _set("algorithm.logits_chunk_bytes=268435456"),
        0,
        ["loss: from hidden states, logits made 0.25 GiB at a"],
    ),
    (_set(ALONE), 0, ["engine: SGLang on GPUs of its own, which are not counted"]),
    (
        _set(MODULES, "megatron.recompute_granularity=selective"),
        0,
        ["not counted: megatron.recompute_modules: "],
    ),
    (_set(f"{OFFLOADS}=true"), 0, [f"not counted: {OFFLOADS} = True"]),
]


@pytest.mark.parametrize(("arguments", "status", "expected"), TEXTS, ids=lambda each: str(each)[:60])
def test_the_text_names_what_decides(
    base: Path, arguments: tuple[object, ...], status: int, expected: list[str]
) -> None:
    result = _plan(base, *GPUS, *arguments)
    assert result.exit_code == status
    lines = _unbroken(result.stdout)
    for begin in expected:
        assert any(line.startswith(begin) for line in lines), (begin, result.stdout)
    for words in ("Fits", "GPU memory of the worst rank", "A gradient step: "):
        assert words not in result.stdout or REFUSED not in result.stdout
    assert "engine cache" not in result.stdout or ALONE not in arguments


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


def test_json_has_the_same_numbers_in_bytes(base: Path) -> None:
    result = _plan(base, *GPUS, "--json", "--proposals", "2")
    content: dict[str, Any] = json.loads(result.stdout)
    named = "model machine loss assumptions fits conclusion problems advice not_counted configured server_load"
    counted = (
        "configured_step_s steps_per_rollout proposals num_admitted_layouts num_fitting_layouts fewest_gpus"
    )
    assert set(content) == {*named.split(), *counted.split()}
    assert content["loss"] == {
        "loss_from": "hidden_states",
        "logits_chunk_bytes": CHUNK_BYTES,
        "logits_dtype": "model",
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
    sizes = _set("parallel.tensor=1", "parallel.context=1", "parallel.pipeline=4", "parallel.expert=4", ALONE)
    lines = _plan(base, *GPUS, *sizes).stdout.splitlines()
    assert any("of pipeline stage 0" in line for line in lines)
    (line,) = (line for line in lines if "peak of each pipeline stage: " in line)
    peaks = [float(number) for number in re.findall(r"[0-9]+\.[0-9]+", line.partition(": ")[2])]
    peak = json.loads(_plan(base, *GPUS, *sizes, "--json").stdout)["configured"]["peak_bytes"]
    assert len(peaks) == 4 and max(peaks) == pytest.approx(peak / 2**30, abs=0.06)


def test_recompute_is_read_from_the_pass_through_table_of_all_layers(base: Path) -> None:
    Path("more.toml").write_text(
        '[megatron]\nrecompute_granularity = "full"\nrecompute_method = "uniform"\nrecompute_num_layers = 2\n'
    )
    result = _plan(base, "more.toml", *_set("parallel.max_tokens_per_microbatch=18432"), *GPUS)
    assert "recompute full (uniform, 2)" in result.stdout
    assert "of up to 18432 tokens" in result.stdout


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


def test_help_has_an_example_and_the_exit_codes() -> None:
    result = _plan("--help")
    for words in ("megatron-dppo plan base.toml --gpus 16 --gpu-memory 80GB", "Exit code 0"):
        assert words in result.stdout
