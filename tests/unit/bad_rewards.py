"""Rewards that go wrong where the response asks for it, for `test_reward_pool.py`."""

import os
import signal
import sys
import time
from typing import Any

from megatron_dppo.rewards.base import RewardResult
from megatron_dppo.types import FinishReason, Prompt


def told(prompt: Prompt, response: str, finish_reason: FinishReason) -> Any:
    """What the response says; else its length."""
    match response.split(" ")[0]:
        case "raise":
            raise KeyError("lost")
        case "sleep":
            time.sleep(60)
        case "spin":
            while True:
                pass
        case "memory":
            return RewardResult(float(len(bytearray(1 << 30)) + len(bytearray(1 << 30))))
        case "exit":
            os._exit(3)
        case "leave":
            sys.exit(4)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "nan":
            return RewardResult(float("nan"))
        case "inf info":
            return RewardResult(0.0, {"x": float("inf")})
        case "type":
            return "good"
        case "none":
            return None
        case "print":
            print("{torn")
            sys.stdout.flush()
            os.write(1, b"{}\n")
        case "pid":
            return RewardResult(float(os.getpid()))
        case _:
            pass
    return RewardResult(
        float(len(response)),
        {"has_prompt": float(bool(prompt.text)), "is_cut": float(finish_reason == "length")},
    )
