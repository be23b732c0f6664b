"""The first page and the guides: links lead somewhere, the configuration is a run, and the commands exist."""

import importlib.util
import json
import math
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dppo.algorithms import PRESETS, preset
from megatron_dppo.algorithms.presets import PAPER, overrides_in
from megatron_dppo.checks import check, remarks
from megatron_dppo.cli import app
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang.options import shipped_options
from megatron_dppo.engines.sglang.protocol import NEWEST
from megatron_dppo.metrics.alarms import RULES
from tests.support.plan_models import QWEN3_30B

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
OTHERS = ("examples/guides/*.md", "docs/reference/*.md", "megatron_dppo/**/*.md")
PAGES = [README, ROOT / "examples/README.md", *(page for files in OTHERS for page in sorted(ROOT.glob(files)))]


def guide(name: str) -> str:
    return (ROOT / "examples" / "guides" / name).read_text()


def section(title: str) -> str:
    return README.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_it_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, link


def test_each_guide_is_listed() -> None:
    listed = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "examples/guides/README.md").read_text()))
    assert listed == {page.name for page in (ROOT / "examples/guides").glob("*.md")} - {"README.md"}


def test_the_configuration_is_a_run_but_for_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (toml,) = re.findall(r"```toml\n(.*?)```", section("A run"), re.DOTALL)
    assert len(toml.splitlines()) <= 20
    monkeypatch.chdir(tmp_path)
    config = Config.model_validate(tomllib.loads(toml))
    problems = check(config, 16)
    assert {problem.where for problem in problems} == {"data.prompts", "model.load"}
    assert remarks(config) == []  # nothing that the paper advises against


def test_the_configuration_fits_as_its_command_plans_it(tmp_path: Path) -> None:
    text = section("A run")
    (toml,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (options,) = re.findall(r"^megatron-dppo plan run.toml ([^#\n]+)", text, re.MULTILINE)
    file, model = tmp_path / "run.toml", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN3_30B))
    file.write_text(toml)
    printed = CliRunner().invoke(app, ["plan", str(file), *options.split(), "--set", f"model.load={model}"])
    assert printed.exit_code == 0, printed.output
    assert printed.output.startswith("Fits"), printed.output


def test_each_command_has_the_options_that_are_shown() -> None:
    text = section("A run")
    (block,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    commands = re.findall(r"`megatron-dppo ([^`]+)`", text)
    commands += re.findall(r"^(?:\S.* )?megatron[-_]dppo (.+?)(?: &)?$", block, re.MULTILINE)
    shown = [shlex.split(command, comments=True) for command in commands]
    named = {words[0] for words in shown}
    assert named >= {"check", "plan", "serve", "train", "evaluate", "compare", "what-if", "convert", "quantize"}
    for words in shown:
        path = words[:2] if words[0] in {"convert", "prepare-data"} else words[:1]
        printed = CliRunner().invoke(app, [*path, "--help"]).output
        options = {word for word in words if word.startswith("-")}
        assert options <= set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", printed)), words


def require_setting(key: str, value: str | None) -> None:
    """Resolve a setting, and a value shown of it, in the schema."""
    if key.startswith("sglang."):
        assert key == "sglang.python" or key.removeprefix("sglang.") in shipped_options(NEWEST)
        return
    *path, field = key.split(".")
    section: Any = Config
    for name in path:
        section = section.model_fields[name].annotation
    assert field in section.model_fields, key
    if value:
        given = tomllib.loads(f"value = {value}")["value"]
        section.__pydantic_validator__.validate_assignment(section.model_construct(), field, given)


SETTING = r"`((?:[a-z]+\.)+[a-z_]+)(?: = ([^`]+))?`"


PORTING = guide("from_verl_or_slime.md")


def rows_of_the_porting_guide() -> list[list[str]]:
    lines = [line for line in PORTING.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_guide_from_other_frameworks_names_settings_that_exist() -> None:
    keys = re.findall(SETTING, " ".join(row[-1] for row in rows_of_the_porting_guide()))
    assert len(keys) > 60
    for key, value in keys:
        require_setting(key, value)


def test_the_guide_from_other_frameworks_leaves_no_cell_empty() -> None:
    for row in rows_of_the_porting_guide():
        assert all(row[1:]), row
    masks = {row[0]: row[1:] for row in rows_of_the_porting_guide() if len(row) == 6}
    assert len(masks) > 20
    for label in ("threshold for A < 0", "threshold for A > 0", "their defaults", "its default"):
        assert "-" not in masks[label], label


def test_the_guide_from_other_frameworks_has_the_defaults_of_the_presets() -> None:
    (defaults,) = (row[-1] for row in rows_of_the_porting_guide() if row[0] == "their defaults")
    shown = dict(re.findall(r"([A-Z][\w-]+) ([\d.]+)", defaults))
    assert len(shown) == 4
    for name, delta in shown.items():
        objective = PRESETS["dppo_" + name.lower().replace("top-k", "topk").replace("-", "_")]
        assert objective.delta == float(delta)
        assert objective.ratio_cap == math.inf


def test_the_guide_from_other_frameworks_names_presets_with_their_fields() -> None:
    for row in rows_of_the_porting_guide():
        settings = re.findall(r"`algorithm\.(\w+)(?: = ([^`]+))?`", row[-1])
        names = [json.loads(value) for field, value in settings if field == "preset"]
        for name in names:
            usable = {*PRESETS[name].fields_in_use, "preset"}
            assert {field for field, _ in settings} <= usable, row
    named = set(
        re.findall(
            r'`(?:algorithm\.preset = )?"(\w+)"`', " ".join(row[-1] for row in rows_of_the_porting_guide())
        )
    )
    assert named >= {name for name in PAPER if name.startswith(("dppo", "relax", "minirl"))}


def test_the_guide_from_other_frameworks_shows_configs_that_are_valid() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", PORTING, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        algorithm = Config.model_validate(tomllib.loads(block)).algorithm
        objective = preset(algorithm.preset, **overrides_in(algorithm.model_dump()))
        assert objective.anchor == "rollout" and objective.ratio_cap == math.inf


def test_the_guide_of_troubles_names_what_there_is() -> None:
    """Its settings, metrics, messages and alarms are those of the package."""
    text, package = guide("when_it_goes_wrong.md"), ROOT / "megatron_dppo"
    sources = " ".join(path.read_text() for path in package.rglob("*.py"))
    messages = re.sub(r'"\s+f?"', "", sources)
    settings = [(key, value) for key, value in re.findall(SETTING, text) if not key.endswith((".toml", ".log"))]
    assert len(settings) > 20
    for key, value in settings:
        require_setting(key, value)
    for name in re.findall(r"`(?:[a-z]+)/([a-z_0-9]+)(?:_<reason>)?`", text):
        assert name.removeprefix("dropped_") in sources, name  # one for each reason
    for words in re.findall(r'(?<!= )"([a-zA-Z][^"]+)"', text):
        assert words in messages or words == "roll_back", words
    for alarm in re.findall(r"alarm `(\w+)`", text):
        assert alarm in RULES


def test_its_figures_are_the_quickstarts() -> None:
    rows = {
        cells[0]: cells[1:]
        for line in (ROOT / "examples/quickstart/README.md").read_text().splitlines()
        if line.startswith("| ") and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 4
    }
    for row in ("k3 KL, mean over rollouts", "reward, mean of the last 10"):
        pairs = ", ".join(" to ".join(cell.split(" / ")) for cell in rows[row])
        assert pairs in section("Results"), row


def test_it_says_what_the_quickstart_prints() -> None:
    spec = importlib.util.spec_from_file_location("quickstart_run", ROOT / "examples/quickstart/run.py")
    assert spec is not None and spec.loader is not None
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    text = (ROOT / "examples/quickstart/README.md").read_text()
    rows = {"reward_first": "reward of rollout 1", "reward_last": "reward, mean of the last 10"}
    pairs = {
        key: re.findall(rf"^\| {row} \| (\S+) / (\S+) \|", text, re.MULTILINE)[0] for key, row in rows.items()
    }
    (fall,) = re.findall(r"live -> replayed \| -\d+ % / (-\d+) % \|", text)
    results = {
        name: {key: float(pair[place]) for key, pair in pairs.items()}
        | {"paired_kl_k3_change": int(fall) / 100}
        for place, name in enumerate(("measure", "replay"))
    }
    found = quickstart.closing(results).partition(". One seed")[0].removeprefix("Found: ")
    assert f'"{found}"' in README.read_text().replace("\n", " ")
