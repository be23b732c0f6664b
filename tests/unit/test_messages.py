"""What the commands say to bad input: a sentence with what was found, expected and to do, and no traceback."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from megatron_dppo import errors
from megatron_dppo.cli import app
from megatron_dppo.cli.options import user_errors
from megatron_dppo.run_folder.folder import RunFolder
from tests.support.byte_tokenizers import qwen3_tokenizer, save
from tests.support.plan_models import QWEN3_30B

NOWHERE = "/proc/nowhere"  # where nobody may write


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a finished run, a model without weights, and prompts."""
    monkeypatch.chdir(tmp_path)
    with RunFolder.open(Path("run"), {"run": {"num_rollouts": 1}}, resume=False) as folder:
        folder.write_rollout(0, {"reward/mean": 0.5}, num_rollouts=1)
    Path("run/checkpoints/step_00000008").mkdir()
    Path("a_folder").mkdir()
    save(qwen3_tokenizer(), Path("model"))
    Path("model/config.json").write_text(json.dumps(QWEN3_30B))
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "answer": "2"}) + "\n")
    data = 'data.prompts = "prompts.jsonl"\ndata.reward = "math"\n'
    Path("base.toml").write_text(f'{data}model.load = "model"\n')
    Path("bom.toml").write_bytes(b"\xef\xbb\xbfrun.seed = 1\n")
    return tmp_path


_KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]


@pytest.mark.parametrize("kind", _KINDS)
def test_only_what_the_user_has_to_change_ends_a_command_with_status_2(kind: type[Exception]) -> None:
    with pytest.raises(typer.Exit) as raised, user_errors():
        raise kind("found")
    is_of_cluster = kind.__name__ in ("LaunchError", "ServerError", "StorageError", "WeightSyncError")
    assert raised.value.exit_code == (1 if is_of_cluster else 2)
    assert errors.exit_status(ValueError("a fault of the program")) == 1


def said(result: Result) -> str:
    assert result.exit_code in (1, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return " ".join(result.output.split())


LONG = "n" * 300
PREPARE = "prepare-data custom --source prompts.jsonl --tokenizer model --template none --out"


def test_examples_of_the_help_keep_their_lines() -> None:
    """So that they can be copied: each line of an example that is not its last one continues."""
    pages = [["grid"], ["prepare-data"], ["check"], ["plan"], ["convert", "to-hf"]]
    lines = [line for page in pages for line in CliRunner().invoke(app, [*page, "--help"]).output.splitlines()]
    begun = [number for number, line in enumerate(lines) if line.startswith("      megatron-dppo")]
    assert len(begun) > 8
    for number in begun:
        while lines[number].endswith(" \\"):
            number += 1
            assert lines[number].startswith(10 * " ")
        assert lines[number + 1] == ""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"{PREPARE} {NOWHERE}/a.jsonl", "--out: found /proc/nowhere/a.jsonl"),
        (f"{PREPARE} base.toml/a.jsonl", "expected a place that can be written"),
        (
            f"{PREPARE} {LONG}.jsonl",
            "expected a path of names that the file system takes. Choose a shorter name",
        ),
        (f"compare {LONG} -o report.html", "Choose a shorter name"),
        ("compare run -o a_folder", "--out: found a_folder, a folder; expected the file to write. Name a file"),
        (f"compare run -o {NOWHERE}/report.html", "expected a place that can be written"),
        (f"figures run -o {NOWHERE}", "expected a place that can be written"),
        (f"evaluate base.toml -o {NOWHERE} --set model.load=nowhere", "nowhere, which does not exist"),
        (
            "evaluate base.toml --checkpoint run/step_00000008",
            "--checkpoint: found run/step_00000008, which does not exist; expected a checkpoint of a run",
        ),
        (
            "evaluate base.toml --checkpoint run",
            "It is a run: name one of its checkpoints, such as run/checkpoints/step_00000008.",
        ),
        ("check base.toml --set model.load=base.toml", "base.toml, which is a file"),
        (
            "check base.toml --set model.load=Qwen/Qwen3-30B-A3B",
            "Names on the Hugging Face hub are not read: download it first (hf download Qwen/Qwen3-30B-A3B",
        ),
        (
            "check base.toml --set model.load=models/Qwen3-8B",
            "Download it there (hf download OWNER/Qwen3-8B --local-dir models/Qwen3-8B, with the owner",
        ),
        (
            "check base.toml --set data.reward=json:dumpz",
            "data.reward: found 'json:dumpz', and 'dumpz' is not there; expected a function of json. Correct",
        ),
        (
            "check base.toml --set data.reward=",
            "data.reward: found none; expected one of ['arithmetic', 'dapo', 'math'], "
            "'package.module:function' for your own function, or just 'environment' if "
            "rollout.environment gives the rewards. Name the reward of your prompts.",
        ),
        (
            "train base.toml --set data.reward=environment",
            "ConfigError: data.reward: found 'environment', but rollout.environment = 'single_turn' gives no",
        ),
        ("check bom.toml", "bom.toml: found a byte-order mark (BOM) at its beginning"),
        (
            "check base.toml --set algorithm.preset=dppo_topk_tv --set algorithm.top_k=100",
            "algorithm.top_k: found 100 (set by --set algorithm.top_k=100); expected less than or equal to 64.",
        ),
        ("check base.toml --set data.reward_values=[0,1,2]", "found [0, 1, 2]"),
        ("check base.toml --set data.reward_values=[0,1,2]", "expected 2 values."),
        ("check base.toml --set optimizer.lr=1e30", "expected less than or equal to 1."),
        (
            "check base.toml --set parallel.expert=7",
            "expected a divisor of the model's experts, 128 (1, 2, 4, 8, 16, 32, 64, 128).",
        ),
        (
            "check base.toml --set data.prompts=nowhere.jsonl",
            "data.prompts: found nowhere.jsonl: no such file; expected a prompt file. Check the path",
        ),
        (
            "check base.toml --set data.reward=os:getcwd --set data.reward_values=[-1.0,1.0]",
            "Leave it out, or set it back to [0.0, 1.0], and implement it in the function.",
        ),
        ("check base.toml --set run.folder=", "run.folder: found '', the working directory"),
    ],
)
def test_bad_input_is_named(world: Path, command: str, words: str) -> None:
    text = said(CliRunner().invoke(app, command.split()))
    assert words in text
    assert text.count("no such file") <= 1
    assert not list(world.glob("*.tmp")) and not list(world.glob("a_folder/*")), "nothing is left behind"


def test_a_table_is_emptied_by_an_override(world: Path) -> None:
    """Evaluation is turned off without another file; `check` notes that the rest of it has no effect."""
    with Path("base.toml").open("a") as toml:
        toml.write('evaluation.every = 5\nevaluation.sets.aime.prompts = "prompts.jsonl"\n')
    before = CliRunner().invoke(app, ["check", "base.toml"]).stdout
    after = CliRunner().invoke(app, ["check", "base.toml", "--set", "evaluation.sets={}"]).stdout
    assert "aime: prompts.jsonl, 1 prompt," in before
    assert "none; without a set, these do nothing: evaluation.every" in after


@pytest.mark.parametrize("template", ["r1_distill"])
def test_a_template_of_another_tokenizer_is_named(world: Path, template: str) -> None:
    command = ["custom", "--source", "prompts.jsonl", "--tokenizer", "model", "--template", template]
    text = said(CliRunner().invoke(app, ["prepare-data", *command, "--out", "out.jsonl"]))
    assert "DeepSeek-R1-Distill" in text and not Path("out.jsonl").exists()
