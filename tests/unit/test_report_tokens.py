"""Masked tokens in the report: of one rollout, each run its own, whatever their text is."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dppo.analysis.report.report import compare
from megatron_dppo.analysis.report.samples import farthest, make_visible, token_lists
from megatron_dppo.cli import app
from megatron_dppo.errors import ConfigError, DataError
from megatron_dppo.run.history import remove_undone
from megatron_dppo.run_folder.folder import RunFolder
from megatron_dppo.run_folder.reader import Run, read_run
from megatron_dppo.runtime.files import write_jsonl
from tests.support.refusals import refused

HOSTILE = '</script><img src=x onerror="alert(1)">'


def _clipped(preset: str, sign: str, token: str, token_id: int, count: int, total: int) -> dict[str, Any]:
    means = {"mean_mu": 0.1 * count, "mean_pi": 0.3, "mean_entropy": 1.5, "mean_tv": "nan"}
    named = {"preset": preset, "sign": sign, "token": token, "token_id": token_id}
    return {**named, "count": count, "share": count / total, **means}


def write_listed_run(
    path: Path, lists: dict[int, list[dict[str, Any]]], *, preset: str = "grpo", num_rollouts: int = 1
) -> Path:
    """A run of two gradient steps in each rollout, with the lists of some rollouts, counted from 1."""
    with RunFolder.open(path, {"algorithm": {"preset": preset}}, resume=False) as folder:
        for rollout in range(num_rollouts):
            for step in (2 * rollout, 2 * rollout + 1):
                folder.write_step(rollout, step, {"policy/entropy": 0.5})
            folder.write_rollout(rollout, {"reward/mean": 0.5}, num_rollouts=num_rollouts)
    for number, rows in lists.items():
        of_all = {"rollout": number - 1, "num_steps": 2}
        file = path / "clipped_tokens" / f"rollout_{number - 1:06d}.jsonl"
        write_jsonl(file, [of_all | row for row in rows])
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """One rollout, one hostile token, and a shadow."""
    rows = [
        _clipped("active", "+", " wait", 7, 3, total=4),
        _clipped("active", "-", HOSTILE, 9, 1, total=1),
        _clipped("minirl", "+", "\n", 8, 2, total=2),
    ]
    return write_listed_run(tmp_path / "run", {1: rows})


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Runs of two presets that list other rollouts, other numbers of tokens, and other counts of each sign."""
    lists: list[dict[int, list[dict[str, Any]]]] = [{}, {}]
    for index, rollouts in enumerate(((2, 4, 6), (3, 6))):
        for number in rollouts:
            # a count identifies the run, rollout, sign, and whether the preset trained
            counts = {
                ("active", "+"): [1000 * (index + 1) + 100 * number + 7, 5],
                ("active", "-"): [1000 * (index + 1) + 100 * number + 3],
                ("minirl", "-"): [1000 * (index + 1) + 100 * number + 1, 4, 2],
            }
            lists[index][number] = [
                _clipped(preset, sign, f"{preset}{sign}{index}", token, count, total=2 * sum(of_sign))
                for (preset, sign), of_sign in counts.items()
                for token, count in enumerate(of_sign)
            ]
    names = ("first", "second")
    presets = ("grpo", "cispo")
    return [
        write_listed_run(tmp_path / name, of, preset=preset, num_rollouts=6)
        for name, of, preset in zip(names, lists, presets, strict=True)
    ]


def counts_of(listed: dict[str, Any]) -> dict[str, list[tuple[str, int]]]:
    """Tokens and counts of one run's lists, by preset and sign."""
    return {
        f"{preset['name']} {sign}": [(row[0], row[2]) for row in preset[sign]]
        for preset in listed["presets"]
        for sign in ("positive", "negative")
    }


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_run_shows_its_own_list_of_the_rollout(two: list[Path], order: tuple[int, int]) -> None:
    """Neither runs nor signs nor presets nor rollouts are taken for each other, in any order of the runs."""
    names = [("first", "second")[place] for place in order]
    found = token_lists([read_run(two[place]) for place in order], names)
    assert [(each["run"], each["name"], each["rollout"]) for each in found] == [
        (0, names[0], 6),
        (1, names[1], 6),
    ]
    first, second = (found[order.index(place)] for place in (0, 1))
    assert counts_of(first) == {
        "grpo (trained) positive": [("active+0", 1607), ("active+0", 5)],
        "grpo (trained) negative": [("active-0", 1603)],
        "minirl (shadow) positive": [],
        "minirl (shadow) negative": [("minirl-0", 1601), ("minirl-0", 4), ("minirl-0", 2)],
    }
    assert counts_of(second) == {
        "cispo (trained) positive": [("active+1", 2607), ("active+1", 5)],
        "cispo (trained) negative": [("active-1", 2603)],
        "minirl (shadow) positive": [],
        "minirl (shadow) negative": [("minirl-1", 2601), ("minirl-1", 4), ("minirl-1", 2)],
    }
    totals = [(of["num_positive"], of["num_negative"]) for of in second["presets"]]
    assert totals == [(2 * 2612, 2 * 2603), (0, 2 * 2607)]
    assert (first["rollouts"], second["rollouts"]) == ([2, 4, 6], [3, 6])


def test_the_rollout_is_chosen(two: list[Path], tmp_path: Path) -> None:
    runs = [read_run(path) for path in two]
    ((only),) = token_lists(runs[:1], ["first"], tokens_at=4)
    assert (only["rollout"], counts_of(only)["grpo (trained) positive"][0]) == (4, ("active+0", 1407))
    with pytest.raises(ConfigError, match=r"found 4, .*first .*2, 4, 6; second .*3, 6") as error:
        token_lists(runs, ["first", "second"], tokens_at=4)
    assert "Name 6." in str(error.value)
    with refused("--tokens-at", "1, "):
        token_lists([read_run(write_listed_run(tmp_path / "none", {}))], ["none"], tokens_at=1)
    (two[1] / "clipped_tokens" / "rollout_000005.jsonl").unlink()
    found = token_lists([*runs, read_run(write_listed_run(tmp_path / "no_lists", {}))], ["a", "b", "c"])
    assert [(each["name"], each["rollout"]) for each in found] == [("a", 6), ("b", 3)], "they share none"


def test_the_command_shows_the_rollout(two: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    asked = ["compare", *map(str, two), "-o", str(out), "--tokens-at"]
    assert CliRunner().invoke(app, [*asked, "6"]).exit_code == 0
    html = out.read_text()
    for place, name in enumerate(("grpo", "cispo")):
        part = html[html.index(f'data-tokens="{place}"') :]
        assert f"<summary>{name}, rollout 6</summary>" in part[:200]
    refused = CliRunner().invoke(app, [*asked, "5"])
    assert refused.exit_code == 2 and "cispo lists 3, 6" in refused.output


def test_lists_of_gradient_steps_are_merged(tmp_path: Path) -> None:
    """As earlier versions wrote them: counts and totals add up, and means are weighted by counts."""
    run = write_listed_run(tmp_path / "run", {})
    first = [
        _clipped("active", "+", " wait", 7, 3, total=4),
        _clipped("active", "-", HOSTILE, 9, 1, total=1),
        _clipped("minirl", "+", "\n", 8, 2, total=2),
    ]
    second = [_clipped("active", "+", "hm", 5, 4, total=6), _clipped("active", "+", " wait", 7, 2, total=6)]
    for step, rows in enumerate((first, second)):
        write_jsonl(run / "clipped_tokens" / f"step_{step:06d}.jsonl", rows)
    ((listed),) = token_lists([read_run(run)], ["run"])
    active, shadow = listed["presets"]
    assert (listed["rollout"], listed["num_listed"], listed["is_cut"]) == (1, 2, True)
    assert (active["name"], shadow["name"]) == ("grpo (trained)", "minirl (shadow)")
    assert (active["num_positive"], active["num_negative"], shadow["num_negative"]) == (10, 1, 0)
    mu = round((3 * 0.3 + 2 * 0.2) / 5, 4)
    assert active["positive"][0] == ["␣wait", 7, 5, 0.5, mu, 0.3, 1.5, None]
    assert active["positive"][1][:4] == ["hm", 5, 4, 0.4]
    assert shadow["positive"][0][0] == "↵"
    compare([run], tmp_path / "report.html")
    assert "cut each gradient step's at 50 tokens" in " ".join((tmp_path / "report.html").read_text().split())


def test_lists_of_a_past_that_was_taken_back_do_not_count(run: Path) -> None:
    rows = [_clipped("active", "+", "x", 1, 9, total=9)]
    for name in ("step_000002", "rollout_000001"):
        write_jsonl(run / "clipped_tokens" / f"{name}.jsonl", rows)
    ((listed),) = token_lists([read_run(run)], ["run"])
    assert listed["rollouts"] == [1] and listed["presets"][0]["positive"][0][0] == "␣wait"
    (run / "masked_tokens").mkdir()
    stale, kept = (run / "masked_tokens" / f"step_00000{step}.jsonl" for step in (2, 1))
    stale.touch()
    kept.touch()
    remove_undone(read_run(run))
    assert [file.name for file in (run / "clipped_tokens").iterdir()] == ["rollout_000000.jsonl"]
    assert kept.exists() and not stale.exists()


def test_a_run_without_lists_has_no_section(run: Path, tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "plain", {}, resume=False) as folder:
        folder.write_rollout(0, {"reward/mean": 0.5}, num_rollouts=1)
    compare([tmp_path / "plain"], tmp_path / "plain.html")
    assert 'id="masked-tokens"' not in (tmp_path / "plain.html").read_text()
    compare([tmp_path / "plain", run], tmp_path / "both.html")
    assert (
        'style="--run: var(--run-1)">\n    <summary>grpo, rollout 1</summary>'
        in (tmp_path / "both.html").read_text()
    )


def test_token_text_cannot_close_the_script_element(run: Path, tmp_path: Path) -> None:
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
def test_invisible_characters_are_named(text: str, shown: str) -> None:
    assert make_visible(text) == shown


def test_a_broken_list_is_named(run: Path) -> None:
    (run / "clipped_tokens" / "rollout_000000.jsonl").write_text('{"preset": "active"}\n')
    broken: Run = read_run(run)
    with pytest.raises(DataError, match=r"rollout_000000\.jsonl, line 1: "):
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
    write_jsonl(run / "masked_tokens" / "step_000002.jsonl", [_masked("+", 0.9, "a", rollout=1)])
    infinite, largest, negative = farthest(read_run(run), tmp_path / "out", 1)
    assert [row["sign"] for row in (infinite, largest, negative)] == ["+", "+", "-"]
    assert (infinite["divergence"], infinite["step"], "link" in infinite) == (None, 2, False)
    assert (largest["file"], largest["line"], largest["place"]) == ("samples/rollout_000000.jsonl", 3, 58)
    assert (tmp_path / "out" / negative["link"]).resolve() == run / "samples" / "rollout_000000.jsonl"
    assert (negative["line"], negative["place"]) == (2, 50)
    assert (largest["before"], largest["after"]) == ("… 1 +↵\n", " = 3")
    compare([run], tmp_path / "out" / "report.html")
    html = (tmp_path / "out" / "report.html").read_text()
    assert "In context: the 3 tokens farthest out" in html and HOSTILE not in html


def test_a_broken_context_is_named(run: Path) -> None:
    write_jsonl(run / "masked_tokens" / "step_000000.jsonl", [{"sign": "+"}])
    with pytest.raises(DataError, match=r"step_000000\.jsonl, line 1: "):
        farthest(read_run(run), run.parent, 1)
