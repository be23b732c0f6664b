"""`megatron-dppo grid`: what it would run, what it refuses, and what it submits."""

import itertools
import os
import re
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dppo.cli import app, grid
from megatron_dppo.cli.grid import cells_of, gpus_for, parse_seeds
from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError
from megatron_dppo.run_folder.folder import RunFolder
from tests.support.experiments import ROOT

SBATCH = """#!/bin/sh
printf '%s\\n' "$@" > "$CALLS/$(ls "$CALLS" | wc -l)"
echo "7$(ls "$CALLS" | wc -l);cluster"
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_grid_as_ctrl_c_does_unless_it_was_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with grid._interruptible():
            os.kill(os.getpid(), number)
        signal.signal(number, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt), grid._interruptible():
            os.kill(os.getpid(), number)
            time.sleep(600)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_seeds_are_numbers_and_ranges_in_their_order() -> None:
    assert parse_seeds("7,0-2, 12") == [7, 0, 1, 2, 12]
    for wrong in ("", "a", "3-1", "1,,2", "0-2,1", "-1"):
        with pytest.raises(ConfigError) as error:
            parse_seeds(wrong)
        assert error.value.problems[0].where == "--seeds"


def test_combinations_are_named_by_what_they_vary(tmp_path: Path) -> None:
    base, files = tmp_path / "base.toml", [tmp_path / "kl.toml", tmp_path / "tv.toml"]
    base.write_text("[optimizer]\nlr = 1e-3\n")
    for file in files:
        file.write_text(f"[algorithm]\npreset = 'dppo_binary_{file.stem}'\n")
    rewards = "data.reward_values=[0, 1],[0.5, -1.0]"
    varied = ["algorithm.delta=0.2,0.05", "rollout.routing_replay=replay,off", rewards]
    cells = cells_of([base], files, varied, ["run.num_rollouts=3"])
    assert len(cells) == len({cell.name for cell in cells}) == 16
    assert cells[0].name.startswith("kl-delta_0.2-routing_replay_replay-reward_values_")
    assert cells[-1].name.startswith("tv-delta_0.05-routing_replay_off-reward_values_")
    last = load_config(cells[-1].configs, cells[-1].overrides)
    assert (last.algorithm.model_dump()["delta"], last.rollout.routing_replay) == (0.05, "off")
    assert last.algorithm.preset == "dppo_binary_tv" and list(last.data.reward_values or ()) == [0.5, -1.0]
    assert (last.run.num_rollouts, last.optimizer.lr) == (3, 1e-3)
    assert [cell.name for cell in cells_of([base], [], [], [])] == ["base"]
    words = cells_of([base], [], ["data.reward='a.b:c, d',\"e\""], [])
    assert [load_config(cell.configs, cell.overrides).data.reward for cell in words] == ["a.b:c, d", "e"]
    flags = cells_of([base], [], ["checkpoint.resume=true,false"], [])
    assert [load_config(cell.configs, cell.overrides).checkpoint.resume for cell in flags] == [True, False]


LR = "(set by --set optimizer.lr=-1)"


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["-o", "{folder}"], "CONFIG"),
        (["{base}", "--vary", "algorithm.delta", "-o", "{folder}"], "--vary algorithm.delta"),
        (["{base}", "--vary", "algorithm.delta=", "-o", "{folder}"], "--vary algorithm.delta="),
        (["{base}", "--vary", "algorithm.delta=0.1,0.10", "-o", "{folder}"], "--variant, --vary"),
        (["--variant", "{base}", "--variant", "{base}", "-o", "{folder}"], "--variant, --vary"),
        (["{base}", "--seeds", "2-1", "-o", "{folder}"], "--seeds"),
        (["{base}", "--vary", "algorithm.dleta=0.1,0.2", "-o", "{folder}"], "algorithm.dleta"),
        (["{base}", "--sbatch", "{base}", "-o", "{folder}"], "--sbatch"),
        (["{base}", "--vary", "run.num_threads=0", "-o", "{folder}"], "(set by --vary run.num_threads=0)"),
        (["{base}", "--vary", "data.shuffle='no','yes'", "--set", "optimizer.lr=-1", "-o", "{folder}"], LR),
        (["{base}", "--seeds", "3,4294967296", "-o", "{folder}"], "(set by --seeds 4294967296)"),
        (["{base}", "--vary", "run.seed=1,2", "-o", "{folder}"], "Use --seeds instead"),
        (["{base}", "--set", "run.seed = 5", "-o", "{folder}"], "Use --seeds instead"),
        (["{base}", "--set", "run.folder=there", "-o", "{folder}"], "Use -o instead"),
    ],
)
def test_bad_arguments_are_refused_before_a_run_starts(
    arguments: list[str], where: str, tmp_path: Path
) -> None:
    base, folder = tmp_path / "base.toml", tmp_path / "grid"
    base.write_text("[optimizer]\nlr = 1e-3\n")
    done = CliRunner().invoke(app, ["grid", *(part.format(base=base, folder=folder) for part in arguments)])
    assert done.exit_code == 2 and where in done.output
    assert not list(tmp_path.rglob("seed_*"))


def finish(folder: Path, **tables: Any) -> None:
    """Write the folder of a finished run of two rollouts."""
    run = {"folder": folder, "seed": int(folder.name.rpartition("_")[2]), "num_rollouts": 2}
    config = Config.model_validate({"run": run, **tables}).model_dump(exclude_none=True)
    with RunFolder.open(folder, config, resume=False) as opened:
        for rollout in range(2):
            opened.write_rollout(rollout, {"reward/mean": 0.5}, num_rollouts=2)


def test_finished_runs_of_other_settings_are_refused(tmp_path: Path) -> None:
    """They would be compared under the names of settings that they were not trained with."""
    base, out = tmp_path / "base.toml", tmp_path / "grid"
    base.write_text("[run]\nnum_rollouts = 2\n[algorithm]\npreset = 'grpo'\n[optimizer]\nlr = 1e-3\n")
    finish(out / "base" / "seed_3", algorithm={"preset": "grpo"}, optimizer={"lr": 2e-3})
    done = CliRunner().invoke(app, ["grid", str(base), "--seeds", "3", "-o", str(out)])
    assert done.exit_code == 2 and "optimizer.lr" in done.output and not (out / "report.html").exists()
    finish(out / "base" / "seed_4", algorithm={"preset": "grpo"}, optimizer={"lr": 1e-3})
    done = CliRunner().invoke(app, ["grid", str(base), "--seeds", "4", "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert {"report.html", "numbers.json", "numbers.csv", "table.tex"} <= {path.name for path in out.iterdir()}


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a stand-in for sbatch writes its arguments."""
    calls = tmp_path / "calls"
    for folder in (calls, tmp_path / "bin"):
        folder.mkdir()
    (tmp_path / "bin/sbatch").write_text(SBATCH)
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    return calls


SCRIPT = ROOT / "examples/moe_base/train.sbatch"
ON_CLUSTER = ["grid", "--sbatch", str(SCRIPT), "--set", "run.num_rollouts=2", "--set", "optimizer.lr=2e-6"]


def finish_on_cluster(out: Path, variant: str, *seeds: int) -> None:
    """Write the folders of finished runs of `ON_CLUSTER`."""
    files = [SCRIPT.parent / name for name in ("base.toml", variant)]
    config = load_config(files, ["run.num_rollouts=2", "optimizer.lr=2e-6"]).model_dump(exclude_none=True)
    for seed in seeds:
        finish(out / Path(variant).stem / f"seed_{seed}", **{k: v for k, v in config.items() if k != "run"})


def test_jobs_of_a_grid_in_an_allocation_do_not_get_its_variables(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS", "SLURM_EXPORT_ENV"):
        monkeypatch.setenv(name, "1")
    (tmp_path / "bin/sbatch").write_text(f"#!/bin/sh\nenv | grep ^SLURM_ >> {tmp_path}/seen\n{SBATCH}")
    (tmp_path / "bin/scontrol").symlink_to("/bin/false")
    command = [*ON_CLUSTER, "--variant", "grpo_clip_higher.toml", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "this job's --constraint is not known" in done.output
    assert set((tmp_path / "seen").read_text().split()) == {"SLURM_CONF=/etc/slurm.conf"}


@pytest.mark.parametrize("experiment", ["glm_air", "moe_base_async", "qwen3_235b"])
def test_replay_is_compared_in_any_experiment_with_experts(
    experiment: str, tmp_path: Path, calls: Path
) -> None:
    """The command of the guide on R3."""
    guide = (ROOT / "examples/guides/r3_or_not.md").read_text()
    (found,) = re.findall(r"^megatron-dppo (grid --sbatch [^\n]+\\\n[^\n]+)$", guide, re.MULTILINE)
    words = shlex.split(found.replace("\\\n", " ").replace("EXPERIMENT", experiment))
    words[words.index("-o") + 1] = str(tmp_path / "out")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    runs = [(calls / str(n)).read_text().splitlines() for n in range(2)]
    for run, mode in zip(runs, ("measure", "replay"), strict=True):
        start = run.index(f"examples/{experiment}/train.sbatch")
        assert "--array=0,1,2" in run[:start] and run[start + 1] == "dppo_binary_tv.toml"
        files = [Path(f"examples/{experiment}/{name}") for name in ("base.toml", run[start + 1])]
        sets = [value for option, value in itertools.pairwise(run) if option == "--set"]
        config = load_config(files, sets)
        assert (config.rollout.routing_replay, config.tracking.paired_routing_every) == (mode, 10)
    assert len(list(calls.iterdir())) == 3


def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[dict[str, str]]:
    """Submit one array and the report, and return the SBATCH_ variables of each."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    seen = tmp_path / "seen"
    record = f"env | grep ^SBATCH_ >> {seen}; echo end >> {seen}"
    (tmp_path / "bin/sbatch").write_text(f"#!/bin/sh\n{record}\n{SBATCH}")
    job = "JobId=1 Account=them QOS=low Partition=p Features=${FEATURES:-(null)} DelayBoot=0"
    for name, text in {"scontrol": f'echo "{job}"', "sinfo": "echo 4:00:00"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    command = [*ON_CLUSTER, "--variant", "grpo_clip_higher.toml", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    jobs = seen.read_text().split("end\n")[:-1]
    return [dict(line.split("=", 1) for line in job.splitlines()) for job in jobs]


def test_grid_jobs_in_an_allocation_inherit_its_partition_and_account(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its account, partition, QOS, reservation and constraint, unless the environment has others."""
    job = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_ACCOUNT": "us",
        "SLURM_JOB_PARTITION": "big",
        "SLURM_JOB_QOS": "high",
    }
    job |= {"SLURM_JOB_RESERVATION": "week", "FEATURES": "ib&h100", "SLURM_NTASKS": "3"}
    has = {"ACCOUNT": "us", "PARTITION": "big", "QOS": "high", "RESERVATION": "week", "CONSTRAINT": "ib&h100"}
    expected = {f"SBATCH_{name}": value for name, value in has.items()}
    assert submitted(tmp_path, monkeypatch, **job) == [expected] * 2
    (tmp_path / "seen").unlink()
    given = {"SBATCH_PARTITION": "small", "SBATCH_CONSTRAINT": "eth", "SBATCH_TIMELIMIT": "4:00:00"}
    assert submitted(tmp_path, monkeypatch, **job, **given) == [expected | given] * 2
    (tmp_path / "seen").unlink()
    few = {"SLURM_JOB_ID": "1", "SLURM_JOB_PARTITION": "big", "FEATURES": "(null)"}
    assert submitted(tmp_path, monkeypatch, **few) == [{"SBATCH_PARTITION": "big"}] * 2


@pytest.mark.parametrize(
    ("given", "of_runs"),
    [
        ({"SBATCH_GPUS_PER_NODE": "h100:8"}, {"SBATCH_GPUS_PER_NODE": "h100:8"}),
        (
            {"SBATCH_GRES": "gpu:a100_80g:4"},
            {"SBATCH_GRES": "gpu:a100_80g:4", "SBATCH_GPUS_PER_NODE": "a100_80g:4"},
        ),
        (
            {"SBATCH_GRES": "lustre:1,gpu:h200:8(S:0-1)"},
            {"SBATCH_GRES": "lustre:1,gpu:h200:8(S:0-1)", "SBATCH_GPUS_PER_NODE": "h200:8"},
        ),
        ({"SBATCH_GRES": "lustre:1,gpu:8"}, {"SBATCH_GRES": "lustre:1,gpu:8"}),
    ],
)
def test_gpus_of_a_type_are_requested_in_both_forms_and_not_for_the_report(
    given: dict[str, str], of_runs: dict[str, str], tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scripts request GPUs per node without a type, which SLURM refuses next to --gres with one."""
    assert submitted(tmp_path, monkeypatch, **given) == [of_runs, {}]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"SBATCH_TIMELIMIT": "15"}, "a time limit of 15, and SAVE_SECONDS=480; expected 20 minutes or more"),
        ({"SBATCH_TIMELIMIT": "1:00:00", "SAVE_SECONDS": "700"}, "SAVE_SECONDS=700, and a signal 600 s"),
        (
            {"SBATCH_TIMELIMIT": "1-0", "SBATCH_PARTITION": "big"},
            "a time limit of 1-0; expected 4:00:00 at most, the limit of partition big",
        ),
    ],
)
def test_grid_with_an_impossible_time_limit_submits_nothing(
    given: dict[str, str], found: str, tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match=re.escape(found)):
        submitted(tmp_path, monkeypatch, **given)
    assert list(calls.iterdir()) == []


def test_a_cluster_gets_an_array_of_the_unfinished_seeds_and_a_report(tmp_path: Path, calls: Path) -> None:
    out, grpo, dppo = tmp_path / "a folder", "grpo_clip_higher.toml", "dppo_binary_tv.toml"
    finish_on_cluster(out, grpo, 1, 5, 4)
    finish_on_cluster(out, dppo, 4)
    common = tmp_path / "common.toml"
    common.write_text("[run]\ntimeout_s = 70.0\n")
    command = [*ON_CLUSTER, str(common), "--variant", dppo, "--variant", grpo]
    done = CliRunner().invoke(app, [*command, "--seeds", "4-5,1", "-o", str(out)])
    assert done.exit_code == 0, done.output
    array, report = ((calls / str(n)).read_text().splitlines() for n in range(2))
    assert len(list(calls.iterdir())) == 2 and "grpo_clip_higher: finished" in done.output
    assert array[0] == "--parsable" and "--array=5,1" in array and "--job-name=dppo_binary_tv" in array
    sets = ["run.num_rollouts=2", "optimizer.lr=2e-6", f'run.folder="{out / "dppo_binary_tv"}"']
    flags = [word for text in sets for word in ("--set", text)]
    assert array[array.index(str(SCRIPT)) :] == [str(SCRIPT), dppo, str(common), *flags]
    assert "--dependency=afterany:71" in report and str(ROOT / "examples/slurm/report.sbatch") in report
    assert report[-3:] == [str(out / "report.html"), str(out / "dppo_binary_tv"), str(out / "grpo_clip_higher")]


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["--variant", "dppo_binary_tv.toml", "--set", "optimizer.lrr=1"], "optimizer.lrr"),
        (["--variant", "no_such.toml"], "no_such.toml"),
        (["--variant", "dppo_binary_tv.toml", "--vary", "optimizer.lr=2e-6,3e-6", "--seeds", "7"], "--out"),
    ],
)
def test_a_cluster_gets_nothing_if_one_combination_is_wrong(
    arguments: list[str], where: str, tmp_path: Path, calls: Path
) -> None:
    out = tmp_path / "out"
    finish_on_cluster(out, "dppo_binary_tv.toml", 7)
    (out / "dppo_binary_tv").rename(out / "dppo_binary_tv-lr_3e-06")
    done = CliRunner().invoke(app, [*ON_CLUSTER, *arguments, "-o", str(out)])
    assert done.exit_code == 2 and where in done.output
    assert list(calls.iterdir()) == []


def test_jobs_divide_the_gpus_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    assert gpus_for(2, 1) == ["5", "3"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpus_for(1, 2) == ["0", "1"]
    with pytest.raises(ConfigError) as error:
        gpus_for(3, 1)
    assert error.value.problems[0].where == "--jobs"


def test_sbatch_error_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ["--sbatch", str(ROOT / "examples/moe_base/train.sbatch"), "-o", str(tmp_path / "out")]
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(app, ["grid", "--variant", "grpo_clip_higher.toml", *script])
    assert done.exit_code == 2 and "--sbatch" in done.output
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'no such account' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    done = CliRunner().invoke(app, ["grid", "--variant", "grpo_clip_higher.toml", *script])
    assert done.exit_code == 2 and "no such account" in done.output
