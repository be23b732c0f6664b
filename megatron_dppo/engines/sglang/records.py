"""What clients need to find a run's servers: their files in run/servers/, and their API key.

Only the owner can read the folder and its files. The key is in no file and on no command line: it is an
environment variable of the trainer's and the servers' processes.
"""

import ipaddress
import json
import os
import re
import secrets
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_dppo.errors import Problem, ServerError
from megatron_dppo.runtime.files import make_private, write_jsonl
from megatron_dppo.runtime.process import Runtime

API_KEY = "MEGATRON_DPPO_SGLANG_API_KEY"
"""Environment variable with the API key that servers require and clients send. Unset or empty means no key."""
NCCL = "NCCL"  # name of the library's version among the settings that trainer and servers must share
TORCH = "torch"  # recorded with it, and not compared: two versions exchange weights


@dataclass(frozen=True)
class ServerRecord:
    """Registration of a healthy server: its file in the run's servers/."""

    name: str
    url: str
    host: str  # host of the process
    pid: int
    version: str
    since: str
    num_starts: int  # above 1 after a restart, which loads the weights of model.load again
    # NCCL's environment variables, and the versions of NCCL and torch
    nccl: Mapping[str, str] = field(default_factory=dict[str, str])


def write_record(path: Path, record: ServerRecord) -> None:
    """Register a server in a run's servers/, readable by the owner only."""
    make_private(path.parent)
    write_jsonl(path, [asdict(record)], mode=0o600)


def read_records(folder: Path) -> list[ServerRecord]:
    """Return the servers registered in a run's servers/, sorted by name with node-2 before node-10.

    A server that ends in the meantime removes its record, which is then left out.
    """
    records: list[ServerRecord] = []
    for path in sorted(folder.glob("*.json"), key=_by_numbers):
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
            records.append(ServerRecord(**content))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError) as error:
            raise ServerError(
                f"{path}: found {error}; expected a file of megatron-dppo serve. Remove the file, and start "
                "the server again."
            ) from None
    return records


def differences(own: Mapping[str, str], of_server: Mapping[str, str]) -> str | None:
    """Describe how a server's settings differ from the trainer's, or return None if they are equal.

    An unknown setting counts as equal: an older version of this package registered none, and a torch for CPUs
    has no NCCL. NCCL refuses to connect ranks of different versions.
    """
    names = [name for name, value in own.items() if of_server.get(name, value) != value]
    found = " and ".join(f"{name}={of_server[name]} there and {own[name]} in the trainer" for name in names)
    found += f" (torch {of_server[TORCH]})" if NCCL in names and TORCH in of_server else ""
    action = one_nccl(of_server[NCCL]) if NCCL in names else "export the same values on every node"
    return f"{found}; {action}" if names else None


def one_nccl(version: str) -> str:
    """Return what to do if the servers have another version of NCCL than the trainer, namely this one."""
    return (
        f"run pip install --no-deps nvidia-nccl-cu13=={version} (or the package for your CUDA) in the "
        "trainer's environment, after all other packages, or set rollout.sglang.weight_sync = 'disk'"
    )


def require_registered(folder: Path) -> list[ServerRecord]:
    """Return the servers registered in a run's servers/, at least one."""
    records = read_records(folder)
    if not records:
        raise ServerError(
            f"{folder}: found no SGLang server; expected one or more. Start them with megatron-dppo serve and "
            "the config of this run, and wait until they are ready; or set rollout.sglang.num_own_servers."
        )
    return records


def api_key() -> str | None:
    """Return the API key of this process's servers, or None if there is none."""
    return os.environ.get(API_KEY) or None


@contextmanager
def common_key(runtime: Runtime) -> Generator[None]:
    """Give every rank the API key of rank 0 during the body, or a new one if rank 0 has none."""
    before = os.environ.get(API_KEY)
    os.environ[API_KEY] = runtime.on_main(lambda: api_key() or secrets.token_hex(16))
    try:
        yield
    finally:
        os.environ.pop(API_KEY)
        if before is not None:
            os.environ[API_KEY] = before


def key_problems(host: str) -> Iterator[Problem]:
    """Yield a problem with a server that other machines can reach and that requires no key."""
    if api_key() is None and not is_loopback(host):
        action = (
            f"Run export {API_KEY}=$(openssl rand -hex 16) once, and start all servers and the trainer with "
            "this value, since anyone who reaches the server can send it weights; or set sglang.host = "
            "'127.0.0.1'."
        )
        yield Problem("sglang.host", f"{host!r}, and no {API_KEY} in the environment", "a key", action)


def without_key(text: str) -> str:
    """Return a server's output without the API key, which SGLang writes to its log."""
    if (key := api_key()) is None:
        return text
    for spelt in (repr(key)[1:-1], json.dumps(key)[1:-1], key):
        text = text.replace(spelt, "***")
    return text


def is_loopback(host: str) -> bool:
    """Return whether only processes of the same machine reach this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that compares the numbers in a name by value."""
    parts = re.split(r"(\d+)", path.stem)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
