"""Command-line agents that are npm packages play a task with a tool, and reach no other host."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agents.loopback_proxy import LoopbackProxy
from tests.agents.playing import (
    CONTINUED,
    END,
    THOUGHT,
    Harness,
    call,
    check_episode,
    tool_result,
)

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "tests" / "agents" / "npm"
MODULES = Path(os.environ.get("NPM_AGENTS", ROOT / ".npm-agents")) / "node_modules"
PINS: dict[str, str] = json.loads((FOLDER / "package.json").read_text())["dependencies"]
ANSWER = "It is 5."


def running(name: str, command: str = "echo $((2 + 3))") -> str:
    """Return a response that runs a command with the tool of this name."""
    words = json.dumps({"cmd" if name == "exec_command" else "command": command})
    return THOUGHT + call(name, words.replace(": ", ":  "))


def shell(package: str, what: str, agent: str, tool: str, output: str, *, has_title: bool = False) -> Harness:
    """A harness that runs one command and then replies with text."""
    trained = f"{running(tool)}{END}{ANSWER}{END}"
    return Harness(
        (package,),
        what,
        (agent,),
        (running(tool), ANSWER),
        ("first", "another", "continues") if has_title else CONTINUED,
        (tool_result(output),),
        (trained,),
        is_parallel=has_title,
    )


CHUNK = r"Chunk ID: \w+\nWall time: [\d.]+ seconds\nProcess exited with code 0\n.*Output:\n5\n"
DELEGATE = THOUGHT + call(
    "Agent",
    '{"description":  "add", "prompt": "What is 2 + 4?", "subagent_type": "general-purpose",'
    ' "run_in_background": false}',
)
PARALLEL = THOUGHT + "\n".join(
    call("Bash", f'{{"command":  "{command}"}}') for command in ("sleep 2; echo 5", "echo 6")
)
INNER = running("Bash", "echo $((2 + 4))")
SUMMARY = "<summary>The sum is asked for.</summary>"
HARNESSES = (
    shell("@anthropic-ai/claude-code", "messages", "claude", "Bash", "5"),
    Harness(
        ("@anthropic-ai/claude-code",),
        'messages, with a sub-agent, `train = "tools"`',
        ("claude",),
        (DELEGATE, INNER, "It is 6.", ANSWER),
        ("first", "another", "continues", "continues"),
        (tool_result("6.*"), tool_result(r".*It is 6\..*")),
        (f"{DELEGATE}{END}{ANSWER}{END}", f"{INNER}{END}It is 6.{END}"),
        "tools",
    ),
    Harness(  # which sends the second result first
        ("@anthropic-ai/claude-code",),
        "messages, with parallel calls",
        ("claude",),
        (PARALLEL, ANSWER),
        CONTINUED,
        (tool_result(f"5{re.escape(END)}\n{re.escape('<|im_start|>tool')}\n6"),),
        (f"{PARALLEL}{END}{ANSWER}{END}",),
    ),
    Harness(
        ("@anthropic-ai/claude-code",),
        'messages, with a compaction at `max_response_tokens`, `train = "tools"`',
        ("claude",),
        (running("Bash", "seq 100"), SUMMARY, ANSWER),
        ("first", "another", "another"),
        (),
        tuple(f"{text}{END}" for text in (running("Bash", "seq 100"), SUMMARY, ANSWER)),
        "tools",
        max_response_tokens=200,
    ),
    shell("@openai/codex", "responses", "codex", "exec_command", CHUNK),
    Harness(
        ("@openai/codex",),
        'responses, with a compaction, `train = "tools"`',
        ("codex", "-c", "model_auto_compact_token_limit=20000"),
        (running("exec_command"), ANSWER),
        ("first", "tools", "edited"),
        (),
        (f"{running('exec_command')}{END}", f"{ANSWER}{END}"),
        "tools",
    ),
    shell("opencode-ai", "chat", "opencode", "bash", "5\n", has_title=True),
    shell("@qwen-code/qwen-code", "chat", "qwen", "run_shell_command", "Command: .*Output: 5\n.*"),
)


def test_the_folder_has_the_pinned_versions() -> None:
    found = {name: json.loads((MODULES / name / "package.json").read_text())["version"] for name in PINS}
    assert found == PINS


def test_a_program_that_calls_another_host_is_found() -> None:
    program = "import urllib.request; urllib.request.urlopen('http://example.invalid/')"
    with LoopbackProxy() as proxy:
        subprocess.run([sys.executable, "-c", program], env=proxy.names, check=False, capture_output=True)
        assert proxy.other_hosts == ["example.invalid"]


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda each: each.name)
def test_an_episode_has_the_expected_calls_and_reaches_no_other_host(harness: Harness) -> None:
    program, (agent, *words) = str(FOLDER / "harness.py"), harness.command
    with LoopbackProxy() as proxy:
        names = proxy.names | {"PATH": f"{MODULES / '.bin'}:{os.environ['PATH']}"}
        command = ("env", *(f"{name}={value}" for name, value in names.items()), sys.executable, program)
        check_episode(harness, (*command, agent, "{prompt}", *words), PINS)
        assert not proxy.other_hosts
