"""In the place of `megatron-dppo serve`: a stand-in for a server of a tiny model, registered until it ends.

python -m tests.slurm.serve_stand_in base.toml dppo.toml tiny.toml --name node-0 --set run.folder=runs/a
"""

import argparse
import os
import signal
import socket
from pathlib import Path

from megatron_dppo.config.load import load_config
from megatron_dppo.data.prompts import sanity_task
from megatron_dppo.engines.sglang.records import ServerRecord, write_record
from tests.support.sglang_stand_in import LiveStandIn

_TOKEN_S = 0.2
_LATER = tuple(f"place{place}+" for place in range(4, 8))  # of four prompts per rollout


def _is_needed_later(rid: str) -> bool:
    """Whether the first rollout of a job does without the response; a resumed job may need any."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") == "0" and rid.startswith(_LATER)


def main() -> None:
    """Answer until SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # before any thread starts
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--name", required=True)
    options = parser.parse_intermixed_args()
    folder = load_config(options.configs, options.set).run.folder / "servers"
    words = tuple(sanity_task.VOCABULARY[token] for token in (*"0123456789", "w0"))
    end = sanity_task.VOCABULARY[sanity_task.EOS]
    host = socket.gethostname()
    server = LiveStandIn(
        host=host, end_token=end, tokens=words, token_s=_TOKEN_S, first_push_interrupts=_is_needed_later
    )
    with server.running():
        record = ServerRecord(options.name, server.url, host, os.getpid(), "0.5.23", "now", 1)
        write_record(folder / f"{options.name}.json", record)
        signal.sigwait([signal.SIGTERM])
        print(f"{os.environ['SLURMD_NODENAME']}: ended with weights {server.version}")


if __name__ == "__main__":
    main()
