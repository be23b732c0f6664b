"""Environments by name, in real worker processes, and those that come with the package."""

import random
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from megatron_dppo.environments import (
    EnvironmentFault,
    EnvironmentPool,
    Observation,
    Response,
    SingleTurn,
    Sudoku,
    Trajectory,
    Turn,
    environment,
    problem_with,
    register,
)
from megatron_dppo.environments.built_in import GemEnvironment, solved_board
from megatron_dppo.environments.pool import Answer, Host
from megatron_dppo.errors import ConfigError, EnvironmentFailedError
from megatron_dppo.types import Prompt
from megatron_dppo.workers.service import decode
from tests.support.refusals import refused
from tests.unit.bad_environments import Told

NAME = "tests.unit.bad_environments:Told"
PROMPT = Prompt("p", "", "test", text="begin")


pytestmark = pytest.mark.usefixtures("importable")


@pytest.fixture
def pool() -> Iterator[EnvironmentPool]:
    with closing(EnvironmentPool(NAME, num_workers=1, timeout_s=300.0, memory_mb=128)) as pool:
        yield pool


def trajectory(*responses: str, id: str = "a", prompt: Prompt = PROMPT) -> Trajectory:
    return Trajectory(id, prompt, tuple(Response(text, "stop") for text in responses))


def said(turn: Turn | EnvironmentFault) -> str | None:
    assert isinstance(turn, Turn), turn
    return turn.observation


def test_conversations_step_independently_of_each_other(pool: EnvironmentPool) -> None:
    question: Any = {"role": "user", "content": "?", "name": "me", "tool_calls": [{"name": "add"}]}
    chat = Prompt("q", "", "test", messages=(question,))
    seed = trajectory().seed
    assert pool.reset([trajectory(), trajectory(prompt=chat)]) == [
        Observation(f"begin {seed}"),
        Observation(messages=(question,)),
    ]
    first = pool.step([trajectory("x"), trajectory("y", id="b")])
    assert [said(turn) for turn in first] == ["x", "y"]
    second = pool.step([trajectory("x", "end"), trajectory("y", "z", id="b")])
    assert [said(turn) for turn in second] == ["x end", "y z"]
    assert [turn.done for turn in second if isinstance(turn, Turn)] == [True, False]
    assert [turn.reward for turn in second if isinstance(turn, Turn)] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("raise", "KeyError: 'lost'"),
        ("hang", "found no reply within 10 s. Correct the environment, or raise data.reward_timeout_s"),
        ("die", "its worker exited with code 3"),
        ("eat", "128 MiB were not enough"),
        ("mumble", "found a NoneType from step; expected a Turn"),
    ],
)
def test_failing_environment_costs_one_conversation(pool: EnvironmentPool, response: str, words: str) -> None:
    if response == "hang":
        pool._timeout_s = 10.0
    before = pool.step([trajectory("x"), trajectory("y", id="b")])
    assert [said(turn) for turn in before] == ["x", "y"]
    fault, other = pool.step([trajectory("x", response), trajectory("y", "z", id="b")])
    assert isinstance(fault, EnvironmentFault) and words in fault.message
    assert said(other) == "y z", "a new worker gets the earlier responses again"


def test_environment_that_fails_at_reset_costs_one_conversation(pool: EnvironmentPool) -> None:
    fault, opening = pool.reset([trajectory(prompt=Prompt("c", "closed", "test", text="?")), trajectory()])
    assert isinstance(fault, EnvironmentFault) and "prompt c: the environment raised" in fault.message
    assert isinstance(opening, Observation)


def test_four_thousand_conversations_continue_without_a_restart() -> None:
    """If there are more, the ones idle for the longest time are replayed from their responses."""
    begun = list[str]()

    class Counting(Told):
        def reset(self, prompt: Prompt, seed: int) -> Observation:
            begun.append(prompt.text or "")
            return super().reset(prompt, seed)

    host = Host(Counting)
    for k in range(5000):
        host.step(trajectory("x", id=f"{k}"))
    assert len(begun) == 5000
    of_place = {k: host.step(trajectory("x", "end", id=f"{k}")).observation for k in (4999, 1000, 800, 0)}
    assert set(of_place.values()) == {"x end"}
    assert len(begun) == 5002, "800 and 0 began again"


@pytest.mark.parametrize(
    ("fields", "is_opening", "is_turn"),
    [
        ({"opening": {"text": "go"}}, True, False),
        ({"turn": {"observation": None, "done": True, "reward": 1.0, "info": {}}}, False, True),
        ({}, False, False),
    ],
)
def test_a_worker_that_sends_the_other_reply_costs_the_sample(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], is_opening: bool, is_turn: bool
) -> None:
    with closing(EnvironmentPool("sudoku", num_workers=1, timeout_s=60.0, memory_mb=0)) as pool:
        monkeypatch.setattr(pool, "ask", lambda trajectories: [decode(fields, Answer)])
        (opening,), (turn,) = pool.reset([]), pool.step([])
    assert isinstance(opening, EnvironmentFault) != is_opening
    assert isinstance(turn, EnvironmentFault) != is_turn


def test_an_observation_of_two_kinds_is_no_reply() -> None:
    with pytest.raises(ValueError, match="either text or messages"):
        decode({"opening": {"text": "go", "messages": []}}, Answer)


def test_environment_that_cannot_be_imported_fails_before_sampling() -> None:
    pool = EnvironmentPool("tests.unit.bad_environments:Absent", num_workers=1, timeout_s=1.0, memory_mb=128)
    with pytest.raises(EnvironmentFailedError, match=r"rollout\.environment: .*'Absent' is not there"):
        pool.start()


def test_names() -> None:
    assert environment("single_turn") is SingleTurn
    assert problem_with("tests.unit.bad_environments:Told") is None
    problem = problem_with("single_turns")
    assert problem is not None and problem.where == "rollout.environment" and "'single_turn'?" in problem.action
    for name in ("no_such_module:Class", "a b:c", "x:"):
        assert problem_with(name) is not None
        with pytest.raises(ConfigError, match=r"rollout\.environment"):
            environment(name)
    with pytest.raises(ConfigError, match="a second registration"):
        register("single_turn")(SingleTurn)


def test_seed_depends_on_the_prompt_only() -> None:
    other = Prompt("other", "", "test", text="begin")
    assert trajectory(id="a").seed == trajectory(id="b").seed != trajectory(prompt=other).seed
    assert 0 <= trajectory().seed < 1 << 31


GEM_TASKS = ("rg:arc_1d", "rg:acre", "game:Sudoku-v0-easy")
BOXED = Prompt("g", "", "test", text="Put your answer within \\boxed{}.")


def gem_pair(task: str) -> tuple[GemEnvironment, Observation]:
    made = environment(f"gem:{task}")()
    assert isinstance(made, GemEnvironment)
    return made, made.reset(BOXED, 3)


def right_answer(made: GemEnvironment, task: str) -> str:
    """What the task itself holds to be right."""
    env: Any = made._env
    if task.startswith("rg:"):
        return str(env.data["answer"])
    row, column = next((r, c) for r in range(4) for c in range(4) if env.board[r][c] == 0)
    return f"{row + 1} {column + 1} {env.full_grid[row][column]}"


@pytest.mark.gem
@pytest.mark.parametrize("task", GEM_TASKS)
def test_gem_tasks_know_right_from_wrong(task: str) -> None:
    made, opening = gem_pair(task)
    assert opening.text is not None and opening.text.startswith("Put your answer within \\boxed{}. ")
    assert gem_pair(task)[1] == opening != made.reset(BOXED, 4)
    made, _ = gem_pair(task)
    right = made.step(f"It is \\boxed{{{right_answer(made, task)}}}.", "stop")
    assert right.reward is not None and right.reward > 0
    assert right.done == task.startswith("rg:")
    if not right.done:
        assert right.observation is not None and "which is correct" in right.observation
        assert "current board layout" in right.observation
    wrong = gem_pair(task)[0].step("I do not know.", "stop")
    assert wrong.done and wrong.reward is not None and wrong.reward <= 0


@pytest.mark.gem
def test_concurrent_gem_tasks_draw_separate_random_numbers() -> None:
    def moves(made: GemEnvironment) -> list[str | None]:
        return [made.step(f"\\boxed{{{move}}}", "stop").observation for move in ("up", "left", "up", "left")]

    task = "game:Game2048-v0-easy"
    alone = moves(gem_pair(task)[0])
    made, other = gem_pair(task)[0], environment(f"gem:{task}")()
    other.reset(BOXED, 9)
    beside = list[str | None]()
    for move in ("up", "left", "up", "left"):
        beside.append(made.step(f"\\boxed{{{move}}}", "stop").observation)
        other.step("\\boxed{down}", "stop")
    assert beside == alone


@pytest.mark.gem
def test_a_gem_task_that_is_not_there() -> None:
    assert problem_with("gem:rg:arc") is None, "its registry is not read to check"
    with pytest.raises(ConfigError, match="'gem:rg:arc_1d'\\?"):
        environment("gem:rg:arc_1")


def test_error_without_gem_explains_the_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gem", None)
    action = (
        "Use Python 3.11: gem-llm" if sys.version_info >= (3, 12) else r"pip install 'megatron_dppo\[gem\]'"
    )
    with pytest.raises(ConfigError, match=action):
        environment("gem:rg:arc_1d")


def test_every_board_is_a_sudoku() -> None:
    boards = {tuple(solved_board(random.Random(seed))) for seed in range(300)}
    assert len(boards) > 50
    for board in boards:
        rows = [board[4 * i : 4 * i + 4] for i in range(4)]
        blocks = [[board[4 * (r + i) + c + j] for i in (0, 1) for j in (0, 1)] for r in (0, 2) for c in (0, 2)]
        for unit in [*rows, *zip(*rows, strict=True), *blocks]:
            assert sorted(unit) == ["1", "2", "3", "4"]


def test_a_sudoku_asks_for_one_cell_after_the_other() -> None:
    game, prompt = Sudoku(), Prompt("s", "2", "test", text="<bos>")
    opening = game.reset(prompt, 5)
    assert opening.text is not None and opening.text.startswith("<bos> ") and opening.text.count("?") == 1
    solution = solved_board(random.Random(5))
    shown = opening.text.removeprefix("<bos> ").replace(" /", "").split()
    asked = shown.index("?")
    assert sum(a != b for a, b in zip(shown, solution, strict=True)) == 2
    first = game.step(f"{solution[asked]} surely", "length")
    assert (first.reward, first.done) == (0.5, False)
    assert first.observation is not None and first.observation.count("?") == 1 and "." not in first.observation
    assert game.step("", "stop") == Turn(None, 0.0, done=True)
    chat = Prompt("s", "2", "test", messages=({"role": "user", "content": "Solve"},))
    messages = Sudoku().reset(chat, 5).messages
    assert messages is not None and messages[-1]["content"] == opening.text.replace("<bos>", "Solve")
    with refused("prompt s", "'9'", "1 to 3"):
        Sudoku().reset(Prompt("s", "9", "test", text="?"), 5)
