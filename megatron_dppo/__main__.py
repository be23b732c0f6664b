"""The command `megatron-dppo`, and `python -m megatron_dppo`, the form that torchrun starts."""

import os
import signal
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Run the command line; during its imports, which take seconds, Ctrl-C ends the process at once."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    from megatron_dppo.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Exit without an exception, which a module that is being imported may catch, or show as its failure."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"SIGINT: ended before the command began\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
