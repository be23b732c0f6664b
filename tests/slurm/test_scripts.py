"""What the scripts say to what cannot work, without a scheduler; and what every one of them asks for."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_dppo.checkpoints.checkpoint_folder import sums_of, write_sums
from tests.support.jobs import ROOT

_ON_A_CPU = {"miniature_study", "quickstart", "smollm2", "sudoku"}
EXPERIMENTS = sorted({path.parent.name for path in (ROOT / "examples").glob("*/base.toml")} - _ON_A_CPU)
_SCRIPTS = sorted([*(ROOT / "examples").glob("*/*.sbatch"), *(ROOT / "examples" / "slurm").glob("*.sh")])


def run(script: str, *arguments: str, path: Path | None = None, **variables: str) -> tuple[int, str]:
    """Return a script's status and standard error, outside of SLURM unless the variables change that."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {"SLURM_SUBMIT_DIR": str(ROOT), **variables}
    if path is not None:
        environment["PATH"] = f"{path}:{environment['PATH']}"
    ended = subprocess.run(
        ["bash", str(ROOT / script), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stderr


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """SLURM's commands as a job would see them: without a limit, of a cluster that keeps accounts."""
    for name, answer in {
        "squeue": "${LIMIT:-UNLIMITED}",
        "scontrol": "AccountingStorageType   = accounting_storage/slurmdbd",
    }.items():
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{answer}"\n')
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_without_a_job_a_script_says_how_to_submit_it() -> None:
    status, said = run("examples/dense_base/train.sbatch", "dppo_binary_tv.toml")
    assert status == 2
    assert "found no SLURM job; expected to be started by one" in said
    assert "sbatch --account=NAME --time=24:00:00 examples/dense_base/train.sbatch ALGORITHM.toml" in said


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, "a job without a time limit"),
        ({"LIMIT": "1-00:00:00"}, "a job without an account"),
        ({"LIMIT": "1-00:00:00", "SLURM_JOB_ACCOUNT": "us"}, "no algorithm"),
    ],
)
def test_a_job_without_time_or_account_is_explained(
    commands: Path, variables: dict[str, str], found: str
) -> None:
    status, said = run("examples/dense_base/train.sbatch", path=commands, **{"SLURM_JOB_ID": "1"} | variables)
    assert status == 2
    assert f"found {found}; expected " in said
    assert ("--account=NAME --time=24:00:00" in said) == (found != "no algorithm")


def test_a_heterogeneous_job_is_refused(commands: Path) -> None:
    """Its scripts run on the first component alone."""
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_ACCOUNT": "us", "LIMIT": "1-00:00:00", "SLURM_HET_SIZE": "2"}
    for script in ("moe_base/train", "moe_base_lora/train", "moe_base/r3_compare"):
        status, said = run(f"examples/{script}.sbatch", "cispo.toml", path=commands, **job)
        assert status == 2 and "found a heterogeneous job of 2 components" in said
        assert "NUM_ENGINE_NODES=N" in said


@pytest.mark.parametrize(
    ("limit", "variables", "found"),
    [
        ("19:59", {}, "a time limit of 19:59, and SAVE_SECONDS=480; expected 20 minutes or more"),
        ("20:00", {}, None),
        ("3:00", {}, "SAVE_SECONDS=36 in the environment and --signal=B:USR1@46; SBATCH_SIGNAL=B:USR1@46"),
        ("3:00", {"SAVE_SECONDS": "36", "SBATCH_SIGNAL": "B:USR1@46"}, None),
        ("3:00", {"SAVE_SECONDS": "36"}, None),  # --signal, which a job does not see
        ("3:00", {"SAVE_SECONDS": "36", "SBATCH_SIGNAL": "B:USR1@91"}, "4 minutes or more"),
        ("2:00", {"SAVE_SECONDS": "49"}, "3 minutes or more"),
        ("1-00:00:00", {"SAVE_SECONDS": "600"}, "SAVE_SECONDS=600, and a signal 600 s before the time limit"),
        ("1-00:00:00", {"SAVE_SECONDS": "599"}, None),
        ("1-00:00:00", {"SAVE_SECONDS": "1200", "SBATCH_SIGNAL": "B:USR1@1260"}, None),
        ("41:59", {"SAVE_SECONDS": "1200", "SBATCH_SIGNAL": "B:USR1@1260"}, "50 minutes or more"),
        ("1-00:00:00", {"SBATCH_SIGNAL": "USR1@900"}, "SBATCH_SIGNAL=USR1@900; expected B:USR1@SECONDS"),
        ("1-00:00:00", {"SAVE_SECONDS": "1e3"}, "SAVE_SECONDS='1e3'; expected a number"),
        ("soon", {}, "the time limit 'soon'"),
    ],
)
def test_a_time_limit_leaves_time_to_train_and_to_save(
    commands: Path, limit: str, variables: dict[str, str], found: str | None
) -> None:
    """What passes is refused for its algorithm, which is looked at next."""
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_ACCOUNT": "us", "LIMIT": limit, **variables}
    for script in ("dense_base/train", "moe_base/train"):
        status, said = run(f"examples/{script}.sbatch", path=commands, **job)
        assert status == 2
        assert (found or "found no algorithm") in said


@pytest.mark.parametrize("name", ["nothing.toml", "base.toml", "../moe_base/cispo.toml"])
def test_unknown_algorithm_lists_the_known_ones(commands: Path, name: str) -> None:
    known = {"SLURM_JOB_ID": "1", "SLURM_JOB_ACCOUNT": "us", "LIMIT": "60"}
    names = {
        "moe_base": "cispo.toml dppo_binary_kl.toml dppo_binary_tv.toml",
        "moe_base_async": "dppo_binary_tv.toml",
    }
    for script in ("moe_base/train", "moe_base/r3_compare", "moe_base_async/staleness_compare"):
        status, said = run(f"examples/{script}.sbatch", name, path=commands, **known)
        assert status == 2
        assert f"found {name}; expected one of {names[script.partition('/')[0]]}" in said


@pytest.mark.parametrize(
    ("script", "folder", "default", "settings"),
    [
        (
            "moe_base/r3_compare",
            "R3_FOLDER",
            "--set tracking.paired_routing_every=10 ",
            {
                "measure": "--set rollout.routing_replay=measure",
                "replay": "--set rollout.routing_replay=replay",
            },
        ),
        (
            "moe_base_async/staleness_compare",
            "STALENESS_FOLDER",
            "",
            {
                "synchronous": "--set rollout.max_staleness=0 --set rollout.over_sampling=1",
                "asynchronous": "",
            },
        ),
    ],
)
def test_a_comparison_submits_its_runs_and_a_report_on_them(
    commands: Path, tmp_path: Path, script: str, folder: str, default: str, settings: dict[str, str]
) -> None:
    """A stand-in for sbatch writes down its arguments, and the limits that they are submitted with."""
    calls = tmp_path / "calls"
    sbatch = f'echo "$SBATCH_TIMELIMIT $SBATCH_PARTITION $SBATCH_ACCOUNT ${{SLURM_JOB_ID:-}}: $*" >>{calls}'
    (commands / "sbatch").write_text(f"#!/bin/sh\n{sbatch}\nwc -l <{calls}\n")
    (commands / "sbatch").chmod(0o755)
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_ACCOUNT": "us", "SLURM_JOB_PARTITION": "big", "LIMIT": "60"}
    more = ("--set", "rollout.max_staleness=1", "--set", "rollout.over_sampling=2")
    out = tmp_path / "out"
    variables = {**job, folder: str(out), "SEEDS": "0-2"}
    status, said = run(f"examples/{script}.sbatch", "dppo_binary_tv.toml", *more, path=commands, **variables)
    assert status == 0, said
    submitted = calls.read_text().splitlines()
    for name, options in settings.items():
        given = f"dppo_binary_tv.toml {default}{' '.join(more)}"
        last = f' {options} --set run.folder="{out}/{name}"'.replace("  ", " ")
        (found,) = (line for line in submitted if line.endswith(given + last))
        assert found.startswith(f"60 big us : --parsable --output={out}/slurm-%x-%j.out ")
        assert f"--array=0-2 examples/{script.partition('/')[0]}/train.sbatch" in found
    report = f"examples/slurm/report.sbatch {out}/report.html {' '.join(f'{out}/{name}' for name in settings)}"
    assert submitted[2].endswith(f"--dependency=afterok:1:2 --kill-on-invalid-dep=yes {report}")
    assert len(submitted) == 3


def test_a_comparison_gives_its_runs_what_the_job_has(commands: Path, tmp_path: Path) -> None:
    """Options of sbatch may have replaced the environment: the job's values count. A report needs no GPUs."""
    seen = tmp_path / "seen"
    (commands / "sbatch").write_text(f"#!/bin/sh\nenv | grep ^SBATCH_ | sort >>{seen}; echo end >>{seen}\n")
    (commands / "sbatch").chmod(0o755)
    (commands / "scontrol").write_text('#!/bin/sh\necho "JobId=1 QOS=x Features=ib|eth DelayBoot=0"\n')
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_ACCOUNT": "us", "SLURM_JOB_PARTITION": "big", "LIMIT": "2:00:00"}
    job |= {"SLURM_JOB_QOS": "high", "SLURM_JOB_RESERVATION": "week", "SBATCH_GRES": "gpu:h100:8"}
    before = {"SBATCH_QOS": "low", "SBATCH_PARTITION": "debug", "SBATCH_TIMELIMIT": "15"}
    variables = {**job, **before, "STALENESS_FOLDER": str(tmp_path / "out")}
    script = "examples/moe_base_async/staleness_compare.sbatch"
    status, said = run(script, "dppo_binary_tv.toml", path=commands, **variables)
    assert status == 0, said
    shared = ["SBATCH_ACCOUNT=us", "SBATCH_CONSTRAINT=ib|eth", "SBATCH_PARTITION=big", "SBATCH_QOS=high"]
    shared += ["SBATCH_RESERVATION=week", "SBATCH_TIMELIMIT=2:00:00"]
    gpus = ["SBATCH_GPUS_PER_NODE=h100:8", "SBATCH_GRES=gpu:h100:8"]
    jobs = [job.split() for job in seen.read_text().split("end\n")[:-1]]
    assert jobs == [sorted(shared + gpus)] * 2 + [shared]


def test_a_comparison_that_is_run_by_hand_has_a_time_limit_that_fits(commands: Path) -> None:
    (commands / "sinfo").write_text("#!/bin/sh\necho 2:00:00\n")
    (commands / "sinfo").chmod(0o755)
    for limit, found in {"10": "20 minutes or more", "2:00:01": "2:00:00 at most"}.items():
        given = {"SBATCH_TIMELIMIT": limit, "SBATCH_PARTITION": "short"}
        status, said = run("examples/moe_base/r3_compare.sbatch", "cispo.toml", path=commands, **given)
        assert status == 2 and found in said


JOB = {"SLURM_JOB_ID": "1", "SLURM_JOB_ACCOUNT": "us", "LIMIT": "60"}
SRUN = """#!/bin/sh
echo "$PYTHON: $*" >>"$CALLS"
case "$*" in
    *settings.py*)
        if [ -n "$REAL_PYTHON" ]; then
            while [ "$1" != "$PYTHON" ]; do shift; done
            shift
            exec "$REAL_PYTHON" "$@"
        fi
        while [ -n "$WAITS_FOR" ] && [ ! -e "$WAITS_FOR" ]; do sleep 0.1; done
        echo "${PLACE:-elsewhere} 4 $RUN"
        exit "${SETTINGS_STATUS:-0}"
        ;;
    *node.sh*) printf '%s\\0' "$@" >"$CALLS.trainer" ;;
    *server.sh*)
        mkdir -p "$RUN/servers"
        for server in $(seq "${NUM_SERVERS:-1}"); do touch "$RUN/servers/node-$server.json"; done
        sleep 0.5
        ;;
esac
"""


def run_steps(commands: Path, experiment: str, algorithm: str, **variables: str) -> tuple[int, str, list[str]]:
    """Status and standard error of a job, and what its srun, a stand-in, was called with."""
    for name, text in {"srun": SRUN, "scancel": "#!/bin/sh\n"}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    calls, script = commands / "calls", f"examples/{experiment}/train.sbatch"
    folders = {"CALLS": str(calls), "RUN": str(commands / "run")}
    status, said = run(script, algorithm, path=commands, **JOB | folders | variables)
    return status, said, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize(
    ("variables", "place", "found"),
    [
        ({"NUM_ENGINE_NODES": "two"}, "elsewhere", "NUM_ENGINE_NODES='two'; expected a number of nodes"),
        ({"NUM_ENGINE_NODES": "-1"}, "elsewhere", "NUM_ENGINE_NODES='-1'; expected a number of nodes"),
        ({"NUM_ENGINE_NODES": "4"}, "elsewhere", "NUM_ENGINE_NODES=4 in a job of 4 node(s); expected one node"),
        ({"NUM_ENGINE_NODES": "5"}, "elsewhere", "NUM_ENGINE_NODES=5 in a job of 4 node(s); expected one node"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "elsewhere", "NUM_ENGINE_NODES=2 in a job of 2 node(s)"),
        ({"NUM_ENGINE_NODES": "0"}, "elsewhere", "servers that share no GPU with the trainer, and no node"),
        ({}, "here", "NUM_ENGINE_NODES=2 and rollout.sglang.colocated; expected one of them"),
        ({}, "nowhere", "NUM_ENGINE_NODES=2; expected 0, where no server is to be started"),
    ],
)
def test_nodes_that_servers_cannot_have_are_refused_before_a_server_starts(
    commands: Path, variables: dict[str, str], place: str, found: str
) -> None:
    job = {"SLURM_JOB_NUM_NODES": "4", "PLACE": place} | variables
    status, said, calls = run_steps(commands, "moe_base_async", "dppo_binary_tv.toml", **job)
    assert status == 2
    assert f"found {found}" in said
    assert not [call for call in calls if "settings.py" not in call]


def test_a_run_folder_that_stays_in_use_ends_the_job_at_its_second_attempt(commands: Path) -> None:
    """A live owner would keep the nodes waiting for ever. The stand-in for scontrol forbids requeueing."""
    (commands / "scontrol").write_text("#!/bin/sh\necho disabled\nexit 1\n")
    job = {"SLURM_JOB_NUM_NODES": "1", "PLACE": "nowhere", "SETTINGS_STATUS": "75", "RUN": str(commands / "r")}
    for attempt, expected in ((0, 75), (1, 1), (2, 1)):
        variables = job | {"SLURM_RESTART_COUNT": str(attempt)}
        status, said, calls = run_steps(commands, "moe_base", "cispo.toml", **variables)
        assert status == expected
        assert f"attempt {attempt}: its run folder is in use" in said
        assert all("settings.py" in call for call in calls)


def test_a_signal_while_the_config_is_checked_counts_as_an_attempt(commands: Path) -> None:
    """The run folder, where attempts are counted, is known after the check, and SLURM may signal before."""
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho disabled\nexit 1\n"}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    checked, calls = commands / "checked", commands / "calls"
    job = {"SLURM_JOB_NUM_NODES": "1", "PLACE": "nowhere", "RUN": str(commands / "r"), "CALLS": str(calls)}
    for attempt, expected in ((0, 75), (1, 1)):
        variables = os.environ | JOB | job | {"SLURM_RESTART_COUNT": str(attempt), "WAITS_FOR": str(checked)}
        variables |= {"PATH": f"{commands}:{os.environ['PATH']}", "SAVE_SECONDS": "3"}
        script = ["bash", "examples/moe_base/train.sbatch", "cispo.toml"]
        started = subprocess.Popen(script, cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True)
        while not calls.exists():
            time.sleep(0.1)
        started.send_signal(signal.SIGUSR1)
        checked.touch()
        said = started.communicate(timeout=60)[1]
        assert started.returncode == expected, said
        assert f"attempt {attempt}: asked to stop before training began" in said
        assert calls.read_text().count("\n") == 1, "nothing but the check started"
        checked.unlink()
        calls.unlink()


def test_asynchronous_job_uses_half_of_the_nodes_for_servers_by_default(commands: Path) -> None:
    """Two of four by default; the trainer has those before."""
    nodes = {"SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "4"}
    for variables, expected in (({}, 2), ({"NUM_ENGINE_NODES": "1"}, 1)):
        job = nodes | variables | {"NUM_SERVERS": str(expected)}
        status, said, calls = run_steps(commands, "moe_base_async", "dppo_binary_tv.toml", **job)
        assert status == 0, said
        settings, server, trainer = calls[-3:]
        assert all(" --distribution=block " in step for step in (server, trainer))
        assert settings.endswith(f"--world-size {4 * (4 - expected)}")
        assert f"--nodes={expected} --relative={4 - expected} --ntasks={expected} " in server
        assert f"--nodes={4 - expected} --ntasks={4 - expected} --ntasks-per-node=1" in trainer


def run_tiny(
    commands: Path, tiny: tuple[str, ...], *more: str, **variables: str
) -> tuple[int, str, list[str], list[str]]:
    """As `run_steps`, with a config that is read: status, standard error, calls, the trainer's arguments."""
    for name, text in {"srun": SRUN, "scancel": "#!/bin/sh\n"}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    calls, script = commands / "calls", "examples/moe_base/train.sbatch"
    known = {"CALLS": str(calls), "REAL_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    known |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2", **JOB, **variables}
    status, said = run(script, "dppo_binary_tv.toml", *tiny, *more, path=commands, **known)
    trainer = Path(f"{calls}.trainer")
    given = trainer.read_text().split("\0")[:-1] if trainer.exists() else []
    trainer.unlink(missing_ok=True)
    after = given.index("examples/slurm/node.sh") + 1 if given else 0
    return status, said, calls.read_text().splitlines(), given[after:]


@pytest.mark.parametrize("name", ["plain", "o'brien", 'a "quoted" name', "back\\slash", "it's $ `x` *"])
@pytest.mark.parametrize("seed", [None, "3"])
def test_a_run_folder_may_have_any_name(
    commands: Path, tiny: tuple[str, ...], name: str, seed: str | None
) -> None:
    from megatron_dppo.config import load_config

    folder = commands / name
    array = {} if seed is None else {"SLURM_ARRAY_TASK_ID": seed}
    given = ("--set", f"run.folder={json.dumps(str(folder))}")
    status, said, _, trainer = run_tiny(commands, tiny, *given, **array)
    assert status == 0, said
    configs = [Path(each) for each in trainer if each.endswith(".toml")]
    sets = [value for option, value in pairwise(trainer) if option == "--set"]
    config = load_config([ROOT / each for each in configs], sets)
    assert config.run.folder == (folder if seed is None else folder / "seed_3")
    assert config.run.seed == int(seed or 0)
    assert list(config.run.folder.glob("slurm/1-attempt_0")), "logs are in the run's folder"


def test_accepted_changes_are_looked_for_in_the_seeds_own_folder(commands: Path, tiny: tuple[str, ...]) -> None:
    """The trainer and the look at the config get the flag, and servers do not, which know none."""
    folder = commands / "run"
    checkpoint = folder / "seed_3" / "checkpoints" / "step_00000008"
    checkpoint.mkdir(parents=True)
    content = {
        "state": {"rollout": 2},
        "prompts_digest": "",
        "config": "optimizer.lr = 0.5",
        "open_rollout": None,
    }
    (checkpoint / "state.json").write_text(json.dumps(content))
    write_sums(checkpoint, sums_of([checkpoint / "state.json"], checkpoint))
    given = ("--set", f"run.folder={folder}")
    assert run_tiny(commands, tiny, *given)[0] == 0, "no array: the folder itself holds no run"
    status, said, _, trainer = run_tiny(commands, tiny, *given, SLURM_ARRAY_TASK_ID="3")
    assert status == 2 and "optimizer.lr" in said and "--accept-changes" in said and not trainer
    engine = ("--set", "rollout.engine=sglang", "--set", "rollout.sglang.weight_sync=disk")
    accepted = ("--accept-changes", *given, *engine, "--set", "rollout.sglang.colocated=false")
    variables = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_NUM_NODES": "2", "NUM_ENGINE_NODES": "1"}
    variables |= {"RUN": str(folder / "seed_3"), "SERVERS_PER_NODE": "1"}
    status, said, calls, trainer = run_tiny(commands, tiny, *accepted, **variables)
    assert status == 0, said
    assert trainer.count("--accept-changes") == 1
    (server,) = (call for call in calls if "server.sh" in call)
    assert "--accept-changes" not in server and "seed_3" in server


@pytest.mark.parametrize(
    ("images", "of_trainer", "of_server"),
    [
        ({}, None, None),
        ({"CONTAINER": "both:1"}, "both:1", "both:1"),
        ({"CONTAINER": "both:1", "CONTAINER_SERVER": "nv#sglang:2"}, "both:1", "nv#sglang:2"),
        ({"CONTAINER_TRAINER": "trainer:3"}, "trainer:3", None),
        ({"CONTAINER": "both:1", "CONTAINER_TRAINER": ""}, None, "both:1"),
        ({"CONTAINER": "docker://both:1"}, "docker://both:1", "docker://both:1"),
        ({"CONTAINER": "trainer.sif", "CONTAINER_SERVER": "nv#sglang:2"}, "trainer.sif", "nv#sglang:2"),
    ],
)
def test_trainer_and_servers_run_in_separate_images(
    commands: Path, images: dict[str, str], of_trainer: str | None, of_server: str | None
) -> None:
    """Images for pyxis are options of srun. For Apptainer the step's command starts with its own."""
    for name in ("apptainer", "trainer.sif"):
        (commands / name).write_text("#!/bin/sh\n")
        (commands / name).chmod(0o755)
    images = {name: image.replace("trainer.sif", f"{commands}/trainer.sif") for name, image in images.items()}
    mounts = {"CONTAINER_MOUNTS": f"/:/,{ROOT}:/elsewhere"} if images else {}
    nodes = {"SLURM_JOB_NUM_NODES": "2", "NUM_ENGINE_NODES": "1", "SLURM_GPUS_ON_NODE": "4"}
    status, said, calls = run_steps(commands, "moe_base", "cispo.toml", **nodes, **images, **mounts)
    assert status == 0, said
    first = {"settings.py": "python3", "server.sh": "bash", "node.sh": "bash"}
    steps = {name: line for name in first for line in calls if f"{name} " in line}
    for name, image in {"settings.py": of_trainer, "node.sh": of_trainer, "server.sh": of_server}.items():
        step, command = steps[name], f" {first[name]} examples/slurm/{name} "
        if image is None:
            assert "container" not in step and "apptainer" not in step
            continue
        assert step.startswith("python3: ")
        if image.startswith("docker:") or image.endswith(".sif"):
            where = image.replace("trainer.sif", f"{commands}/trainer.sif")
            words = f" apptainer exec --nv --pwd {ROOT} --bind=/:/ --bind={ROOT}:/elsewhere {where}{command}"
            assert words in step and "--container" not in step
        else:
            options = f" --container-image={image} --container-workdir={ROOT} "
            options += f"--container-mounts=/:/,{ROOT}:/elsewhere "
            assert options in step and command in step and "apptainer" not in step


def test_mounts_cover_link_targets_and_the_run_folder(commands: Path, tmp_path: Path) -> None:
    """A separate checkout: models, data and runs are often links to other disks, or contain some."""
    checkout, disk = tmp_path / "checkout", tmp_path / "disk"
    shutil.copytree(ROOT / "examples" / "slurm", checkout / "examples" / "slurm")
    shutil.copytree(ROOT / "examples" / "moe_base", checkout / "examples" / "moe_base")
    for name in ("models/qwen", "prompts", "runs"):
        (disk / name).mkdir(parents=True)
    (checkout / "models").symlink_to(disk / "models")
    (disk / "models" / "other").symlink_to(disk / "prompts")
    (checkout / "data").mkdir()
    (checkout / "data" / "here").mkdir()
    for name, target in {
        "math": disk / "prompts",
        "within": checkout / "data/here",
        "broken": disk / "no",
    }.items():
        (checkout / "data" / name).symlink_to(target)
    job = {
        "CONTAINER": "both:1",
        "SLURM_SUBMIT_DIR": str(checkout),
        "SLURM_JOB_NUM_NODES": "1",
        "PLACE": "nowhere",
    }

    def submit(run: Path, **variables: str) -> tuple[int, str, list[str]]:
        return run_steps(commands, "moe_base", "cispo.toml", **job, **variables, RUN=str(run))

    status, said, calls = submit(checkout / "runs" / "a")
    assert status == 0, said
    everything = ",".join(f"{place}:{place}" for place in (checkout, disk / "models", disk / "prompts"))
    assert all(f" --container-mounts={everything} " in call for call in calls)
    status, said, _ = submit(disk / "runs" / "new" / "a")
    assert status == 2 and f"Set CONTAINER_MOUNTS={everything},{disk}/runs:{disk}/runs" in said
    assert submit(disk / "runs" / "a", CONTAINER_MOUNTS=f"{everything},{disk}:{disk}")[0] == 0
    for place in (checkout, disk / "prompts"):
        others = ",".join(
            f"{other}:{other}" for other in (checkout, disk / "models", disk / "prompts") if other != place
        )
        status, said, _ = submit(checkout / "runs" / "a", CONTAINER_MOUNTS=others)
        assert (
            status == 2 and f"found {place}, of the repository or where a link in it leads, in no mount" in said
        )


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"CONTAINER": "my image"}, "CONTAINER='my image'"),
        ({"CONTAINER_TRAINER": "/no/where.sqsh"}, "CONTAINER_TRAINER=/no/where.sqsh, which is no file"),
        ({"CONTAINER_SERVER": "absent.sqsh"}, "CONTAINER_SERVER=absent.sqsh, which is no file"),
        ({"CONTAINER": "absent.sif"}, "CONTAINER=absent.sif, which is no file"),
        ({"CONTAINER": "docker://trainer:1"}, "CONTAINER=docker://trainer:1 and no apptainer on PATH"),
        ({"CONTAINER_MOUNTS": "/tmp:/tmp"}, "CONTAINER_MOUNTS and no image"),
        ({"CONTAINER": "a", "CONTAINER_MOUNTS": "/tmp:/tmp,data:/data"}, "'data:/data' in CONTAINER_MOUNTS"),
        ({"CONTAINER": "a", "CONTAINER_MOUNTS": "/no/where:/data"}, "'/no/where:/data' in CONTAINER_MOUNTS"),
    ],
)
def test_unusable_image_is_refused_before_a_step_starts(
    commands: Path, variables: dict[str, str], found: str
) -> None:
    (commands / "srun").write_text("#!/bin/sh\necho started >&2\n")
    (commands / "srun").chmod(0o755)
    status, said = run("examples/moe_base/train.sbatch", "cispo.toml", path=commands, **JOB, **variables)
    assert status == 2
    assert f"found {found}" in said
    assert "started" not in said


def test_another_folder_than_the_root_is_refused(tmp_path: Path) -> None:
    status, said = run("examples/moe_base/train.sbatch", "cispo.toml", SLURM_SUBMIT_DIR=str(tmp_path))
    assert status == 2
    assert f"{tmp_path}: expected the repository. Submit in its root." in said


@pytest.mark.parametrize("script", _SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_script_is_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= 80


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_job_asks_for_the_processes_that_its_config_needs(experiment: str) -> None:
    folder = ROOT / "examples" / experiment
    header = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", (folder / "train.sbatch").read_text(), re.M))
    assert header["job-name"] == experiment
    assert header.keys() >= {"signal", "requeue", "open-mode"}
    assert not header.keys() & {"account", "time", "partition"}, "those are the site's"
    parallel = tomllib.loads((folder / "base.toml").read_text())["parallel"]
    engine = re.search(r"NUM_ENGINE_NODES:-(\d+)", (folder / "train.sbatch").read_text())
    num_nodes = int(header["nodes"]) - int(engine[1] if engine else 0)
    num_gpus = num_nodes * int(header["gpus-per-node"])
    split = parallel.get("tensor", 1) * parallel.get("context", 1) * parallel.get("pipeline", 1)
    assert num_gpus % split == 0
    assert num_gpus % parallel.get("expert", 1) == 0
