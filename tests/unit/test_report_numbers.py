"""`compare` as data: JSON, CSV and LaTeX from the command line, against the numbers of single runs."""

import csv
import json
import math
import re
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_dppo.analysis.contrasts import MIN_SEEDS, Contrast, contrast, estimate
from megatron_dppo.analysis.report.summary import summary
from megatron_dppo.cli import app
from megatron_dppo.config.schema import Config
from megatron_dppo.run_folder.folder import RunFolder

REWARDS = {  # by preset, then by seed; in another order on each side, and one seed without a partner
    "grpo": {2: 0.31, 0: 0.5, 7: 0.4},
    "dppo_binary_tv": {0: 0.62, 7: 0.47, 5: 0.9, 2: 0.4},
}


def write_run(folder: Path, preset: str, seed: int, reward: float, num_rollouts: int, prompts: str) -> Path:
    """A run whose reward rises to about `reward`, with one evaluation."""
    path = folder / f"{preset}_{seed}"
    tables = {
        "run": {"folder": path, "seed": seed, "num_rollouts": num_rollouts},
        "algorithm": {"preset": preset},
        "data": {"prompts": prompts},
    }
    config = Config.model_validate(tables).model_dump(exclude_none=True, mode="json")
    with RunFolder.open(path, config, resume=False) as opened:
        for n in range(num_rollouts):
            masked = {f"trust_region/masked_fraction_{sign}": 0.01 * seed for sign in ("positive", "negative")}
            opened.write_step(n, n, {"policy/entropy": 0.5, **masked})
            values = {"reward/mean": reward + 0.001 * n, "mismatch/ratio_max": math.inf}
            opened.write_rollout(n, values, num_rollouts=num_rollouts)
        opened.write_evaluation(num_rollouts, {"eval/held_out/avg_at_4": reward / 2})
    return path


def write_runs(folder: Path, num_rollouts: int = 20, other_prompts: str = "p.jsonl") -> list[str]:
    prompts = {"grpo": "p.jsonl", "dppo_binary_tv": other_prompts}
    return [
        str(write_run(folder, preset, seed, reward, num_rollouts, prompts[preset]))
        for preset, of in REWARDS.items()
        for seed, reward in of.items()
    ]


def run_compare(folder: Path, runs: list[str]) -> tuple[dict[str, Any], list[dict[str, str]], str]:
    files = {form: folder / f"new/numbers.{form}" for form in ("json", "csv", "latex")}
    options = [part for form, file in files.items() for part in (f"--{form}", str(file))]
    done = CliRunner().invoke(app, ["compare", *runs, "-o", str(folder / "report.html"), *options])
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    return json.loads(files["json"].read_text()), rows, files["latex"].read_text()


Written = tuple[list[str], dict[str, Any], list[dict[str, str]], str]


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory,
) -> Written:
    folder = tmp_path_factory.mktemp("numbers")
    runs = write_runs(folder)
    return runs, *run_compare(folder, runs)


def test_json_has_the_numbers_of_each_run_and_pairs_equal_seeds(written: Written) -> None:
    runs, content, _, _ = written
    assert content["baseline"] == "grpo" and content["num_rollouts"] == 20
    assert content["why_not_compared"] is None and content["why_undecided"] is None
    assert "algorithm.preset" in content["differing_settings"]
    for line, (preset, of) in zip(content["lines"], REWARDS.items(), strict=True):
        assert line["label"] == preset
        assert {seed: Path(path).name for seed, path in line["runs"].items()} == {
            str(s): f"{preset}_{s}" for s in of
        }
        found = line["numbers"]["reward_last"]
        by_run = {str(seed): summary(Path(line["runs"][str(seed)]))["reward_last"] for seed in of}
        assert found["by_seed"] == by_run and found["num_seeds"] == len(of)
        expected = estimate([v for v in by_run.values() if v is not None])
        assert [found["mean"], found["low"], found["high"]] == [expected.mean, expected.low, expected.high]
    base, other = (line["numbers"] for line in content["lines"])
    assert all(entry["difference"] is None for entry in base.values())
    pairs = [(other["reward_last"]["by_seed"][s], base["reward_last"]["by_seed"][s]) for s in ("0", "7", "2")]
    expected_difference = contrast(*zip(*pairs, strict=True))
    found = other["reward_last"]["difference"]
    assert found["mean"] == expected_difference.mean > 0 and found["num_pairs"] == 3
    assert found["is_decided"] is False and found["seeds_to_decide"] == expected_difference.seeds_to_decide
    assert other["eval/held_out/avg_at_4"]["by_seed"]["5"] == 0.45
    assert other["masked_mean"]["by_seed"] == pytest.approx({"0": 0.0, "7": 0.07, "5": 0.05, "2": 0.02})
    assert "ratio_max" not in other, "it was never finite"
    assert len(runs) == 7 and content["findings"]


def test_csv_equals_json(written: Written) -> None:
    _, content, rows, _ = written
    assert len(rows) == 2 * len(content["labels"])
    entries = {line["label"]: line["numbers"] for line in content["lines"]}
    for row in rows:
        entry = entries[row["line"]][row["number"]]
        assert row["label"] == content["labels"][row["number"]]
        for name in ("mean", "low", "high"):
            assert row[name] == ("" if entry[name] is None else str(entry[name]))
        difference = entry["difference"]
        assert row["difference_mean"] == ("" if difference is None else str(difference["mean"]))
        assert row["difference_is_decided"] == ("" if difference is None else str(difference["is_decided"]))


def test_latex_is_one_table_with_a_column_for_each_line(written: Written) -> None:
    _, content, _, latex = written
    rows = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {2}
    assert rows[0] == r" & grpo & dppo\_binary\_tv \\" and rows[1] == r"seeds & 3 & 4 \\"
    assert latex.count("{") == latex.count("}") and r"\begin{tabular}{lrr}" in latex
    assert not set(re.sub(r"%.*", "", latex)) & set("πμ→−\N{NARROW NO-BREAK SPACE}")
    rewards = [row for row in rows if row.startswith("reward, mean of the last 10 ")]
    found = content["lines"][1]["numbers"]["reward_last"]
    assert f"{found['mean']:.3f} {{\\scriptsize [{found['low']:.3f}, {found['high']:.3f}]}}" in rewards[0]
    assert f"& {found['difference']['mean']:.3f} " in rewards[1] and "^{*}" not in rewards[1]


@pytest.mark.parametrize("reason", ["why_undecided", "why_not_compared"])
def test_runs_that_cannot_be_compared_say_why(reason: str, tmp_path: Path) -> None:
    few, other = (3, "p.jsonl") if reason == "why_undecided" else (20, "q.jsonl")
    content, _, latex = run_compare(tmp_path, write_runs(tmp_path, few, other))
    assert content[reason] in [finding["text"] for finding in content["findings"]]
    differences = [entry["difference"] for entry in content["lines"][1]["numbers"].values()]
    if reason == "why_not_compared":
        assert not any(differences) and "difference" not in latex.partition("begin")[2]
    else:
        assert any(differences) and not any(found and found["is_decided"] for found in differences)


@pytest.mark.parametrize(
    "options",
    [
        ["--json", "{folder}"],
        ["--json", "{folder}/a", "--csv", "{folder}/a"],
        ["--latex", "{folder}/report.html"],
    ],
)
def test_a_place_that_cannot_be_written_is_refused_first(options: list[str], tmp_path: Path) -> None:
    given = [part.format(folder=tmp_path) for part in options]
    out = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "no_run"), "-o", str(out), *given])
    assert done.exit_code == 2 and options[0] in done.output and not out.exists()


@pytest.mark.parametrize("effect", [0.7, 1.1])
def test_so_many_seeds_decide_about_four_times_in_five(effect: float) -> None:
    """Held to the rule itself, on normal differences of the observed size."""
    seeds = Contrast(effect, 0.0, 0.0, effect, 3).seeds_to_decide
    assert seeds is not None and seeds > MIN_SEEDS
    drawn = np.random.default_rng(3).normal(effect, 1.0, size=(120, seeds))
    share = np.mean([contrast(row.tolist(), [0.0] * seeds).is_decided for row in drawn])
    assert 0.7 < share < 0.95


def test_no_number_of_seeds_follows_from_one_pair_or_no_spread() -> None:
    differences = [0.5, 0.6, 0.9]
    found = contrast([1.5, 2.6, 3.9], [1.0, 2.0, 3.0])
    assert found.mean == pytest.approx(mean(differences))
    assert found.effect_size == pytest.approx(mean(differences) / stdev(differences))
    assert contrast([1.0], [0.5]).seeds_to_decide is None
    assert contrast([1.0, 2.0], [0.5, 1.5]).seeds_to_decide is None
    assert contrast([1.0, 2.0], [1.5, 1.5]).seeds_to_decide is None, "the mean difference is 0"
    assert contrast([1.0, 2.1], [0.5, 1.5]).seeds_to_decide == MIN_SEEDS
