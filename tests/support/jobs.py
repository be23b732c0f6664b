"""Jobs of the test cluster: submitted as a user would, watched, and looked for when they should be gone."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster import Cluster

ROOT = Path(__file__).parents[2]
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


@dataclass(frozen=True)
class Job:
    """A submitted job, or an array of them."""

    cluster: Cluster
    id: str
    folder: Path  # with the job's outputs

    @property
    def states(self) -> list[str]:
        """State of the job, or of each element of an array."""
        shown = self.cluster.ask(["scontrol", "show", "job", "--oneliner", self.id])
        return re.findall(r"JobState=(\w+)", shown)

    @property
    def exit_codes(self) -> list[str]:
        """Status and signal of the job, or of each element of an array."""
        shown = self.cluster.ask(["scontrol", "show", "job", "--oneliner", self.id])
        return re.findall(r" ExitCode=(\S+)", shown)

    @property
    def output(self) -> str:
        """Output of the scripts in all attempts."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob(f"*-{self.id}*.out")))

    @property
    def hosts(self) -> str:
        """The job's nodes: "n[0-1]"."""
        return self.cluster.ask(
            ["squeue", "--noheader", "--states=all", f"--jobs={self.id}", "--format=%N"]
        ).strip()

    def wait_for_state(self, *states: str, timeout_s: float) -> str:
        """Until the job is in one of the states, or ended in another, which is a failure."""

        def is_over() -> bool:
            found = set(self.states)
            return bool(found) and (found <= set(states) or found <= set(_ENDED))

        self.cluster.wait_until(is_over, timeout_s, f"job {self.id} {states}; output:\n{self.output}")
        assert set(self.states) <= set(states), f"job {self.id} {self.states}:\n{self.output}"
        return self.output

    def ranks(self, **variables: str) -> list[int]:
        """Process ids of the trainer's ranks whose environment holds the variables."""
        wanted = {f"{name}={value}" for name, value in {"SLURM_JOB_ID": self.id, **variables}.items()}
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = set((folder / "environ").read_text(errors="replace").split("\0"))
                command = (folder / "cmdline").read_text()
            except OSError:  # it ended, or is another user's
                continue
            if wanted <= environment and "\0-m\0megatron_dppo\0train\0" in command:
                found.append(int(folder.name))
        return found


def submit(cluster: Cluster, outputs: Path, *command: str, **variables: str) -> Job:
    """`sbatch` in the repository's root, with this interpreter's environment for the job."""
    outputs.mkdir(parents=True, exist_ok=True)
    submitted = subprocess.run(
        cluster.on_head(["sbatch", "--parsable", f"--output={outputs}/%x-%j.out", *command]),
        cwd=ROOT,
        env=environment_of_jobs(cluster, **variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert submitted.returncode == 0, submitted.stderr
    return Job(cluster, submitted.stdout.strip(), outputs)


def environment_of_jobs(cluster: Cluster, **variables: str) -> dict[str, str]:
    """Variables with which `sbatch` submits jobs of this interpreter's environment."""
    return cluster.environment | {
        "MEGATRON_DPPO_VENV": sys.prefix,
        "OMP_NUM_THREADS": "1",
        "PROCESSES_PER_NODE": "1",
        "SBATCH_TIMELIMIT": "30",
        **({} if cluster.machines else {"GLOO_SOCKET_IFNAME": "lo"}),
        **variables,
    }


def tiny_arguments(folder: Path) -> tuple[str, ...]:
    """What comes after an algorithm's TOML file to train a tiny model, written to the folder, on two ranks."""
    runpy.run_path(str(ROOT / "examples" / "make_tiny.py"))["write_tiny"](folder)
    overrides = {
        "model.load": folder / "qwen3_moe",
        "data.prompts": folder / "prompts.jsonl",
        "evaluation.sets.aime24.prompts": folder / "held_out.jsonl",
        "evaluation.sets.aime25.prompts": folder / "held_out.jsonl",
        "parallel.expert": 2,
        "run.num_rollouts": 12,
    }
    return ("examples/tiny.toml", *overrides_of(overrides))


def overrides_of(values: Mapping[str, object]) -> list[str]:
    """The values as options of a command: `--set KEY=VALUE`, each."""
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


def stand_in_environment(folder: Path, script: str) -> dict[str, str]:
    """Variables of a job whose Python is a script of tests/slurm, which knows the real one."""
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "slurm" / script, python)
    python.chmod(0o755)
    return {"MEGATRON_DPPO_VENV": str(folder / "venv"), "STAND_IN_PYTHON": sys.executable}


def is_alive(process: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        os.kill(process, 0)
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
