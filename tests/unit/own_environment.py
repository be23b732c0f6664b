"""A reward, an environment and a judge that tell which variables they find, for `test_workers.py`."""

import os
import subprocess
import sys

from megatron_dppo.environments.base import Observation, Turn
from megatron_dppo.types import FinishReason, Prompt

_TELL = "import json, os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(json.dumps(dict(os.environ)))"


def tell(prompt: Prompt, response: str, finish_reason: FinishReason) -> float:
    """Write what a program that it starts finds, into the file that the response names."""
    subprocess.run([sys.executable, "-c", _TELL, response], check=True)
    return 1.0


class Teller:
    """The same, as an environment."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.prompt = prompt
        return Observation("where?")

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        return Turn(None, tell(self.prompt, response, finish_reason), done=True)


def judge(prompt: Prompt, response: str, finish_reason: FinishReason) -> float:
    """Call a judge, whose client raises the response as its error if there is no JUDGE_API_KEY."""
    if "JUDGE_API_KEY" not in os.environ:
        raise RuntimeError(response)
    return float(len(os.environ["JUDGE_API_KEY"]))
