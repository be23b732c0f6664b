"""Masked tokens in the report: summed over the listed steps, whatever their text is."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.analysis.report.context import farthest
from megatron_dppo.analysis.report.report import compare
from megatron_dppo.analysis.report.tokens import token_lists, visible
from megatron_dppo.errors import DataError
from megatron_dppo.run_folder.folder import RunFolder
from megatron_dppo.run_folder.reader import Run, read_run
from megatron_dppo.runtime.jsonl import write_jsonl

HOSTILE = '</script><img src=x onerror="alert(1)">'


def _clipped(preset: str, sign: str, token: str, token_id: int, count: int, total: int) -> dict[str, Any]:
    means = {"mean_mu": 0.1 * count, "mean_pi": 0.3, "mean_entropy": 1.5, "mean_tv": "nan"}
    named = {"preset": preset, "sign": sign, "token": token, "token_id": token_id}
    return {**named, "count": count, "share": count / total, **means}


def write_listed_run(path: Path, steps: list[list[dict[str, Any]]]) -> Path:
    """A run of as many gradient steps, each with its list."""
    with RunFolder.open(path, {"algorithm": {"preset": "grpo"}}, resume=False) as folder:
        for step, rows in enumerate(steps):
            folder.write_step(0, step, {"policy/entropy": 0.5})
            write_jsonl(path / "clipped_tokens" / f"step_{step:06d}.jsonl", rows)
        folder.write_rollout(0, {"reward/mean": 0.5}, num_rollouts=1)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps, one hostile token, and a shadow."""
    first = [
        _clipped("active", "+", " wait", 7, 3, total=4),
        _clipped("active", "-", HOSTILE, 9, 1, total=1),
        _clipped("minirl", "+", "\n", 8, 2, total=2),
    ]
    second = [_clipped("active", "+", "hm", 5, 4, total=6), _clipped("active", "+", " wait", 7, 2, total=6)]
    return write_listed_run(tmp_path / "run", [first, second])


def test_steps_are_summed(run: Path) -> None:
    """Counts and totals add up, and means are weighted by counts."""
    ((listed),) = token_lists([read_run(run)], ["run"])
    active, shadow = listed["presets"]
    assert (listed["num_lists"], active["name"], shadow["name"]) == (2, "grpo (trained)", "minirl (shadow)")
    assert (active["num_positive"], active["num_negative"], shadow["num_negative"]) == (10, 1, 0)
    mu = round((3 * 0.3 + 2 * 0.2) / 5, 4)
    assert active["positive"][0] == ["␣wait", 7, 5, 0.5, mu, 0.3, 1.5, None]
    assert active["positive"][1][:4] == ["hm", 5, 4, 0.4]
    assert shadow["positive"][0][0] == "↵"


def test_lists_of_a_past_that_was_taken_back_do_not_count(run: Path) -> None:
    write_jsonl(run / "clipped_tokens" / "step_000002.jsonl", [_clipped("active", "+", "x", 1, 9, total=9)])
    assert token_lists([read_run(run)], ["run"])[0]["num_lists"] == 2


def test_a_run_without_lists_has_no_section(run: Path, tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "plain", {}, resume=False) as folder:
        folder.write_rollout(0, {"reward/mean": 0.5}, num_rollouts=1)
    compare([tmp_path / "plain"], tmp_path / "plain.html")
    assert 'id="masked-tokens"' not in (tmp_path / "plain.html").read_text()
    compare([tmp_path / "plain", run], tmp_path / "both.html")
    assert (
        'style="--run: var(--run-1)">\n    <summary>grpo, 2 gradient steps'
        in (tmp_path / "both.html").read_text()
    )


def test_a_token_cannot_end_the_script_it_stands_in(run: Path, tmp_path: Path) -> None:
    compare([run], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert "<img" not in html[: html.index("<script>")] and HOSTILE not in html
    found = re.search(r'id="token-lists">(.*?)</script>', html, re.DOTALL)
    assert found and json.loads(found[1])[0]["presets"][0]["negative"][0][0] == HOSTILE.replace(" ", "␣")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "␣the"),
        ("\n\n\t", "↵↵⇥"),
        ("", "⟨empty⟩"),
        ("\u200b\u202e", "⟨200B⟩⟨202E⟩"),
        ("\u0301", "◌\u0301"),
        ("\u00a0", "⟨00A0⟩"),
        ("é中", "é中"),
    ],
)
def test_what_cannot_be_seen_is_named(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_a_broken_list_is_named(run: Path) -> None:
    (run / "clipped_tokens" / "step_000000.jsonl").write_text('{"preset": "active"}\n')
    broken: Run = read_run(run)
    with pytest.raises(DataError, match=r"step_000000\.jsonl, line 1: not a row of clipped tokens"):
        token_lists([broken], ["run"])


def _masked(sign: str, divergence: float | str, sample: str, **changes: Any) -> dict[str, Any]:
    named = {"sign": sign, "rollout": 0, "sample": sample, "position": 60, "before": "1 +\n", "after": " = 3"}
    return {
        **named,
        "token": HOSTILE,
        "mu": 0.9,
        "pi": 0.1,
        "divergence": divergence,
        "advantage": 1.0,
        **changes,
    }


def test_the_farthest_out_stand_in_context_with_their_samples_line(run: Path, tmp_path: Path) -> None:
    steps = [_masked("+", 0.5, "a"), _masked("-", 0.7, "b")], [_masked("+", "inf", "b", rollout=1)]
    for step, rows in enumerate(steps):
        write_jsonl(run / "masked_tokens" / f"step_{step:06d}.jsonl", rows)
    samples = [
        {"id": "c", "prompt_length": 4},
        {"id": "b", "prompt_length": 11},
        {"id": "a", "prompt_length": 3},
    ]
    write_jsonl(run / "samples" / "rollout_000000.jsonl", samples)
    infinite, largest, negative = farthest(read_run(run), tmp_path / "out")
    assert [row["sign"] for row in (infinite, largest, negative)] == ["+", "+", "-"]
    assert (infinite["divergence"], infinite["step"], "link" in infinite) == (None, 1, False)
    assert (largest["file"], largest["line"], largest["place"]) == ("samples/rollout_000000.jsonl", 3, 58)
    assert (tmp_path / "out" / negative["link"]).resolve() == run / "samples" / "rollout_000000.jsonl"
    assert (negative["line"], negative["place"]) == (2, 50)
    assert (largest["before"], largest["after"]) == ("… 1 +↵\n", " = 3")
    compare([run], tmp_path / "out" / "report.html")
    html = (tmp_path / "out" / "report.html").read_text()
    assert "In context: the 3 tokens farthest out" in html and HOSTILE not in html


def test_a_broken_context_is_named(run: Path) -> None:
    write_jsonl(run / "masked_tokens" / "step_000000.jsonl", [{"sign": "+"}])
    with pytest.raises(DataError, match=r"step_000000\.jsonl, line 1: not a masked token"):
        farthest(read_run(run), run.parent)
