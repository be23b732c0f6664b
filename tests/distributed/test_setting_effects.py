"""Every setting has an effect that a test asserts: a pair of tiny runs here, or a test that is named."""

import ast
from pathlib import Path

import pytest

from megatron_dppo.config.resuming import EFFECTS as SETTINGS
from tests.distributed.setting_effects import ANY, ASSERTED_BY, EFFECTS
from tests.distributed.setting_runs import Effect, Left, make_task, play_all
from tests.support.ranks import run_ranks

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Left]:
    """What each run left, by its settings; rows that share a run share it."""
    runs = {str(settings): settings for effect in EFFECTS for settings in map(effect.settings, (0, 1))}
    task = make_task(tmp_path_factory.mktemp("effects"))
    return dict(zip(runs, run_ranks(play_all, 1, task, task, list(runs.values()))[0], strict=True))


@pytest.mark.parametrize("effect", [pytest.param(effect, id=effect.id) for effect in EFFECTS])
def test_a_setting_changes_what_it_should_and_nothing_before_it(
    played: dict[str, Left], effect: Effect
) -> None:
    first, second = (played[str(effect.settings(number))] for number in (0, 1))
    assert first.rows, first.error
    names = [*first.phases, *(name for name in second.phases if name not in first.phases)]
    differing = [name for name in names if first.phases.get(name) != second.phases.get(name)]
    if effect.first != ANY:
        assert next(iter(differing), None) == effect.first
    assert effect.holds(first, second), (first.error, second.error)


def test_every_setting_has_a_row() -> None:
    rows = {effect.setting for effect in EFFECTS}
    assert not SETTINGS.keys() - rows - ASSERTED_BY.keys(), "settings without an effect that is asserted"
    assert rows | ASSERTED_BY.keys() <= SETTINGS.keys(), "rows of settings that are gone"
    assert not rows & ASSERTED_BY.keys()


@pytest.mark.parametrize("setting", ASSERTED_BY)
def test_the_named_tests_exist_and_set_what_they_are_named_for(setting: str) -> None:
    file, name, text = ASSERTED_BY[setting]
    source = (TESTS / file).read_text()
    functions = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    assert name in functions
    assert text in source
