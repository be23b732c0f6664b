"""Guides that are run as written; each one's files and output are as it claims."""

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_dppo.cli import app
from megatron_dppo.metrics.alarms import RULES
from tests.faults.campaign import compare_rows
from tests.recipes.readme_examples import examples, run_examples
from tests.recipes.walking import ROOT, Walk, walk
from tests.support.records import lines_of, metrics_of
from tests.unit.test_first_page import SETTING, require_setting

GUIDES = ROOT / "examples" / "guides"
PAGES = [
    "asynchronous",
    "cluster",
    "data_and_reward",
    "environment_and_tools",
    "port_slime",
    "port_verl",
    "r3_or_not",
    "reading_the_report",
    "rule_to_table",
    "train_your_agent",
    "trust_region",
    "what_the_paper_found",
]
FILES = (".py", ".toml", ".md", ".json", ".jsonl", ".html", ".log", ".sh", ".csv", ".tex")


def text_of(page: str) -> str:
    return (GUIDES / f"{page}.md").read_text()


def follow(page: str, folder: Path, *, edits_package: bool = False) -> Walk:
    return walk(text_of(page), folder, edits_package=edits_package)


def require_metrics(page: str, run: Path) -> None:
    """Each metric that the page names is in the run's rows, or is one that only other runs have."""
    found = {key for kind in ("rollout", "step") for row in metrics_of(run, kind) for key in row}
    documented = (ROOT / "docs/reference/metrics.md").read_text()
    areas = "|".join({key.partition("/")[0] for key in found if "/" in key})
    for area, name in re.findall(rf"`({areas})/([a-z_0-9]+)`", text_of(page)):
        assert f"{area}/{name}" in found or name in documented or "dropped_" in name, name


def test_data_and_reward(tmp_path: Path) -> None:
    walked = follow("data_and_reward", tmp_path)
    counts = json.loads((walked.folder / "prompts.counts.json").read_text())["counts"]
    assert (counts["read"], counts["without an answer"], counts["duplicates"]) == (41, 1, 10)
    assert "30 prompts" in walked.printed
    assert "no problems found" in walked.printed
    run = walked.folder / "runs" / "sums"
    steps, rollouts = metrics_of(run, "step"), metrics_of(run, "rollout")
    assert len(rollouts) == 2
    assert all(row["optimizer/grad_norm"] > 0 for row in steps)
    assert all(0 < row["reward/mean"] < 0.5 and row["reward/is_right_mean"] == 0 for row in rollouts)
    require_metrics("data_and_reward", run)


def test_environment_and_tools(tmp_path: Path) -> None:
    walked = follow("environment_and_tools", tmp_path)
    run = walked.folder / "runs" / "scales"
    rollouts = metrics_of(run, "rollout")
    assert len(rollouts) == 2
    assert all(row["rollout/num_turns_mean"] > 2 and row["reward/is_call_mean"] > 0 for row in rollouts)
    assert all(row["rollout/dropped_samples"] == 0 for row in rollouts)
    assert all(row["optimizer/grad_norm"] > 0 for row in metrics_of(run, "step"))
    require_metrics("environment_and_tools", run)


def test_train_your_agent(tmp_path: Path) -> None:
    walked = follow("train_your_agent", tmp_path)
    assert "no problems found" in walked.printed
    run = walked.folder / "runs" / "lookup"
    rollouts = metrics_of(run, "rollout")
    assert len(rollouts) == 50
    for row in rollouts:
        assert row["agents/forks"] == row["agents/untrained_tokens"] == row["rollout/dropped_samples"] == 0
        assert row["agents/calls"] == pytest.approx(16 * row["rollout/num_turns_mean"])
    for row in lines_of(run / "samples" / "rollout_000049.jsonl"):
        kinds = [("first", None), ("continues", 0)]
        assert [(call["kind"], call["parent"]) for call in row["calls"]] == kinds[: len(row["calls"])]
    rewards = [row["reward/mean"] for row in rollouts]
    means = [sum(some) / 5 for some in (rewards[:5], rewards[-5:])]
    said = re.search(r"from ([\d.]+) in the first five rollouts to ([\d.]+)", text_of("train_your_agent"))
    assert said is not None and means == pytest.approx([float(each) for each in said.groups()], abs=0.15)
    assert means[1] > 0.75, "the policy reads the tool's result"
    require_metrics("train_your_agent", run)


def launch_options(page: str) -> set[str]:
    """Options of the other framework's launch, as the page shows it."""
    (launch,) = re.findall(r"^```sh\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)
    words = shlex.split(launch.replace("\\\n", " "))
    return {
        word.partition("=")[0] for word in words if word.startswith("--") or re.match(r"[a-z_]+\.[\w.]+=", word)
    }


@pytest.mark.parametrize("page", ["port_verl", "port_slime"])
def test_every_option_of_the_launch_has_a_row(page: str) -> None:
    rows = re.findall(r"^\| (`[^|]*) \| ", text_of(page), re.MULTILINE)
    named = re.findall(r"`([^`=]+)[^`]*`", " ".join(rows))
    assert sorted(named) == sorted(set(named)), "one row for each"
    assert set(named) == launch_options(page) and len(named) > 25


def test_port_verl(tmp_path: Path) -> None:
    walked = follow("port_verl", tmp_path)
    assert "no problems found" in walked.printed and "8 prompts" in walked.printed
    run = walked.folder / "runs" / "gsm8k"
    rollouts, evaluations = metrics_of(run, "rollout"), metrics_of(run, "evaluation")
    assert len(rollouts) == 2 and all(row["rollout/dropped_samples"] == 0 for row in rollouts)
    for row in rollouts:
        assert 0 < row["reward/mean"] < 1 and 0 < row["reward/has_answer_mean"] < 1
    assert any(row["optimizer/grad_norm"] > 0 for row in metrics_of(run, "step"))
    assert any("eval/gsm8k/avg_at_1" in row for row in (*evaluations, *rollouts))
    require_metrics("port_verl", run)


def test_port_slime(tmp_path: Path) -> None:
    walked = follow("port_slime", tmp_path)
    assert "no problems found" in walked.printed
    means: list[list[float]] = []
    for name in ("sums", "group"):
        run = walked.folder / "runs" / name
        rollouts = metrics_of(run, "rollout")
        assert len(rollouts) == 2 and all(row["rollout/dropped_samples"] == 0 for row in rollouts)
        assert any(row["optimizer/grad_norm"] > 0 for row in metrics_of(run, "step"))
        means.append([row["reward/mean"] for row in rollouts])
    assert 0 < means[0][0] < means[1][0] <= means[0][0] + 0.1, "the same responses, and a bonus in each group"
    require_metrics("port_slime", walked.folder / "runs" / "sums")


ALONE = """
```bash
megatron-dppo train base.toml fades_out.toml --set run.seed=1 --set run.folder=alone
```
"""


def test_rule_to_table(tmp_path: Path) -> None:
    """A grid's second call trains new runs only, its runs equal `train`'s, and the custom rule is plotted."""
    walked = walk(text_of("rule_to_table") + ALONE, tmp_path)
    runs = walked.folder / "runs"
    assert "3 of 3 runs" in walked.printed and "9 of 9 runs" in walked.printed
    written: dict[int, list[float]] = {0: [], 1: []}
    for name, seed in itertools.product(("grpo", "dppo", "fades_out"), range(3)):
        run = runs / name / f"seed_{seed}"
        assert len(metrics_of(run, "rollout")) == 2
        assert f"seed = {seed}\n" in (run / "config.toml").read_text()
        written[min(seed, 1)].append((run / "metrics.jsonl").stat().st_mtime)
    assert max(written[0]) < min(written[1]), "the first runs are kept"
    assert compare_rows(walked.folder / "alone", runs / "fades_out" / "seed_1") == (0, 0)
    numbers = json.loads((runs / "numbers.json").read_text())
    lines = numbers["lines"]
    assert [list(line["runs"]) for line in lines] == [["0", "1", "2"]] * 3
    assert numbers["baseline"] == lines[0]["label"] == "grpo_clip_higher"
    assert lines[1]["numbers"]["reward_last"]["num_seeds"] == 3
    whole, table = ((folder / "table.tex").read_text() for folder in (runs, walked.folder))
    assert "toprule" in table and "fades" in table and "grpo" in whole and "grpo" not in table
    drawn = [path.read_text() for path in (walked.folder / "figures").glob("*.svg")]
    assert drawn and any("fades_out" in each for each in drawn), "the own rule is in a figure"


def test_trust_region(tmp_path: Path) -> None:
    walked = follow("trust_region", tmp_path, edits_package=True)
    assert "found 0.7, which never acts; expected above 0 and below 0.693147" in walked.printed
    run = walked.folder / "runs" / "js"
    steps = metrics_of(run, "step")
    assert len(steps) == 8
    assert any(row["trust_region/masked_fraction_positive"] > 0 for row in steps)
    assert all("shadow/dppo_binary_tv/masked_fraction" in row for row in steps)
    what_if = (walked.folder / "what_if" / "what_if.json").read_text()
    assert "dppo_binary_js" in what_if
    assert (walked.folder / "mismatch" / "mismatch.json").is_file()  # of a run that exists
    scale = {
        line.split()[0]: json.loads(line.partition(" ")[2])
        for line in walked.printed.splitlines()
        if line.startswith("binary_")
    }
    assert scale["binary_tv"] == pytest.approx([0.15] * 3, rel=0.01)
    shown = {"binary_js": (0.012, 0.052), "binary_kl": (0.046, 0.61)}
    for name, extremes in shown.items():
        assert (min(scale[name]), max(scale[name])) == pytest.approx(extremes, rel=0.05)
    require_metrics("trust_region", run)


def test_r3_or_not(tmp_path: Path) -> None:
    walked = follow("r3_or_not", tmp_path)
    assert {path.name for path in (walked.folder / "mismatch").iterdir()} >= {"mismatch.json", "mismatch.html"}
    for seed in range(3):
        modes = (walked.folder / "runs/r3" / f"routing_replay_{mode}" for mode in ("measure", "replay"))
        measured, replayed = (mode / f"seed_{seed}" for mode in modes)
        first = [
            json.loads((run / "samples/rollout_000000.jsonl").read_text().splitlines()[0])
            for run in (measured, replayed)
        ]
        assert first[0]["response"] == first[1]["response"]
        require_metrics("r3_or_not", replayed)
    assert (walked.folder / "runs/r3/report.html").exists()


def test_parts_of_the_report_exist() -> None:
    folder = ROOT / "megatron_dppo" / "analysis" / "report"
    sources = " ".join(path.read_text() for path in (*folder.glob("*.py"), *folder.glob("templates/*.j2")))
    rows = [line for line in text_of("reading_the_report").splitlines() if line.startswith("|")]
    parts = re.findall(r"\*\*(.+?)\*\*", " ".join(rows))
    assert len(parts) > 10
    for part in parts:
        title = part.replace("\\|", "|")
        assert f'"{title}"' in sources or f"<h2>{title}</h2>" in sources, title


def test_documented_alarms_equal_the_rules() -> None:
    named = re.findall(r"^\| `(\w+)` \|", text_of("reading_the_report"), re.MULTILINE)
    assert named == [*RULES, "not_finite"]


@pytest.mark.parametrize("page", PAGES)
def test_settings_exist(page: str) -> None:
    own = re.sub(r"^\| `[^|]*\|", "|", text_of(page), flags=re.MULTILINE) if "port" in page else text_of(page)
    own = re.sub(r"`(reward\.|custom_reward)[^`]*`", "", own)  # verl's
    settings = [pair for pair in re.findall(SETTING, own) if not pair[0].endswith(FILES)]
    assert settings
    for key, value in settings:
        require_setting(key, value)


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_the_options_that_are_shown(page: str) -> None:
    text = text_of(page).replace("\\\n", " ")
    commands = re.findall(r"megatron[-_]dppo ([a-z][^`\n|\"]*)", text)
    for command in commands:
        words = shlex.split(command, comments=True)
        path = words[:2] if words[0] in {"convert", "prepare-data"} else words[:1]
        options = {word for word in words if word.startswith("-")}
        shown = CliRunner().invoke(app, [*path, "--help"]).output
        assert options <= set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", shown)), command


def test_costs_of_replay_equal_the_experiments() -> None:
    text = text_of("r3_or_not")
    for experiment in ("moe_base", "moe_base_r3"):
        readme = (ROOT / "examples" / experiment / "README.md").read_text().replace("\n", " ")
        (gib,) = re.findall(r"at the peak of a GPU, (\d+) GiB of a host's memory", readme)
        assert f"{gib} GiB" in text


def test_the_examples_of_the_readmes_run(tmp_path: Path) -> None:
    statuses, errors = run_examples(tmp_path)
    assert len(statuses) >= 17
    assert statuses == dict.fromkeys(examples(), 0), errors
