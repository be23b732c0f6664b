"""A rank under failure detection that makes progress, or stays silent, until its peer is lost.

Arguments: "moving" or "static" progress, and seconds of `peer_timeout_s`. It prints "watches" once it is
watched. The last lines on stderr name the lost peer.
"""

import sys
import time

from megatron_dppo.failure_detection import watching
from megatron_dppo.runtime.process import start

_END_S = 600


def main(mode: str = "moving", peer_timeout_s: float = 60.0) -> None:
    """Watch; with "moving" progress each second."""
    runtime = start(timeout_s=3000.0, join_timeout_s=60.0)
    with watching(runtime, peer_timeout_s=peer_timeout_s):
        print("watches", flush=True)
        for step in range(_END_S):
            time.sleep(1.0)
            if mode == "moving":
                runtime.progress.step = step


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    main(given.get(1, "moving"), float(given.get(2, 60.0)))
