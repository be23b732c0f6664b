"""Every rule has a config that breaks it, and only that rule finds the fault."""

import functools
import importlib.util
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

import megatron_dppo
from megatron_dppo.algorithms import PRESETS
from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.checkpoints.block_fp8 import BlockFP8
from megatron_dppo.checks import (
    AT_ONCE,
    RULES,
    check,
    folder_remarks,
    gather_facts,
    megatron_rules,
    model_facts,
    not_checked,
    period_remarks,
    problems_of,
    remarks,
    require_evaluable,
    require_valid,
    stop_remarks,
)
from megatron_dppo.checks.facts import TRAINING, Need, prompt_files, section_of
from megatron_dppo.checks.run_rules import checkpoint_bytes
from megatron_dppo.cli import app
from megatron_dppo.config import Config, dump_config, load_config
from megatron_dppo.config.sections import is_due
from megatron_dppo.data.prompts.survey import FaultyRows
from megatron_dppo.engines.sglang import options
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.rollout.evaluation import evaluation_sets
from megatron_dppo.run.state import TrainingState
from megatron_dppo.run_folder.trackers import WEBHOOK
from megatron_dppo.runtime.process import Runtime
from tests.support.refusals import refused
from tests.support.refused_configs import (
    MODEL,
    Example,
    blocks,
    config_with,
    dense,
    examples,
    mixtral,
    model,
    module,
    prompts,
    saved_run,
    sigmoid,
    tokenizer,
    write_json,
)
from tests.support.tiny_families import config_of
from tests.unit.test_architectures import LLAMA3

EXAMPLES = tuple(examples(Path(__file__).parent / "data" / "refused_configs.txt"))
MEGATRON = {
    "moe_z_loss_coeff": ["float", "none"],
    "moe_aux_loss_coeff": ["float", "list"],
    "moe_router_load_balancing_type": ["str", "list"],
    "moe_router_bias_update_rate": ["float"],
    "moe_router_fusion": ["bool"],
    "moe_permute_fusion": ["bool"],
    "moe_token_dispatcher_type": ["str"],
    "moe_flex_dispatcher_backend": ["str"],
    "recompute_granularity": ['"full"', '"selective"', "none"],
}


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of a few words, whose last id lies beyond the model's vocabulary."""
    words = {word: number for number, word in enumerate(["1", "2", "+", "=", "\\boxed", "Answer:", "?"])}
    tokenizer = Tokenizer(models.WordLevel({**words, "beyond": 40}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(file))
    return file


# Megatron's objections to a config take seconds of another process: once for equal configs.
_last_line_of = functools.cache(megatron_rules._last_line)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer_file: Path) -> Path:
    """A current directory with a model, prompts for training and evaluation, and its own cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(megatron_rules, "_last_line", _last_line_of)
    monkeypatch.setattr(megatron_rules, "_read_fields", lambda: MEGATRON)
    monkeypatch.setattr(options, "trainer_nccl", lambda: {"NCCL": "2.29.7"})  # of a torch for GPUs
    write_json(Path("model/config.json"), MODEL)
    Path("model/model.safetensors").touch()
    shutil.copy(tokenizer_file, "model/tokenizer.json")
    write_json(Path("model/tokenizer_config.json"), {"tokenizer_class": "PreTrainedTokenizerFast"})
    write_json(Path("prompts.jsonl"), {"prompt": "1 + 1 =", "answer": "2"})
    write_json(Path("held_out.jsonl"), {"prompt": "1 + 2 =", "answer": "3"})
    return tmp_path


@pytest.fixture(autouse=True)
def _no_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker wandb counts as missing, whatever this environment has."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else find_spec(name))


@pytest.fixture(autouse=True)
def _restored_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples set these variables."""
    of_sglang = ("SGLANG_RETURN_ORIGINAL_LOGPROB", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    for name in (*of_sglang, WEBHOOK):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")


def test_every_rule_has_an_example() -> None:
    assert {example.rule for example in EXAMPLES} == {*RULES, "types"}


def test_a_valid_config_has_no_problems(world: Path) -> None:
    assert check(config_with(), 1) == []
    assert check(config_with("parallel.expert=2"), 2) == []
    assert check(config_with("*TOPK  rollout.routing_replay=replay  tracking.paired_routing_every=1"), 1) == []
    assert check(config_with("lora.rank=32"), 1) == []
    assert check(config_with('lora.rank=4  lora.targets=["q_proj","o_proj"]'), 1) == []
    require_valid(config_with(), 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_valid_as_it_is(world: Path, preset: str) -> None:
    assert check(config_with("*TOPK", f"algorithm.preset={preset}"), 1, needs=AT_ONCE) == []


def test_another_aggregation_than_the_papers_is_remarked_on(world: Path) -> None:
    for preset in ("gspo", "icepop", "sapo", "gmpo"):
        (remark,) = remarks(config_with(f"algorithm.preset={preset}"))
        assert f"{preset} was published with 'seq_mean_token_mean'" in remark
    assert remarks(config_with("algorithm.preset=trm")) == []
    own = config_with("algorithm.preset=gspo  algorithm.aggregation=seq_mean_token_mean")
    assert remarks(own) == []


@pytest.mark.parametrize(
    "name", ["samples_every", "batches_every", "paired_routing_every", "clipped_tokens_every"]
)
def test_a_period_acts_in_its_multiples_and_one_beyond_the_run_is_remarked_on(world: Path, name: str) -> None:
    assert [rollout + 1 for rollout in range(25) if is_due(10, rollout)] == [10, 20]
    assert [rollout + 1 for rollout in range(7) if is_due(3, rollout)] == [3, 6]
    assert not any(is_due(0, rollout) for rollout in range(25))
    off = "tracking.samples_every=0  run.num_rollouts=4"
    assert period_remarks(config_with(off, f"tracking.{name}=4")) == []
    (remark,) = period_remarks(config_with(off, f"tracking.{name}=5"))
    assert remark.startswith(f"tracking.{name} is 5 and run.num_rollouts 4: it acts in rollouts 5, 10, 15, ...")
    assert period_remarks(config_with("run.num_rollouts=4")) == [], "a default that nobody set"
    Path("config.toml").write_text(dump_config(config_with("run.num_rollouts=9")))
    shown = CliRunner().invoke(app, ["check", "config.toml"])
    assert "note: tracking.samples_every is 10 and run.num_rollouts 9: it acts in rollouts 10" in shown.output


_LITE = "Glm4MoeLiteForCausalLM"
_SMALL = "model.dtype=float32  optimizer.lr=1e-5"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (f"{_SMALL}  rollout.transformers.weights=bfloat16", "rollout.transformers.weights"),
        (f"{_SMALL}  *SERVED  sglang.dtype=bfloat16", "sglang.dtype"),
        ("optimizer.lr=1e-5  rollout.transformers.weights=modelopt_fp8", "rollout.transformers"),
        (f"{_SMALL}  optimizer.lr=1e-4  rollout.transformers.weights=bfloat16", None),
        (_SMALL, None),
        (f"{_SMALL}  *SERVED", None),
        ("optimizer.lr=1e-6", None),
        ("optimizer.lr=1e-5  *FP8", "the form of fp8"),
        ("optimizer.lr=1e-6  *SERVED  sglang.dtype=bfloat16", None),
    ],
)
def test_steps_that_the_served_type_rounds_away_are_doubted(world: Path, changes: str, key: str | None) -> None:
    blocks()
    found = remarks(config_with(changes))
    assert len(found) == (key is not None) and all(remark.startswith(key or "") for remark in found)
    Path("config.toml").write_text(dump_config(config_with("algorithm.preset=gspo")))
    shown = CliRunner().invoke(app, ["check", "config.toml"])
    assert shown.exit_code == 0 and "note: algorithm.aggregation is 'token_mean'" in shown.output


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"])
def test_a_dense_model_is_a_model(world: Path, architecture: str) -> None:
    dense(architecture)
    assert check(config_with('lora.rank=4  lora.targets=["gate_proj"]'), 1) == []


@pytest.mark.parametrize(
    ("changes", "heads", "ignored"),
    [
        ("", 8, ()),
        ("sglang.tp_size=2  sglang.ep_size=2  sglang.quantization=fp8", 16, ()),
        ("sglang.tp_size=2  sglang.moe_runner_backend=deep_gemm", 16, ("layers.0.mlp", "layers.1.mlp")),
    ],
)
def test_a_folder_of_blocks_is_served(world: Path, changes: str, heads: int, ignored: tuple[str, ...]) -> None:
    blocks(heads=heads, ignored=ignored)
    assert check(config_with(f"*FP8  {changes}"), 1, needs=AT_ONCE) == []
    (Path("fp8") / "config.json").rename("model/config.json")  # the trained model's folder itself
    assert check(config_with(f"*SERVED  {changes}"), 1, needs=AT_ONCE) == []


def test_blocks_of_an_architecture_that_drops_their_scales_are_refused(world: Path) -> None:
    dense("LlamaForCausalLM", quantization_config=BlockFP8().described(), intermediate_size=128)
    problems = check(config_with("*SERVED"), 1, needs=AT_ONCE)
    assert problems[0].where == "sglang.model_path"


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_reference_of_the_models_sizes_is_taken(world: Path, architecture: str) -> None:
    """Of every family, also if its sizes have parts: latents, linear attention."""
    for folder in ("model", "before"):
        config_of(architecture, architectures=[architecture]).save_pretrained(folder)
        Path(folder, "model.safetensors").touch()
    rules = {"reference_model": RULES["reference_model"]}
    assert check(config_with("*KL"), 1, rules) == []
    config_of(architecture, architectures=[architecture], hidden_size=64).save_pretrained("before")
    (problem,) = check(config_with("*KL"), 1, rules)
    assert problem.found == "before of hidden_size 64"


def test_a_megatron_checkpoint_is_a_model(world: Path) -> None:
    Path("model/model.safetensors").unlink()
    Path("model/hf").mkdir()
    Path("model/config.json").rename("model/hf/config.json")
    Path("model/tokenizer.json").rename("model/hf/tokenizer.json")
    Path("model/tokenizer_config.json").rename("model/hf/tokenizer_config.json")
    assert check(config_with(), 1) == []


def each_example(*needs: str) -> Any:
    """Parametrises a test over the examples of rules with these needs."""
    return pytest.mark.parametrize(
        "example",
        [
            pytest.param(example, id=f"{example.rule}-{n}")
            for n, example in enumerate(EXAMPLES)
            if example.rule in RULES and RULES[example.rule].needs in needs
        ],
    )


GOLDEN = """
rollout.max_staleness=2
    rollout.max_staleness: found 2 (set by --set rollout.max_staleness=2); expected 0. This engine samples
    in the trainer's processes, which cannot train meanwhile. Leave it out, or set rollout.engine =
    "sglang".
rollout.lag=100
    rollout.lag: found 100; expected less than run.num_rollouts = 100: else the first weights sample every
    rollout. Lower it, or change run.num_rollouts.
optimizer.warmup_steps=401
    optimizer.warmup_steps: found 401; expected at most gradient steps of the run = 400. Lower it, or change
    gradient steps of the run.
rollout.generate=json:loads  rollout.environment=sudoku
    rollout.generate: found 'json:loads' with rollout.environment = 'sudoku'; expected one of them: the
    function itself decides on observations and on the end of responses. Change it, or rollout.environment.
rollout.samples_per_prompt=1
    rollout.samples_per_prompt: found 1; expected at least 2: the advantage of a single sample is always 0;
    8 is usual. Raise it.
"""
"""Overrides of the valid config, each above the message about them."""


@pytest.mark.parametrize(("sets", "message"), re.findall(r"^(\S.*)\n((?:    .*\n)+)", GOLDEN, re.MULTILINE))
def test_messages_state_what_is_found_and_expected_and_a_remedy(world: Path, sets: str, message: str) -> None:
    try:
        problems: Sequence[Problem] = check(config_with(sets), 1, needs=("config",))
    except ConfigError as error:
        problems = error.problems
    assert list(map(str, problems)) == [" ".join(message.split())]


@pytest.mark.parametrize("example", [example for example in EXAMPLES if example.rule == "types"])
def test_the_schema_refuses_what_no_config_may_have(world: Path, example: Example) -> None:
    with pytest.raises(ConfigError) as raised:
        _ = example.config
    assert [problem.where for problem in raised.value.problems] == [example.key]


@each_example(*get_args(Need))
def test_each_rule_and_only_it_finds_its_example(world: Path, example: Example) -> None:
    example.on_disk()
    config = example.config
    id, key = example.rule, example.key
    needs: tuple[Need, ...] = (*AT_ONCE, RULES[id].needs)
    problems = check(config, example.world_size, needs=needs)
    assert key in {problem.where for problem in problems}
    for problem in problems:
        assert problem.found
        assert problem.expected
        assert problem.action.endswith((".", "?"))
    without = {name: rule for name, rule in RULES.items() if name != id and name not in example.also}
    assert check(config, example.world_size, without, needs=needs) == []
    assert key in {problem.where for problem in check(config, example.world_size, {id: RULES[id]})}
    with pytest.raises(ConfigError) as raised:
        require_valid(config, example.world_size, needs=needs)
    assert list(raised.value.problems) == problems


@each_example(*AT_ONCE)
def test_rules_of_plan_need_config_json_only(
    world: Path, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan` checks without prompts, weights, tokenizer or libraries."""
    example.on_disk()
    config = example.config
    asked = {name: rule for name, rule in RULES.items() if rule.needs == "config"}
    expected = check(config, example.world_size, asked)
    assert (example.rule in asked) <= bool(expected)
    for path in (*world.glob("*.jsonl"), *world.glob("model/*")):
        if path.is_file() and path.name != "config.json":
            path.unlink()
    find = importlib.util.find_spec
    own = "tests.support.own_rules"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: find(name) if own.startswith(name) else None)
    monkeypatch.setattr("subprocess.run", None)
    assert problems_of(config, model_facts(config, example.world_size), needs=("config",)) == expected


class Watched:
    """Something whose attributes are noted as they are read."""

    def __init__(self, watched: object, read: set[str]) -> None:
        self._watched, self._read = watched, read

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return getattr(self._watched, name)


@each_example("machine")
def test_rules_that_plan_skips_refuse_no_layout(world: Path, example: Example) -> None:
    """Or `plan` would admit what `train` refuses."""
    example.on_disk()
    config = example.config
    read: set[str] = set()
    facts: Any = Watched(gather_facts(config, example.world_size), read)
    watched: Any = Watched(config, read)
    assert list(RULES[example.rule].check(watched, facts))
    if example.rule in ("checkpoint_disk", "checkpoint_memory"):  # the disk and the memory are the machine's
        read -= {"sizes", "model_sizes", "world_size"}
    assert not read & {"parallel", "world_size", "sizes", "model_sizes"}


def test_the_disk_for_a_small_checkpoint_is_named_in_small_units(world: Path) -> None:
    too_much = config_with("checkpoint.reserve_gib=1000000000.0")
    (problem,) = check(too_much, 1)
    num_bytes = checkpoint_bytes(too_much, gather_facts(too_much, 1))
    assert num_bytes is not None and 1 << 20 < num_bytes < 1 << 23
    assert f"a checkpoint takes {num_bytes / 2**20:.4g} MiB" in problem.expected


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ((), None),
        (("servers/a.json", "slurm/1/log", "run.lock", "train.log", "job-3.out", ".hidden"), None),
        (("config.toml", "metrics.jsonl", "notes.md", "other/file"), None),
        (("notes.md",), "notes.md"),
        (("a.py", "b.py", "c/d", "e"), "a.py, b.py, c, ..."),
    ],
)
def test_check_names_what_is_in_the_run_folder_and_of_no_run(
    world: Path, files: tuple[str, ...], named: str | None
) -> None:
    for file in files:
        (world / "runs/run" / file).parent.mkdir(parents=True, exist_ok=True)
        (world / "runs/run" / file).write_text("")
    found = f"run.folder: runs/run contains no run, but {named}; the run would write"
    expected = [] if named is None else [found]
    assert [each.removesuffix(" next to them.") for each in folder_remarks(config_with())] == expected
    assert check(config_with(), 1) == []


def test_check_compares_the_time_to_save_with_the_size_of_a_checkpoint(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SAVE_SECONDS", raising=False)
    assert stop_remarks(config_with(), gather_facts(config_with(), 1)) == []
    model(vocab_size=10**9)
    config, facts = config_with(), gather_facts(config_with(), 1)
    num_bytes = checkpoint_bytes(config, facts)
    assert num_bytes is not None
    needed_s = math.ceil(num_bytes / 1e9)
    for given, limit_s in ((None, 480), (str(needed_s - 1), needed_s - 1)):
        if given is not None:
            monkeypatch.setenv("SAVE_SECONDS", given)
        (remark,) = stop_remarks(config, facts)
        assert f"has {limit_s} s for" in remark and f"takes {needed_s} s at 1 GB/s" in remark
        advised = re.search(r"SAVE_SECONDS=(\d+) and --signal=B:USR1@(\d+)", remark)
        assert advised is not None and needed_s < int(advised[1]) < int(advised[2])
    monkeypatch.setenv("SAVE_SECONDS", str(needed_s))
    assert stop_remarks(config, facts) == []


@pytest.mark.parametrize(("column", "is_same"), [("answer", True), ("prompt", False)])
def test_the_column_of_answers_may_be_written_out(world: Path, column: str, is_same: bool) -> None:
    saved_run(dump_config(config_with()))
    rules = {"same_experiment": RULES["same_experiment"]}
    assert (check(config_with(f"data.answer_column={column}"), 1, rules) == []) == is_same


def test_code_in_the_folder_that_nothing_needs_is_left_alone(world: Path) -> None:
    model(model_type="qwen3_moe", auto_map={"AutoConfig": "mine.Config"})
    tokenizer(tokenizer_class="Qwen2Tokenizer", auto_map={"AutoTokenizer": [None, "mine.Tokenizer"]})
    assert check(config_with(), 1, needs=AT_ONCE) == []


def test_all_problems_come_at_once(world: Path) -> None:
    config = config_with('data.reward=x  rollout.top_p=0.5  model.load="none"  megatron.zzz=1')
    found = {problem.where for problem in check(config, 3)}
    assert found == {
        "data.reward",
        "rollout.top_p",
        "model.load",
        "megatron.zzz",
        "rollout.prompts_per_rollout",
    }


def test_misspelt_names_get_a_suggestion(world: Path) -> None:
    names = "data.reward=arithmetics  algorithm.preset=grpoo  data.prompt_column=promt"
    problems = check(config_with(names, "megatron.moe_router_fusoin=true"), 1)
    actions = " ".join(problem.action for problem in problems)
    for name in ("'arithmetic'", "'grpo'", "'prompt'", "megatron.moe_router_fusion"):
        assert f"Did you mean {name}?" in actions


def test_megatron_names_are_read_once_per_version(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert megatron_rules.megatron_fields() == MEGATRON
    monkeypatch.setattr(megatron_rules, "_read_fields", lambda: pytest.fail("the cache was not used"))
    assert megatron_rules.megatron_fields() == MEGATRON
    (cache,) = (world / "cache").rglob("*.json")
    cache.write_text("[")
    monkeypatch.setattr(megatron_rules, "_read_fields", lambda: {"a": ["int"]})
    assert megatron_rules.megatron_fields() == {"a": ["int"]}


def test_unknown_megatron_keys_pass_without_megatron_and_sglang_keys_are_checked_by_a_list(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_rules, "_read_fields", lambda: None)
    config = config_with("megatron.zzz=1  sglang.mem_fraction_sttaic=0.7  rollout.engine=sglang")
    (problem,) = check(config, 1, needs=AT_ONCE)
    assert problem.where == "sglang.mem_fraction_sttaic"
    assert problem.action == "Did you mean sglang.mem_fraction_static?"
    assert [note.partition(":")[0] for note in not_checked(config)] == ["[megatron]", "[sglang]"]
    assert not_checked(Config()) == []


def test_megatron_itself_names_every_field_that_the_package_owns(tmp_path: Path) -> None:
    names = megatron_rules._read_fields()
    assert names is not None
    added = {
        name for name in megatron_rules._OWNED if name == "use_mup" or "_shards" in name or "_remat_" in name
    }
    is_newer = "use_mup" in names
    absent = {"moe_use_legacy_grouped_gemm"} if is_newer else added
    assert megatron_rules._OWNED.keys() - absent <= names.keys()


def test_checking_imports_neither_megatron_nor_sglang(world: Path) -> None:
    Path("config.toml").write_text(dump_config(config_with()))
    code = """
import sys
from pathlib import Path
from megatron_dppo.checks import check
from megatron_dppo.config import load_config
check(load_config([Path("config.toml")]), 1)
sys.exit(any(name.partition(".")[0] in {"megatron", "sglang"} for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_check_prints_a_summary_and_every_problem(world: Path) -> None:
    """A few lines; all settings with --verbose."""
    Path("config.toml").write_text(dump_config(config_with("rollout.top_p=0.5  data.reward=x")))
    command = ["check", "config.toml", "--set", "optimizer.lr=2e-6"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert list(lines) == [
        *("model", "layout", "data", "evaluation", "algorithm", "rollout", "training", "run", "checkpoints")
    ]
    assert lines["model"] == "model: Qwen3MoeForCausalLM, 2 layers, 8 experts, 227,712 parameters; bfloat16"
    assert lines["layout"].endswith("; 1 data-parallel, prefixes shared if the layers are torch's")
    exact = CliRunner().invoke(app, [*command, "--set", "model.dtype=float32"]).stdout
    alone = CliRunner().invoke(app, [*command, "--set", "parallel.share_prefixes=false"]).stdout
    assert "1 data-parallel, prefixes shared\n" in exact and "1 data-parallel\n" in alone
    assert lines["data"] == "prompts.jsonl, 1 prompt, of up to 4 tokens; reward x"
    assert "learning rate 2e-06" in lines["training"] and lines["run"] == "runs/run, new"
    assert "lr = 2e-06" not in result.stdout
    assert "lr = 2e-06" in CliRunner().invoke(app, [*command, "--verbose"]).stdout
    assert "2 problems:" in result.stderr
    assert "rollout.top_p" in result.stderr
    assert "data.reward" in result.stderr


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            partial(sigmoid, "DeepseekV3ForCausalLM"),
            "no topk_method, no scoring_func, no moe_layer_freq in config.json of model; expected "
            '"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, which SGLang reads',
        ),
        (
            partial(
                sigmoid,
                _LITE,
                first_k_dense_replace=None,
                mlp_layer_types=["dense", "sparse"],
            ),
            "first_k_dense_replace = None in config.json of model",
        ),
        (
            partial(sigmoid, _LITE, mlp_layer_types=["sparse", "dense"]),
            "model, whose layers [1] are dense; expected dense layers only before all sparse ones",
        ),
        (
            partial(model, mlp_only_layers=[0]),
            "model, whose layers [0] are dense; expected experts in every layer",
        ),
        (
            partial(mixtral, "0.5.23", head_dim=32),
            "model, whose heads have 32 dimensions; expected 16, hidden_size / num_attention_heads",
        ),
        (
            partial(dense, "Qwen2ForCausalLM", head_dim=32),
            "heads have 32 dimensions; expected 16, hidden_size / num_attention_heads: SGLang derives it for "
            "Qwen2ForCausalLM",
        ),
        (
            partial(mixtral, "0.5.23", rope_parameters=LLAMA3),
            "model, whose rotary frequencies are llama3's; expected plain ones",
        ),
    ],
)
def test_check_refuses_what_sglang_would_not_serve_as_it_is_trained(
    world: Path, spoil: Callable[[], None], says: str
) -> None:
    spoil()
    problems = check(config_with("*ROUTED  sglang.python=env/python"), 1, needs=AT_ONCE)
    assert says in " ".join(map(str, problems))
    assert check(config_with(), 1, needs=AT_ONCE) == [], "the embedded engine has it"


@pytest.mark.parametrize(
    "publish",
    [
        partial(sigmoid, "DeepseekV3ForCausalLM", True),
        partial(sigmoid, "Glm4MoeForCausalLM"),
        partial(sigmoid, _LITE, mlp_layer_types=["dense", "sparse"]),
        partial(mixtral, "0.5.22"),
    ],
)
def test_check_is_content_with_what_sglang_serves(world: Path, publish: Callable[[], None]) -> None:
    publish()
    assert check(config_with("*ROUTED  sglang.python=env/python"), 1, needs=AT_ONCE) == []


def test_check_is_content_with_a_valid_config(world: Path) -> None:
    Path("config.toml").write_text(dump_config(config_with("parallel.expert=2")))
    assert CliRunner().invoke(app, ["check", "config.toml", "--world-size", "2"]).exit_code == 0
    assert CliRunner().invoke(app, ["check", "config.toml"]).exit_code == 1


def test_check_names_each_cause_of_bad_rows_once_and_counts_all(world: Path) -> None:
    bad = ({"prompt": ""}, {"prompt": ["7"], "answer": 2}, {"prompt": "1?", "answer": "1", "images": ["a.png"]})
    rows = [{"prompt": "1 + 1 =", "answer": str(n)} if n % 2 == 0 else bad[n % 3] for n in range(40)]
    prompts(*rows)
    Path("config.toml").write_text(dump_config(config_with()))
    said = CliRunner().invoke(app, ["check", "config.toml"]).stderr
    assert "found 20 of 40 rows of prompts.jsonl that cannot be used; expected" in said
    lines = said.splitlines()[2:]
    assert [line.split(":")[0] for line in lines] == [f"  prompts.jsonl, row {n}" for n in (2, 4, 6)]
    more = [line.rpartition("(")[2] for line in lines]
    assert more == [f"{n} more of these rows)" for n in (6, 6, 5)]
    refused = CliRunner().invoke(app, ["train", "config.toml"])
    assert refused.exit_code == 2 and "found 20 of 40 rows" in refused.stderr, "before a model loads"


def test_no_more_than_ten_causes_are_named() -> None:
    faulty = FaultyRows()
    for number, kind in enumerate(11 * "ab" + "cdefghijkl", 1):
        text = "".join(chr(ord("a") + number % 26 - place % 7) for place in range(60))
        faulty.add(
            f"p.jsonl, row {number}: found {text}... (Error{kind}: {number} of '{text}'); expected text."
        )
    assert faulty.num_rows == 32 and faulty.shown == ", the first 10 causes below"
    lines = faulty.lines.splitlines()
    assert len(lines) == 10 and all(lines[n].endswith(" (10 more of these rows)") for n in (0, 1))
    assert not any("more" in line for line in lines[2:])


def test_check_says_once_what_a_reward_should_return(world: Path) -> None:
    module("mine", "def f(a, b, c): ...")
    Path("config.toml").write_text(dump_config(config_with("data.reward=mine:f")))
    said = CliRunner().invoke(app, ["check", "config.toml"]).stderr
    assert (
        said.count("expected") == 1
        and "a NoneType; expected a number or a RewardResult. Correct the reward.\n" in said
    )


def test_the_command_says_its_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"megatron-dppo {megatron_dppo.__version__}\n"


def test_check_reports_schema_faults(world: Path) -> None:
    Path("config.toml").write_text("[optimizer]\nlrr = 1\n")
    result = CliRunner().invoke(app, ["check", "config.toml"])
    assert result.exit_code == 1
    assert "Did you mean optimizer.lr?" in result.stderr


def test_training_refuses_with_a_message_and_no_traceback(world: Path) -> None:
    Path("config.toml").write_text(dump_config(config_with("rollout.top_p=0.5")))
    result = CliRunner().invoke(app, ["train", "config.toml"])
    assert result.exit_code == 2
    assert result.stderr.startswith("ConfigError: rollout.top_p: found 0.5; expected 1: the ratio")
    assert "Traceback" not in result.stderr


def test_evaluation_alone_asks_nothing_of_training(world: Path) -> None:
    for_training = "data.prompts=none.jsonl  rollout.samples_per_prompt=1  parallel.expert=3"
    require_evaluable(config_with(for_training), 1)
    faulty = "evaluation.pass_at=[64]", 'model.load="none"'
    with pytest.raises(ConfigError) as raised:
        require_evaluable(config_with(for_training, *faulty), 1)
    assert {problem.where for problem in raised.value.problems} == {"evaluation.pass_at", "model.load"}


@pytest.mark.parametrize(
    ("key", "sources"),
    [
        ("rollout.generate", "rollout.generate=own:play  rollout.environment=calculator"),
        ("rollout.agent", "rollout.agent.harness=own:play  rollout.generate=own:play"),
        ("rollout.agent.harness", 'rollout.agent.harness=own:play  rollout.agent.command=["play"]'),
    ],
)
def test_evaluation_refuses_two_sources_of_responses(world: Path, key: str, sources: str) -> None:
    """It would use one of them without a word; what concerns training alone stays allowed."""
    require_evaluable(config_with(f"{sources.split()[0]}  rollout.lag=1"), 1)
    with pytest.raises(ConfigError) as raised:
        require_evaluable(config_with(sources), 1)
    assert [problem.where for problem in raised.value.problems] == [key]


def test_evaluation_sets_with_rewards_need_no_data_reward(world: Path) -> None:
    near = 'data.reward=""  evaluation.sets.held_out.reward=math  *AIME'
    require_evaluable(config_with(near, "evaluation.sets.aime.reward=dapo"), 1)
    with refused("data.reward", "['arithmetic', 'dapo', "):
        require_evaluable(config_with(near), 1)


@pytest.mark.parametrize("where", ["rollout.environment=sudoku", "rollout.generate=json:dumps"])
def test_an_environment_may_give_the_rewards(world: Path, where: str) -> None:
    assert check(config_with(where, "data.reward=environment"), 1, needs=AT_ONCE) == []
    assert check(config_with(where, "data.reward=math"), 1, needs=AT_ONCE) == []
    (problem,) = check(config_with(where, 'data.reward=""'), 1, needs=AT_ONCE)
    assert "or just 'environment' if rollout.environment gives the rewards" in problem.expected


def test_evaluate_says_what_it_needs(world: Path) -> None:
    Path("config.toml").write_text(dump_config(config_with()))
    Path("none.toml").write_text(dump_config(config_with("evaluation.sets={}")))
    for arguments, message in (
        (["none.toml"], "evaluation.sets: found none; expected at least one set."),
        (["config.toml", "--model", "a", "--checkpoint", "b"], "--checkpoint: found --model too;"),
        (["config.toml", "--checkpoint", "model"], "model: found no state.json that can be read"),
    ):
        result = CliRunner().invoke(app, ["evaluate", *arguments])
        assert result.exit_code == 2
        assert message in result.stderr


def test_only_rank_0_speaks_of_the_config(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    result = CliRunner().invoke(app, ["train", "none.toml"])
    assert (result.exit_code, result.stderr) == (2, "")


def test_an_example_trains_without_evaluation_and_its_files(world: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "moe_base" / "base.toml"
    files = {key for key in prompt_files(load_config([example])) if section_of(key) != TRAINING}
    assert files == {"evaluation.sets.aime24.prompts", "evaluation.sets.aime25.prompts"}
    config = load_config([example], ["evaluation.every=0"])
    assert set(map(section_of, prompt_files(config))) == {TRAINING}
    assert evaluation_sets(config) == []
    assert config.evaluation.sets == load_config([example]).evaluation.sets
    absent = "evaluation.sets.absent.prompts=absent.jsonl"
    assert not check(config_with("evaluation.every=0", absent), 1)
    (problem,) = check(config_with(absent), 1)
    assert problem.where == "evaluation.sets.absent.prompts"
    without = TrainingState(config, Runtime(torch.device("cpu"), 0, 1))
    assert not without.is_evaluation_due
    with pytest.raises(ConfigError, match=r"evaluation\.every = 0"):
        require_evaluable(config_with("evaluation.every=0"), 1)
