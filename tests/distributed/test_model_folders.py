"""Every command with a Hugging Face folder and with a Megatron checkpoint: equal results, or a refusal.

Another model of the same sizes shows which folder a command reads.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import typer
from typer.testing import CliRunner

from megatron_dppo.cli import app
from megatron_dppo.runtime.files import read_jsonl
from tests.support.commands import python
from tests.support.converting import convert, converted, differences
from tests.support.sanity_run import TOKENS, make_task, settings, without_clocks
from tests.support.tiny import write_model
from tests.support.tiny_families import write_family

ROOT = Path(__file__).parents[2]
HF, MEGATRON, OTHER_HF, OTHER = "hf", "megatron", "other_hf", "other_megatron"
RUN: dict[str, Any] = {
    "run": {"num_rollouts": 1},
    "data": {"reward": "tests.faults.rewards:digits"},
    "optimizer": {"lr": 1e-2, "warmup_steps": 0},
    "checkpoint": {"every": 1},
    "tracking": {"batches_every": 1},
}


@dataclass(frozen=True)
class Models:
    """A folder with a model as `hf` and `megatron`, another as `other_hf` and `other_megatron`, and prompts."""

    folder: Path

    def toml(self, name: str, load: str, **changes: dict[str, Any]) -> Path:
        """Write the config of a run in `name` that loads a model."""
        tables = settings(self.folder, name, **RUN | changes)
        tables["model"]["load"] = str(self.folder / load)
        file = self.folder / f"{name}.toml"
        file.write_text(tomli_w.dumps(tables))
        return file

    @cache  # noqa: B019  # one for the module
    def trained(self, load: str) -> Path:
        """Return the folder of a finished run that loaded a model."""
        succeed("train", self.toml(f"run_{load}", load))
        return self.folder / f"run_{load}"

    @cache  # noqa: B019
    def adapters(self, load: str) -> Path:
        """Return the checkpoint of a finished LoRA run that loaded a model."""
        succeed("train", self.toml(f"lora_{load}", load, lora={"rank": 8, "alpha": 24}))
        return newest(self.folder / f"lora_{load}")


def succeed(*arguments: object) -> str:
    """Return what `megatron-dppo ...` prints, in a process."""
    done = python("-m", "megatron_dppo", *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def printed(*arguments: object) -> str:
    """Return what `megatron-dppo ...` prints, in this process."""
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done.stdout


def newest(run: Path) -> Path:
    checkpoints = run / "checkpoints"
    return checkpoints / (checkpoints / "latest").read_text().strip()


def json_of(file: Path) -> Any:
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = make_task(tmp_path_factory.mktemp("kinds"))
    (folder / "model").rename(folder / HF)
    write_model(folder / OTHER_HF, seed=3, num_hidden_layers=2, **TOKENS)
    for file in (folder / HF).glob("token*"):
        shutil.copy(file, folder / OTHER_HF)
    converted("to-megatron", "--hf", folder / HF, "--out", folder / MEGATRON)
    converted("to-megatron", "--hf", folder / OTHER_HF, "--out", folder / OTHER)
    return Models(folder)


def train(models: Models, load: str, out: Path) -> Any:
    return without_clocks([row for _, row in read_jsonl(models.trained(load) / "metrics.jsonl")])


def train_with_reference(models: Models, load: str, out: Path) -> Any:
    toml = models.toml(f"reference_{load}", HF, algorithm={"ref_kl_coef": 0.1})
    succeed("train", toml, "--set", f"model.reference={models.folder / load}")
    return without_clocks([row for _, row in read_jsonl(models.folder / f"reference_{load}/metrics.jsonl")])


def train_in_two_phases(models: Models, load: str, out: Path) -> Any:
    sampling, training = models.toml(f"sampling_{load}", load), models.toml(f"training_{load}", load)
    succeed("train", sampling, "--rollout-only", out)
    succeed("train", training, "--train-only", out)
    return without_clocks([row for _, row in read_jsonl(models.folder / f"training_{load}/metrics.jsonl")])


def check(models: Models, load: str, out: Path) -> str:
    text = printed("check", models.toml("as_checked", load)).replace(str(models.folder / load), "MODEL")
    return re.sub(r"[\d.]+ GiB free", "FREE", text)  # others write to the disk meanwhile


def plan(models: Models, load: str, out: Path) -> Any:
    flags = ("--gpus", 2, "--gpu-memory", "80GB", "--json")
    return printed("plan", models.toml("as_planned", load), *flags)


def one_set(models: Models) -> dict[str, Any]:
    prompts = str(models.folder / "held_out.jsonl")
    return {"every": 1, "samples_per_prompt": 2, "sets": {"held_out": {"prompts": prompts}}}


def evaluate(models: Models, load: str, out: Path) -> Any:
    """As --model, where model.load is the other model, and as model.load."""
    named = models.toml("evaluated", OTHER_HF, evaluation=one_set(models))
    succeed("evaluate", named, "--model", models.folder / load, "-o", out / "named")
    succeed("evaluate", models.toml("evaluated", load, evaluation=one_set(models)), "-o", out / "loaded")
    first, second = (
        (json_of(folder / "metrics.json")["held_out"]["metrics"], (folder / "held_out.jsonl").read_text())
        for folder in (out / "named", out / "loaded")
    )
    assert first == second
    return first


def measure_mismatch(models: Models, load: str, out: Path) -> Any:
    succeed("measure-mismatch", models.toml(f"measured_{load}", load), "-o", out)
    found = json_of(out / "mismatch.json")
    return found["live"], found["replayed"], (out / "tokens.jsonl").read_text()


def what_if(models: Models, load: str, out: Path) -> Any:
    """Run what-if on one run's mini-batches with two folders' weights in turn."""
    weights = ("--checkpoint", models.folder / load, "--before", models.folder / OTHER_HF)
    succeed("what-if", models.trained(HF), *weights, "--preset", "minirl", "-o", out)
    found = json_of(out / "what_if.json")
    return found["mismatch"], found["rows"]


def what_if_before(models: Models, load: str, out: Path) -> Any:
    """Run what-if on one run's mini-batches with a folder's weights, then with the run's weights."""
    before = ("--before", models.folder / load)
    succeed("what-if", models.trained(HF), *before, "--preset", "minirl", "-o", out)
    found = json_of(out / "what_if.json")
    return found["mismatch"], found["rows"]


def compare(models: Models, load: str, out: Path) -> str:
    """The page's curves, of runs in folders of one name."""
    shutil.copytree(models.trained(load), out / "run")
    printed("compare", out / "run", "-o", out / "report.html")
    page = (out / "report.html").read_text()
    _, _, rest = page.partition('<script type="application/json" id="figures">')
    figures = json.loads(rest.partition("</script>")[0])
    return json.dumps({name: figure for name, figure in figures.items() if not name.startswith("time")})


def figures(models: Models, load: str, out: Path) -> Any:
    """The drawings, of runs in folders of one name."""
    shutil.copytree(models.trained(load), out / "run")
    succeed("figures", out / "run", "-o", out / "figures", "--format", "svg")
    return {file.name: paths_of(file) for file in sorted((out / "figures").glob("*.svg"))}


def paths_of(file: Path) -> list[str]:
    """Lines and areas of a drawing, without ids and dates."""
    return [line.strip() for line in file.read_text().splitlines() if line.lstrip().startswith("<path d=")]


def prepare_data(models: Models, load: str, out: Path) -> str:
    out.mkdir()
    rows = [json.dumps({"question": f"{n} + 1 =", "answer": f"{n + 1}"}) for n in range(3)]
    (out / "problems.jsonl").write_text("\n".join(rows))
    flags = ("--template", "none", "--source", out / "problems.jsonl", "--out", out / "prompts.jsonl")
    printed("prepare-data", "custom", "--tokenizer", models.folder / load, *flags)
    return (out / "prompts.jsonl").read_text()


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def to_hf_with_template(models: Models, load: str, out: Path) -> dict[str, bytes]:
    """The template gives config and tokenizer, and no weights. The other model has the same ones."""
    source = ("--megatron", models.folder / MEGATRON)
    converted("to-hf", *source, "--hf-template", models.folder / load, "--out", out)
    assert differences(models.folder / HF, out) == []
    return files_of(out)


def inspect(models: Models, load: str, out: Path) -> str:
    """Numbers and bytes of the weights; one kind stacks tensors that the other has one by one."""
    done = convert("inspect", models.folder / load)
    assert done.exit_code == 0, done.output
    (weights,) = (line for line in done.stdout.splitlines() if line.startswith("weights: "))
    return weights.partition("), ")[2]


def verify(models: Models, load: str, out: Path) -> list[tuple[int, str]]:
    """Against both kinds of both models, as first and as second folder."""
    found: list[tuple[int, str]] = []
    for other in (HF, MEGATRON, OTHER_HF, OTHER):
        for pair in ((load, other), (other, load)):
            done = convert("verify", *(models.folder / name for name in pair))
            found.append((done.exit_code, done.stdout.splitlines()[-1]))
    return found


def to_adapter(models: Models, load: str, out: Path) -> dict[str, bytes]:
    """Of a run from a folder; peft's base model is given, as it must be for a Megatron checkpoint."""
    checkpoint, base = models.adapters(load), models.folder / HF
    succeed("convert", "to-adapter", "--megatron", checkpoint, "--out", out, "--base", base)
    return files_of(out)


def to_hf_of_run(models: Models, load: str, out: Path) -> dict[str, bytes]:
    checkpoint = newest(models.trained(load))
    converted("to-hf", "--megatron", checkpoint, "--out", out, "--dtype", "bfloat16")
    files = files_of(out)
    card = files.pop("README.md").decode()  # the folder's name is in it
    kept = json.loads((checkpoint / "state.json").read_text())
    assert f"| {kept['state']['rollout']} rollouts, {kept['state']['step']} gradient steps |" in card
    assert hashlib.sha256(kept["config"].encode()).hexdigest() in card
    return files


Command = Callable[[Models, str, Path], Any]
EQUAL: dict[str, tuple[Command, bool]] = {
    "train": (train, True),
    "train, model.reference": (train_with_reference, True),
    "train, --rollout-only and --train-only": (train_in_two_phases, True),
    "check": (check, False),
    "plan": (plan, False),
    "evaluate": (evaluate, True),
    "measure-mismatch": (measure_mismatch, True),
    "what-if": (what_if, True),
    "what-if, --before": (what_if_before, True),
    "compare": (compare, True),
    "figures": (figures, True),
    "prepare-data": (prepare_data, False),
    "convert inspect": (inspect, False),
    "convert verify": (verify, True),
    "convert to-hf": (to_hf_of_run, True),
    "convert to-hf, --hf-template": (to_hf_with_template, False),
    "convert to-adapter": (to_adapter, True),
}
"""By command: its results with a model folder, and whether they depend on the weights."""


@pytest.mark.parametrize("row", EQUAL)
def test_both_kinds_of_folder_give_equal_results(models: Models, tmp_path: Path, row: str) -> None:
    command, is_of_weights = EQUAL[row]
    found = {load: command(models, load, tmp_path / load) for load in (HF, MEGATRON, OTHER)}
    assert found[HF] and found[HF] == found[MEGATRON]
    assert (found[OTHER] != found[HF]) == is_of_weights


Arguments = Callable[[Models, Path], list[object]]
NO_HF = "megatron/metadata.json"
NO_MEGATRON = "megatron-dppo convert to-hf"
NO_STATE = "state.json"
REFUSED: dict[str, tuple[Arguments, str]] = {
    "convert to-megatron": (lambda m, out: ["--hf", m.folder / MEGATRON, "--out", out], NO_MEGATRON),
    "convert to-hf": (lambda m, out: ["--megatron", m.folder / HF, "--out", out], NO_HF),
    "convert to-adapter": (lambda m, out: ["--megatron", m.folder / HF, "--out", out], NO_HF),
    "convert to-adapter, no adapters": (
        lambda m, out: ["--megatron", m.folder / MEGATRON, "--out", out],
        "holds no LoRA adapters",
    ),
    "convert to-adapter, model.load": (
        lambda m, out: ["--megatron", m.adapters(MEGATRON), "--out", out],
        f"{MEGATRON}, a Megatron checkpoint, as the run's model.load; expected the name or folder of a Hugging",
    ),
    "convert to-adapter, --base": (
        lambda m, out: ["--megatron", m.adapters(HF), "--out", out, "--base", m.folder / MEGATRON],
        f"{MEGATRON}, a Megatron checkpoint; expected the name or folder of a Hugging Face model",
    ),
    "convert merge-adapter": (
        lambda m, out: ["--hf", m.folder / MEGATRON, "--adapter", adapter_of(m), "--out", out],
        NO_MEGATRON,
    ),
    "convert upcycle": (
        lambda m, out: ["--hf", dense_of(m), "--out", out],
        NO_MEGATRON,
    ),
    "quantize": (
        lambda m, out: [
            *("--hf", m.folder / MEGATRON, "--out", out, "--format", "fp8"),
            *("--prompts", m.folder / "prompts.jsonl"),
        ],
        NO_MEGATRON,
    ),
    "convert to-megatron, nowhere": (
        lambda m, out: ["--hf", m.folder / "nowhere", "--out", out],
        "--hf: found",
    ),
    "convert to-hf, nowhere": (
        lambda m, out: ["--megatron", m.folder / "nowhere", "--out", out],
        "--megatron: found",
    ),
    "convert to-hf, no template": (
        lambda m, out: ["--megatron", m.folder / MEGATRON, "--hf-template", m.folder / "nowhere", "--out", out],
        "--hf-template: found",
    ),
    "convert inspect, nowhere": (lambda m, out: [m.folder / "nowhere"], "FOLDER: found"),
    "evaluate, --checkpoint": (
        lambda m, out: [
            m.toml("refused", HF, evaluation=one_set(m)),
            "--checkpoint",
            m.folder / MEGATRON,
            "-o",
            out,
        ],
        NO_STATE,
    ),
    "evaluate, --checkpoint of Hugging Face": (
        lambda m, out: [refused_toml(m), "--checkpoint", m.folder / HF, "-o", out],
        NO_STATE,
    ),
}
"""By command: arguments that name a folder of the kind that it does not take, and words of the message."""


def refused_toml(models: Models) -> Path:
    return models.toml("refused", HF, evaluation=one_set(models))


def dense_of(models: Models) -> Path:
    """Return a dense model as a Megatron checkpoint."""
    out = models.folder / "dense_megatron"
    if not out.exists():
        write_family(models.folder / "dense", "Qwen3ForCausalLM")
        converted("to-megatron", "--hf", models.folder / "dense", "--out", out)
    return out


def adapter_of(models: Models) -> Path:
    out = models.folder / "adapter"
    if not out.exists():
        to_adapter(models, HF, out)
    return out


@pytest.mark.parametrize("row", REFUSED)
def test_the_other_kind_of_folder_is_refused_by_name(models: Models, tmp_path: Path, row: str) -> None:
    arguments, words = REFUSED[row]
    command = row.partition(",")[0].split()
    done = CliRunner().invoke(app, list(map(str, [*command, *arguments(models, tmp_path / "out")])))
    assert done.exit_code == 2, done.output + repr(done.exception)
    assert words in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_merged_adapter_of_either_kind_of_run_is_the_runs_weights(models: Models, tmp_path: Path) -> None:
    """`merge-adapter` onto the Hugging Face folder, against `to-hf` of the run's checkpoint."""
    for load in (HF, MEGATRON):
        adapter, merged, whole = (tmp_path / f"{load}_{name}" for name in ("adapter", "merged", "whole"))
        to_adapter(models, load, adapter)
        converted("merge-adapter", "--hf", models.folder / HF, "--adapter", adapter, "--out", merged)
        converted("to-hf", "--megatron", models.adapters(load), "--out", whole)
        assert differences(merged, whole) == []
        assert differences(merged, models.folder / HF) != []


RUN_ELSEWHERE = {"serve", "grid"}
"""`serve` needs SGLang: in tests/sglang both kinds of folder are served, by test_serve.py and test_mismatch.py.
`grid` runs `train`: tests/recipes/test_grid.py compares them."""


def test_every_command_has_a_row() -> None:
    rows = {row.partition(",")[0] for row in (*EQUAL, *REFUSED)} | RUN_ELSEWHERE
    assert rows == set(commands_of(typer.main.get_command(app)))


def commands_of(command: Any, words: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the words of each command below a group."""
    for name, each in getattr(command, "commands", {}).items():
        yield from commands_of(each, (*words, name))
    if not hasattr(command, "commands"):
        yield " ".join(words)
