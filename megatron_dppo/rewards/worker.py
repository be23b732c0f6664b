"""A process that scores responses for a trainer: `python -m megatron_dppo.rewards.worker NAME MEMORY_MB`.

JSON lines in, one JSON line out for each, in order; the first line out says whether the reward could be loaded.
What a reward prints goes to stderr. The worker imports no tensor library, so it starts in a moment, and holds
nothing that belongs to the trainer.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
from typing import Any

from megatron_dppo.errors import MegatronDppoError
from megatron_dppo.rewards.base import Reward, checked, reward
from megatron_dppo.types import Prompt

_MAX_MESSAGE = 2000  # characters of a fault's message


def main() -> None:
    """Serve until stdin ends, or the process that started this one is gone."""
    name, memory_mb = sys.argv[1], int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole job; the trainer decides
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        function = reward(name)
    except MegatronDppoError as error:
        _reply(replies, {"fault": str(error)})
        return
    except Exception as error:  # noqa: BLE001 - the user's module may raise anything while it is imported
        _reply(
            replies, {"fault": f"data.reward: {name!r} raised {type(error).__name__} when imported: {error}"}
        )
        return
    _limit_memory(memory_mb)
    _reply(replies, {})
    for line in sys.stdin:
        _reply(replies, _score(function, json.loads(line)))


def _score(function: Reward, request: dict[str, Any]) -> dict[str, Any]:
    prompt = Prompt(**request["prompt"])
    try:
        result = checked(function, prompt, request["response"], request["finish_reason"])
        return {"value": result.value, "info": dict(result.info)}
    except MemoryError:
        kind, message = "reward_out_of_memory", f"prompt {prompt.id}: the reward ran out of memory"
    except Exception as error:  # noqa: BLE001 - a reward is the user's code and may raise anything
        kind, message = "reward_failed", str(error)[:_MAX_MESSAGE]
    gc.collect()  # after the exception, which held what the reward had allocated, is gone
    return {"fault": kind, "message": message}


def _reply(stream: Any, content: dict[str, Any]) -> None:
    stream.write(json.dumps(content) + "\n")
    stream.flush()


def _limit_memory(memory_mb: int) -> None:
    """Let allocations beyond what is used now raise MemoryError, on systems that can tell."""
    if memory_mb == 0 or not os.path.exists("/proc/self/status"):  # noqa: PTH110 - one look, no path arithmetic
        return
    import resource

    with open("/proc/self/status") as status:  # noqa: PTH123
        used_kb = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
    limit = used_kb * 1024 + memory_mb * (1 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _end_with_parent(parent: int) -> None:
    """A trainer that was killed closes stdin, which a hung reward does not read."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main()
