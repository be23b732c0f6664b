"""The run folder: a resumed file has no gap and no row twice, and a torn line is noticed."""

import dataclasses
import json
import logging
import math
import subprocess
import tomllib
from pathlib import Path

import pytest

import megatron_dppo
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import CheckpointError, ConfigError, DataError
from megatron_dppo.run_folder.folder import RunFolder, rollout_line
from megatron_dppo.run_folder.reader import read_run
from megatron_dppo.runtime.libraries import git_commit

CONFIG = {"run": {"seed": 3, "num_rollouts": 4}, "algorithm": {"preset": "grpo", "delta": None}}


def _write(folder: RunFolder, rollouts: range) -> None:
    for rollout in rollouts:
        for step in (2 * rollout, 2 * rollout + 1):
            folder.write_step(rollout, step, {"loss": step / 3, "trust_region/masked_fraction_positive": 0.001})
        folder.write_rollout(rollout, {"reward/mean": rollout / 7}, num_rollouts=4)


def test_files_of_a_new_run_folder(tmp_path: Path) -> None:
    """Config without unset keys, versions, one line per row, and the subfolders."""
    path = tmp_path / "deep" / "run"
    with RunFolder.open(path, CONFIG, resume=False, decisions={"layer_spec": "torch"}) as folder:
        _write(folder, range(1))
        lines = (path / "metrics.jsonl").read_text().splitlines()  # flushed before closing
    assert json.loads(lines[0]) == {
        "kind": "step",
        "rollout": 0,
        "step": 0,
        "loss": 0.0,
        "trust_region/masked_fraction_positive": 0.001,
    }
    assert json.loads(lines[2]) == {"kind": "rollout", "rollout": 0, "reward/mean": 0.0}
    assert tomllib.loads((path / "config.toml").read_text()) == {
        "run": {"seed": 3, "num_rollouts": 4},
        "algorithm": {"preset": "grpo"},
    }
    versions = json.loads((path / "versions.json").read_text())
    assert {
        "python",
        "torch",
        "megatron-core",
        "transformers",
        "platform",
        "git_commit",
        "argv",
    } <= versions.keys()
    assert versions["megatron-dppo"] == megatron_dppo.__version__
    assert versions["layer_spec"] == "torch"
    assert all((path / name).is_dir() for name in ("samples", "checkpoints", "servers"))


def test_the_schema_round_trips(tmp_path: Path) -> None:
    """The resolved config, infinities and paths included, loads as the same config."""
    config = Config.model_validate({"algorithm": {"ratio_cap": math.inf}, "tracking": {"backends": []}})
    RunFolder.open(tmp_path / "run", config.model_dump(), resume=False).close()
    assert Config.model_validate(tomllib.loads((tmp_path / "run" / "config.toml").read_text())) == config


def test_resuming_cuts_what_came_after_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Killed with a torn line, resumed at the offset: the file is the uninterrupted one."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with RunFolder.open(whole, CONFIG, resume=False) as folder:
        _write(folder, range(4))

    with RunFolder.open(killed, CONFIG, resume=False) as folder:
        _write(folder, range(2))
        offset = folder.offset
        _write(folder, range(2, 3))
    with (killed / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "step", "rol')
    assert len(read_run(killed).notes) == 1

    with RunFolder.open(killed, CONFIG, resume=True) as folder:
        folder.truncate(offset)
        assert folder.offset == offset
        _write(folder, range(2, 4))
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert "cut 3 lines" in caplog.text
    assert not list(killed.glob("config.*.toml"))


def test_resuming_without_a_checkpoint_starts_over(tmp_path: Path) -> None:
    """Offset 0 empties the file, and resume = true on a new folder is a plain start."""
    with RunFolder.open(tmp_path, CONFIG, resume=True) as folder:
        folder.truncate(0)
        _write(folder, range(1))
    with RunFolder.open(tmp_path, CONFIG, resume=True) as folder:
        folder.truncate(0)
    assert read_run(tmp_path).rollouts == ()


@pytest.mark.parametrize(
    ("change", "message"), [(+1000, "has 0 bytes|bytes; the checkpoint"), (-1, "no line ends")]
)
def test_a_foreign_offset_is_refused(tmp_path: Path, change: int, message: str) -> None:
    """Beyond the end, or inside a line: the file is not the checkpoint's, and stays untouched."""
    with RunFolder.open(tmp_path, CONFIG, resume=False) as folder:
        _write(folder, range(1))
        offset = folder.offset
        with pytest.raises(CheckpointError, match=message):
            folder.truncate(offset + change)
        assert folder.offset == offset


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    """An earlier run without resume, a file, and half a run; a launcher's own files are fine."""
    path = tmp_path / "run"
    (path / "servers").mkdir(parents=True)
    (path / "servers" / "0.json").write_text("{}")
    (path / "slurm.out").write_text("log")
    with RunFolder.open(path, CONFIG, resume=False) as folder:
        _write(folder, range(1))
    with pytest.raises(ConfigError, match=r"checkpoint\.resume = true"):
        RunFolder.open(path, CONFIG, resume=False)
    (path / "config.toml").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.toml"):
        RunFolder.open(path, CONFIG, resume=True)
    with pytest.raises(ConfigError, match="a file"):
        RunFolder.open(path / "slurm.out", CONFIG, resume=True)


def test_a_changed_config_keeps_the_earlier_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Both files stay, and the log names them."""
    RunFolder.open(tmp_path, CONFIG, resume=False).close()
    RunFolder.open(tmp_path, {"run": {"seed": 4}}, resume=True).close()
    assert tomllib.loads((tmp_path / "config.toml").read_text()) == {"run": {"seed": 4}}
    assert tomllib.loads((tmp_path / "config.1.toml").read_text())["run"]["seed"] == 3
    assert "config.1.toml" in caplog.text


def test_a_kill_while_config_toml_is_replaced_leaves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with metrics and without config.toml could not be resumed."""
    (tmp_path / "config.toml").write_text("earlier = 1\n")

    def killed(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(SystemExit):
        RunFolder.open(tmp_path, {"run": {"seed": 4}}, True)
    assert (tmp_path / "config.toml").read_text() == "earlier = 1\n"


def test_non_finite_numbers_survive_as_valid_json(tmp_path: Path) -> None:
    """NaN and infinities are strings in the file and floats again after reading."""
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1 + 0.2, "e": 7}
    with RunFolder.open(tmp_path, CONFIG, resume=False) as folder:
        folder.write_step(0, 0, values)
        folder.write_evaluation(1, {"eval/held_out/avg_at_1": 0.5})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    run = read_run(tmp_path)
    read = run.steps[0].values
    assert math.isnan(read["a"])
    assert {name: read[name] for name in "bcde"} == {name: values[name] for name in "bcde"}
    assert run.evaluations[0].values == {"eval/held_out/avg_at_1": 0.5}


@pytest.mark.parametrize(
    "damage",
    [b'{"kind": "ste\n', b"[1]\n", b'{"kind": "x", "rollout": 0}\n', b'{"kind": "rollout"}\n', b"\n"],
)
def test_only_the_last_line_may_be_torn(tmp_path: Path, damage: bytes) -> None:
    """A damaged line elsewhere names the file and the line."""
    with RunFolder.open(tmp_path, CONFIG, resume=False) as folder:
        _write(folder, range(1))
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(damage + file.read_bytes())
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1"):
        read_run(tmp_path)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    """The writer is still at it. The rows before it are read all the same."""
    with RunFolder.open(tmp_path, CONFIG, resume=False) as folder:
        _write(folder, range(3))
    whole = read_run(tmp_path)
    file = tmp_path / "metrics.jsonl"
    content = file.read_bytes()
    file.write_bytes(content[:-9])
    torn = read_run(tmp_path)
    lines = content.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))
    (note,) = torn.notes
    assert "last line of metrics.jsonl is incomplete" in note
    assert dataclasses.replace(torn, notes=()) == read_run(tmp_path) != whole


def test_a_row_that_comes_twice_is_an_error(tmp_path: Path) -> None:
    """It means two writers, or a resume without truncation."""
    with RunFolder.open(tmp_path, CONFIG, resume=False) as folder:
        _write(folder, range(2))
        folder.write_rollout(1, {}, num_rollouts=4)
    with pytest.raises(DataError, match=r"rollout 1 .*rollout 1"):
        read_run(tmp_path)


def test_non_run_folder_is_refused(tmp_path: Path) -> None:
    """The message names what is missing."""
    with pytest.raises(DataError, match="not a folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"config\.toml .*metrics\.jsonl"):
        read_run(tmp_path)


def test_the_line_for_people(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All fields, none, and through the folder: the steps' masked share, and seconds that are counted once."""
    metrics = {
        "reward/mean": 0.61,
        "rollout/response_length_mean": 17,
        "policy/entropy": 0.42,
        "mismatch/abs_prob_diff_mean": 0.0027,
        "trust_region/masked_fraction_positive": 0.001,
        "trust_region/masked_fraction_negative": 0.003,
        "routing/agreement_mean": 0.94,
    }
    assert rollout_line(11, 80, metrics, 0.9, 62) == (
        "rollout  12/80  reward 0.61  length 17.0  entropy 0.42  |pi-mu| 0.0027  masked +0.1% -0.3%  "
        "agreement 0.94  0.9 s  left 1m02s"
    )
    assert rollout_line(0, 3, {}, 0.0, 7200) == "rollout  1/3  0.0 s  left 2h00m"
    zeros = dict.fromkeys(metrics, 0.0)
    del zeros["trust_region/masked_fraction_positive"]
    assert rollout_line(0, 3, zeros, 0.0, 0) == (
        "rollout  1/3  reward 0.00  length 0.0  entropy 0.00  |pi-mu| 0.0000  masked -0.0%  agreement 0.00  "
        "0.0 s  left 0s"
    )
    with (
        caplog.at_level(logging.INFO),
        RunFolder.open(tmp_path, CONFIG, resume=False) as folder,
    ):
        folder.write_step(0, 0, {"trust_region/masked_fraction_positive": 0.1})
        folder.write_step(0, 1, {"trust_region/masked_fraction_positive": 0.3})
        seconds = {
            "time/rollout_s": 40.2,
            "time/train_s": 2.1,
            "time/total_s": 42.6,
        }  # a total holds its phases
        folder.write_rollout(0, {"reward/mean": 0.5, **seconds}, num_rollouts=3)
        folder.write_rollout(1, seconds, num_rollouts=3)
    assert "rollout  1/3  reward 0.50  masked +20.0%  42.6 s  left 1m25s" in caplog.text
    assert "rollout  2/3  0.0 s  left 21s" in caplog.text, "later rows count from the row before"


def test_a_backend_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the extra, and nothing is left half open."""
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'megatron-dppo\[track\]'"):
        RunFolder.open(tmp_path, CONFIG, resume=False, backends=("wandb",))
    with pytest.raises(ConfigError, match=r"found abacus"):
        RunFolder.open(tmp_path, CONFIG, resume=False, backends=("abacus",))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_git_commit_of_a_checkout_only(tmp_path: Path) -> None:
    """A package inside another repository has no commit."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "__init__.py").write_text("")
    assert git_commit(tmp_path) is None
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    commit = git_commit(tmp_path)
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "__init__.py").write_text("x = 1")
    assert git_commit(tmp_path) == commit + "+changes"


def test_a_resumed_run_must_truncate_first(tmp_path: Path) -> None:
    """Appending after a row that the checkpoint does not know would count it twice."""
    with RunFolder.open(tmp_path, CONFIG, resume=False) as folder:
        _write(folder, range(1))
    with (
        RunFolder.open(tmp_path, CONFIG, resume=True) as folder,
        pytest.raises(AssertionError, match="truncate"),
    ):
        _write(folder, range(1, 2))
