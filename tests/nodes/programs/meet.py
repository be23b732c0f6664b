"""A rank that joins the process groups, and prints the result as one line of JSON; run by a launcher or lab.

Arguments: seconds of `timeout_s` and `join_timeout_s`. The exit status is 0 if the ranks met, and 3 otherwise.
"""

import json
import os
import sys
import time

from megatron_dppo.failure_detection import watching
from megatron_dppo.runtime.process import start


def main(timeout_s: float = 60.0, join_timeout_s: float = 20.0) -> None:
    """Start, watch, and gather the host names."""
    started, outcome, message = time.monotonic(), "met", ""
    try:
        runtime = start(timeout_s=timeout_s, join_timeout_s=join_timeout_s)
        with watching(runtime):
            message = " ".join(runtime.all_gather(os.uname().nodename))
    except Exception as error:  # noqa: BLE001 - whatever it was, it is what the test asks for
        outcome, message = type(error).__name__, str(error)
    seconds = round(time.monotonic() - started, 1)
    said = {"rank": int(os.environ["RANK"]), "outcome": outcome, "seconds": seconds, "message": message}
    print(json.dumps(said), flush=True)
    sys.exit(0 if outcome == "met" else 3)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
