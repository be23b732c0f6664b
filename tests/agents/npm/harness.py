"""A command-line agent in an empty home: python harness.py claude|codex|opencode|qwen QUESTION [WORD...]."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

KEPT = ("PATH", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
HOME = Path("home").resolve()
PLUGIN = "@opencode-ai/plugin"


def write(path: Path, content: Mapping[str, object]) -> None:
    """Write a file of settings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def claude(question: str) -> tuple[list[str], dict[str, str]]:
    """Claude Code: no telemetry, no updates."""
    names = {"ANTHROPIC_BASE_URL": os.environ["ANTHROPIC_BASE_URL"], "ANTHROPIC_API_KEY": KEY}
    words = ["claude", "-p", question, "--model", "policy", "--allowedTools", "Bash", "Agent"]
    return words, names | {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}


def codex(question: str) -> tuple[list[str], dict[str, str]]:
    """Codex CLI: no analytics, no updates, no downloads of plugins and apps."""
    provider = f'name="policy", base_url="{URL}", env_key="OPENAI_API_KEY", wire_api="responses"'
    settings = {
        "model_provider": '"policy"',
        "model_providers.policy": f"{{{provider}}}",
        "analytics.enabled": "false",
        "check_for_update_on_startup": "false",
        "features.plugins": "false",
        "features.apps": "false",
    }
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    alone = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["codex", "exec", question, "-m", "policy", *alone, *options], {"OPENAI_API_KEY": KEY}


def opencode(question: str) -> tuple[list[str], dict[str, str]]:
    """Opencode: no list of models, no updates, and a plugin library that counts as installed."""
    options = {"baseURL": URL, "apiKey": KEY}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"policy": {}}}
    write(Path("opencode.json"), {"provider": {"policy": provider}, "share": "disabled", "autoupdate": False})
    folder = HOME / ".config" / "opencode"
    (folder / "node_modules").mkdir(parents=True)
    write(folder / "package-lock.json", {"packages": {"": {"dependencies": {PLUGIN: "*"}}}})
    return ["opencode", "run", "-m", "policy/policy", question], {"OPENCODE_DISABLE_MODELS_FETCH": "1"}


def qwen(question: str) -> tuple[list[str], dict[str, str]]:
    """Qwen Code: no usage statistics, no updates, and no agent that extracts memories after the end."""
    settings = {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "memory": {"enableManagedAutoMemory": False},
    }
    write(HOME / ".qwen" / "settings.json", settings)
    names = {"OPENAI_BASE_URL": URL, "OPENAI_API_KEY": KEY, "OPENAI_MODEL": "policy"}
    return ["qwen", "--auth-type", "openai", "--yolo", "-p", question], names


AGENTS = {each.__name__: each for each in (claude, codex, opencode, qwen)}

if __name__ == "__main__":
    name, asked, *more = sys.argv[1:]
    HOME.mkdir()
    command, variables = AGENTS[name](asked)
    kept = {each: os.environ[each] for each in KEPT if each in os.environ}
    environment = kept | variables | {"HOME": str(HOME)}
    done = subprocess.run(
        [*command, *more], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    is_right = done.returncode == 0 and "It is 5." in done.stdout.splitlines()
    sys.exit(0 if is_right else f"found status {done.returncode} and {done.stdout!r}")
