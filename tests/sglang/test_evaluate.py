"""`megatron-dppo evaluate` starts its own server, which gets all weights by a push.

The model is tied: the server builds an output layer for it, which no file has.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w

from tests.support.records import lines_of
from tests.support.sanity_run import TOKENS, add_task, settings
from tests.support.serving import OPTIONS, ROOT
from tests.support.tiny import write_model


def evaluated(folder: Path, name: str, **changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Every response of one call of the command."""
    config, out = folder / f"{name}.toml", folder / name
    config.write_text(tomli_w.dumps(settings(folder, "run", **changes)))
    command = [
        sys.executable,
        "-m",
        "megatron_dppo",
        "evaluate",
        config,
        "--model",
        folder / "megatron",
        "-o",
        out,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "avg_at_1" in done.stdout
    return lines_of(out / "held_out.jsonl")


def test_a_server_gives_the_greedy_responses_of_the_embedded_engine(tmp_path: Path) -> None:
    write_model(tmp_path / "model", num_hidden_layers=2, tie_word_embeddings=True, **TOKENS)
    folder = add_task(tmp_path)
    convert = [sys.executable, ROOT / "tools/convert_checkpoint.py", "to-megatron"]
    subprocess.run([*convert, "--hf", folder / "model", "--out", folder / "megatron"], check=True)
    evaluation = {
        "sets": {"held_out": {"prompts": str(folder / "held_out.jsonl")}},
        "samples_per_prompt": 1,
        "temperature": 0.0,
        "top_p": 1.0,
    }
    embedded = {"transformers": {"weights": "float32"}}
    served = {"engine": "sglang", "sglang": {"num_own_servers": 1}}
    of_embedded = evaluated(folder, "embedded", evaluation=evaluation, rollout=embedded)
    table = OPTIONS | {"context_length": 64}
    of_server = evaluated(folder, "served", evaluation=evaluation, rollout=served, sglang=table)
    assert len(of_server) == 4 and {row["dropped"] for row in of_server} == {None}
    assert of_server == of_embedded
