"""A real SLURM: munged, slurmctld and a slurmd for each node, all on this machine, or each on a machine."""

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.ranks import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "setpriv")
NODES = ("n0", "n1")
_PATH = os.environ["PATH"] + ":/usr/sbin"  # where daemons are, which only root looks for
_CONFIG = """
ClusterName=test
SlurmctldHost={head}
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,batch_sched_delay=0,sched_min_interval=0,bf_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
JobRequeue=1
ReturnToService=2
KillWait=5
SlurmdTimeout={slurmd_timeout_s}
CompleteWait=0
UnkillableStepTimeout=180
GresTypes=gpu
{communication}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
"""cred_expire is how long a requeued job waits, 120 s for anything below 5. The GPUs lead nowhere."""


@dataclass
class Cluster:
    """Daemons that this process started and must stop."""

    folder: Path  # which all machines see
    machines: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """What stands before a command to run it on another machine, by the name: the head, then the nodes.
    Without any, all daemons run here and listen on loopback."""
    slurmd_timeout_s: int = 300
    """Seconds after which a silent node is down."""
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, subprocess.Popen[bytes]])

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, which run jobs."""
        return tuple(self.machines)[1:] or NODES

    @property
    def environment(self) -> dict[str, str]:
        """For SLURM's daemons, its commands, and jobs."""
        of_cpu = {"CUDA_VISIBLE_DEVICES": ""}  # jobs have GPUs that torch cannot use
        return os.environ | of_cpu | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _PATH}

    def on_head(self, command: Sequence[str]) -> list[str]:
        """The command, as it is started here to run on the head."""
        return [*next(iter(self.machines.values()), ()), *command]

    def start(self) -> None:
        """Return when all nodes are idle."""
        self._write_config()
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (self.folder / "munge.key").chmod(0o600)
        munged = ["munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key"]
        munged += [f"--{name}-file={self.folder}/munge.{name}" for name in ("pid", "log", "seed")]
        self._start("munged", [*munged, f"--socket={self.folder}/munge.socket"])
        self.wait_until((self.folder / "munge.socket").exists, 120, "munged listens")
        self.start_controller("-i")
        self.start_nodes()
        self.wait_for_idle_nodes()

    def start_controller(self, *options: str) -> None:
        """Start slurmctld on the head; without `-i` it keeps the state of the previous controller."""
        config = str(self.folder / "slurm.conf")
        self._start("slurmctld", self.on_head(["slurmctld", "-D", "-f", config, *options]))

    def stop_controller(self) -> None:
        """End slurmctld, which saves its state first, as when it is restarted for a new configuration."""
        self.ask(["bash", "-c", f"kill $(<{self.folder}/slurmctld.pid)"])
        self.daemons["slurmctld"].wait(300)

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        slurmd = ["slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", node]
        self._start(f"slurmd.{node}", [*self.machines.get(node, ()), *slurmd])

    def start_nodes(self) -> None:
        """Start slurmd on each node that has none."""
        for node in self.nodes:
            daemon = self.daemons.get(f"slurmd.{node}")
            if daemon is None or daemon.poll() is not None:
                self.start_node(node)

    def wait_for_idle_nodes(self) -> None:
        """Return when every node can take a job."""
        idle = ["sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D"]
        self.wait_until(lambda: self.ask(idle).strip() == str(len(self.nodes)), 300, "the nodes are idle")

    def cancel_jobs(self) -> None:
        """Return when no job is left."""
        if jobs := self.ask(["squeue", "--noheader", "--format=%A"]).split():
            self.ask(["scancel", *jobs])
            self.wait_until(lambda: not self.ask(["squeue", "--noheader"]).strip(), 300, "no job is left")

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        with suppress(subprocess.TimeoutExpired, AssertionError):
            self.cancel_jobs()
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def ask(self, command: Sequence[str]) -> str:
        """Output of a SLURM command, or nothing if it fails."""
        answer = subprocess.run(
            self.on_head(command),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return answer.stdout

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Look again and again; fail with SLURM's logs."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.out")))
                raise AssertionError(f"not within {timeout_s:g} s: {what}\n{logs}")
            time.sleep(0.2)

    def _start(self, name: str, command: list[str]) -> None:
        """A daemon ends with this process, whatever becomes of it."""
        with (self.folder / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _write_config(self) -> None:
        host = socket.gethostname().partition(".")[0]
        ports = [free_port() for _ in range(1 + len(self.nodes))]
        head, communication = next(iter(self.machines), f"{host}(127.0.0.1)"), ""
        places = dict.fromkeys(self.nodes, "")
        if not self.machines:
            communication = "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny"
            for node, port in zip(self.nodes, ports[1:], strict=True):
                places[node] = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
        lines = [
            f"NodeName={node} {place} CPUs=8 Gres=gpu:h100:8 Feature=ib,fast" for node, place in places.items()
        ]
        for name in ("state", *(f"spool.{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        values = {"head": head, "communication": communication, "port": ports[0], "nodes": "\n".join(lines)}
        values |= {"user": getpass.getuser(), "folder": self.folder, "slurmd_timeout_s": self.slurmd_timeout_s}
        (self.folder / "slurm.conf").write_text(_CONFIG.format(**values))
        # SLURM 22.05 knows no CgroupPlugin=disabled; this one loads anywhere, and nothing here uses it.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for index in range(8):
            (self.folder / f"gpu{index}").symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(
            f"Name=gpu Type=h100 File={self.folder}/gpu[0-7] Flags=no_gpu_env\n"
        )


def require_programs() -> None:
    """Raise with a hint what to install if a program for the cluster is missing."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        raise RuntimeError(
            f"found no {', '.join(missing)}; expected SLURM 22.05 or newer. Run make test-slurm as root "
            "on Debian, or install slurmctld, slurmd, slurm-client and munge."
        )


def require_loopback() -> None:
    """Raise with a hint what to fix if the machine's daemons would not listen on loopback."""
    address = socket.gethostbyname(socket.gethostname())
    if not address.startswith("127."):
        raise RuntimeError(
            f"found host name {socket.gethostname()} at {address}; expected a loopback address, as SLURM's "
            "daemons listen on that address. Add '127.0.1.1 HOSTNAME' to /etc/hosts."
        )
