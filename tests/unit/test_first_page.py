"""The first page and the guides name what exists: files, settings and their values, commands and options."""

import json
import math
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from megatron_dppo.algorithms import PRESETS, preset
from megatron_dppo.algorithms.presets import overrides_in
from megatron_dppo.checks import check, remarks
from megatron_dppo.cli import app
from megatron_dppo.config.markers import sections_in
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang.options import shipped_options
from megatron_dppo.engines.sglang.protocol import NEWEST
from megatron_dppo.metrics.alarms import RULES
from tests.support.plan_models import QWEN3_30B

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "examples" / "guides"
README = ROOT / "README.md"
PAGES = [README, ROOT / "examples" / "README.md", *sorted(GUIDES.glob("*.md"))]
SETTING = r"`((?:[a-z]+\.)+[a-z_]+)(?: = ([^`]+))?`"
of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@of_each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, link


def require_setting(key: str, value: str | None) -> None:
    """Resolve a setting, and a value shown of it, in the schema."""
    if key.startswith("sglang."):
        assert key == "sglang.python" or key.removeprefix("sglang.") in shipped_options(NEWEST)
        return
    *path, field = key.split(".")
    sections: list[Any] = [Config]
    for name in path:
        sections = [
            inner
            for section in sections
            if name in section.model_fields
            for inner in sections_in(section.model_fields[name].annotation)
        ]
    sections = [each for each in sections if field in each.model_fields]
    assert sections, key
    if value:
        given = tomllib.loads(f"value = {value}")["value"]
        assert any(takes(section, field, given) for section in sections), (key, value)


def takes(section: Any, field: str, value: Any) -> bool:
    """Whether a setting of a section may have a value."""
    try:
        section.__pydantic_validator__.validate_assignment(section.model_construct(), field, value)
    except ValidationError:
        return False
    return True


@of_each_page
def test_settings_exist_with_their_values(page: Path) -> None:
    """In tables that compare frameworks, the last column has ours."""
    text = page.read_text()
    if "verl" in page.stem:
        text = re.sub(r"^\| .*\| (?=.+\|$)", "", text, flags=re.MULTILINE)
    for key, value in re.findall(SETTING, text):
        section, _, name = key.partition(".")
        if section in Config.model_fields.keys() - {"megatron"} and name not in {"toml", "log", "jsonl"}:
            require_setting(key, value)


@of_each_page
def test_commands_have_their_options(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    commands = re.findall(r"`megatron-dppo ([^`]+)`", text)
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        commands += re.findall(r"^(?:\S.* )?megatron[-_]dppo (.+?)(?: &)?$", block, re.MULTILINE)
    for command in commands:
        words = shlex.split(command, comments=True)
        path = words[:2] if words[0] in {"convert", "prepare-data"} else words[:1]
        printed = CliRunner().invoke(app, [*path, "--help"]).output
        options = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert options <= set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", printed)), words


def test_the_configuration_is_a_run_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = README.read_text().partition("\n## A run\n")[2].partition("\n## ")[0]
    (toml,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (options,) = re.findall(r"^megatron-dppo plan run.toml ([^#\n]+)", text, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    config = Config.model_validate(tomllib.loads(toml))
    assert {problem.where for problem in check(config, 16)} == {"data.prompts", "model.load"}
    assert remarks(config) == []  # nothing that the paper advises against
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN3_30B))
    Path("run.toml").write_text(toml)
    printed = CliRunner().invoke(app, ["plan", "run.toml", *options.split(), "--set", f"model.load={model}"])
    assert printed.exit_code == 0, printed.output


def test_the_guide_from_other_frameworks_has_the_presets_fields_and_defaults() -> None:
    text = (GUIDES / "from_verl_or_slime.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    for row in rows:
        settings = re.findall(r"`algorithm\.(\w+)(?: = ([^`]+))?`", row[-1])
        for name in [json.loads(value) for field, value in settings if field == "preset"]:
            assert {field for field, _ in settings} <= {*PRESETS[name].fields_in_use, "preset"}, row
    (defaults,) = (row[-1] for row in rows if row[0] == "their defaults")
    shown = dict(re.findall(r"([A-Z][\w-]+) ([\d.]+)", defaults))
    assert len(shown) == 4
    for name, delta in shown.items():
        objective = PRESETS["dppo_" + name.lower().replace("top-k", "topk").replace("-", "_")]
        assert (objective.delta, objective.ratio_cap) == (float(delta), math.inf)
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        algorithm = Config.model_validate(tomllib.loads(block)).algorithm
        objective = preset(algorithm.preset, **overrides_in(algorithm.model_dump()))
        assert objective.anchor == "rollout" and objective.ratio_cap == math.inf


def test_the_guide_of_troubles_names_metrics_and_alarms_that_exist() -> None:
    text = (GUIDES / "when_it_goes_wrong.md").read_text()
    sources = " ".join(path.read_text() for path in (ROOT / "megatron_dppo").rglob("*.py"))
    for name in re.findall(r"`(?:[a-z]+)/([a-z_0-9]+)(?:_<reason>)?`", text):
        assert name.removeprefix("dropped_") in sources, name  # one for each reason
    assert set(re.findall(r"alarm `(\w+)`", text)) <= RULES.keys()
