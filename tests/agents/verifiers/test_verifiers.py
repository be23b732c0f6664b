"""An environment of the library verifiers is a harness, by `examples/verifiers_task.py`."""

import json
import os
import subprocess
from pathlib import Path

from tests.agents.loopback_proxy import LoopbackProxy
from tests.agents.playing import CONTINUED, END, THOUGHT, Harness, call, check_episode, tool_result
from tools.versions import read_pins

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "tests" / "agents" / "verifiers"
PYTHON = os.environ.get("VERIFIERS_PYTHON", str(ROOT / ".venv-verifiers" / "bin" / "python"))
PROGRAM = str(ROOT / "examples" / "verifiers_task.py")
PINS = read_pins(FOLDER / "requirements.txt")
CALL = THOUGHT + call("digits_look_up", '{"key":  2}')
HARNESS = Harness(
    ("verifiers", "openai"),
    "chat, an environment with a tool",
    (PYTHON, PROGRAM, "play", "look-up", "{task}"),
    (CALL, "It is 5."),
    CONTINUED,
    (tool_result("5"),),
    (f"{CALL}{END}It is 5.{END}",),
    prompt_id="1",
)


def test_a_task_is_played_and_its_reward_is_posted(tmp_path: Path) -> None:
    with LoopbackProxy() as proxy:
        names = proxy.names | {"PYTHONPATH": str(FOLDER), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        printed = subprocess.check_output([PYTHON, PROGRAM, "prompts", "look-up"], env=names, text=True)
        rows = [json.loads(line) for line in printed.splitlines()]
        asked = [{"role": "user", "content": "Which digit has 2?"}]
        assert [row["id"] for row in rows] == ["0", "1"] and rows[1]["prompt"] == asked
        command = ("env", *(f"{name}={value}" for name, value in names.items()), *HARNESS.command)
        episode = check_episode(HARNESS, command, PINS)
        assert episode.reward == 0.75 and episode.info == {"is_right": 1.0, "letters": 8.0}
        assert not proxy.other_hosts
