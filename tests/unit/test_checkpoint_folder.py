"""Checkpoints as folders: what is torn is found, what may go is known, and nothing half is ever seen."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.checkpoints import checkpoint_folder as folders
from megatron_dppo.checkpoints.checkpoint_folder import Kept, Retention
from megatron_dppo.errors import CheckpointError
from tests.support.processes import wait_until


def make(folder: Path, step: int) -> Path:
    """A complete checkpoint of small files."""
    unfinished = folder / f".{folders.name_of(step)}.1.unfinished"
    for name in ("megatron/__0_0.distcp", "rng/rank_00000.safetensors", folders.STATE):
        (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / name).write_text(f"{name} of {step}")
    files = [file for file in unfinished.rglob("*") if file.is_file()]
    folders.write_sums(unfinished, folders.sums_of(files, unfinished))
    folders.publish(unfinished, folder / folders.name_of(step))
    return folder / folders.name_of(step)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)


def test_a_published_checkpoint_is_whole_and_latest(tmp_path: Path) -> None:
    for step in (4, 12, 100_000_000):
        assert folders.faults(make(tmp_path, step)) == []
    assert [path.name for path in folders.complete(tmp_path)] == [
        "step_00000004",
        "step_00000012",
        "step_100000000",
    ]
    assert (tmp_path / "latest").read_text() == "step_100000000\n"
    assert folders.leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda c: truncate(c / "megatron/__0_0.distcp"), "distcp does not match its checksum"),
        (lambda c: flip_a_bit(c / "rng/rank_00000.safetensors"), "does not match"),
        (lambda c: (c / folders.STATE).unlink(), "state.json is missing"),
        (lambda c: (c / folders.SUMS).unlink(), "SHA256SUMS cannot be read"),
        (lambda c: (c / folders.SUMS).write_bytes(b"\xff\n"), "SHA256SUMS cannot be read"),
        (lambda c: (c / folders.SUMS).write_text(""), "SHA256SUMS is torn"),
        (lambda c: (c / "extra").write_text("x"), "extra has no checksum"),
    ],
)
def test_every_kind_of_tear_is_found(tmp_path: Path, damage: Callable[[Path], object], words: str) -> None:
    checkpoint = make(tmp_path, 1)
    damage(checkpoint)
    assert any(words in fault for fault in folders.faults(checkpoint))


def test_ranks_together_hash_every_file_once(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 1)
    names = ("megatron/__0_0.distcp", "rng/rank_00000.safetensors", folders.STATE)
    for name in names:
        flip_a_bit(checkpoint / name)
    found = [folders.faults(checkpoint, (rank, 2)) for rank in range(2)]
    assert sorted(len(faults) for faults in found) == [1, 2]
    assert sorted(next(n for n in names if n in fault) for faults in found for fault in faults) == sorted(names)


def test_the_sums_are_those_of_the_command_line_tool(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 1)
    assert os.system(f"cd {checkpoint} && sha256sum --quiet -c {folders.SUMS}") == 0


def test_candidates_begin_at_latest_and_go_back(tmp_path: Path) -> None:
    paths = [make(tmp_path, step) for step in (1, 2, 3)]
    assert folders.candidates(tmp_path) == paths[::-1]
    (tmp_path / "latest").write_text("step_00000002")
    assert folders.candidates(tmp_path) == [paths[1], paths[0]]
    (tmp_path / "latest").write_bytes(b"\xff\x00 torn")
    assert folders.candidates(tmp_path) == paths[::-1]
    (tmp_path / "latest").unlink()
    assert folders.candidates(tmp_path) == paths[::-1]
    assert folders.candidates(tmp_path / "nowhere") == []


def test_a_torn_checkpoint_is_set_aside_and_never_a_candidate(tmp_path: Path) -> None:
    make(tmp_path, 1)
    assert folders.set_aside(make(tmp_path, 2), "torn").name == "step_00000002.torn"
    assert folders.set_aside(make(tmp_path, 2), "torn").name == "step_00000002.torn2"
    assert [path.name for path in folders.candidates(tmp_path)] == ["step_00000001"]


def test_a_step_saved_again_replaces_the_earlier_one(tmp_path: Path) -> None:
    (make(tmp_path, 1) / "old").write_text("")
    again = make(tmp_path, 1)
    assert not (again / "old").exists()
    assert [path.name.split(".")[2] for path in folders.leftovers(tmp_path)] == ["replaced"]


@pytest.mark.parametrize("num_renames", range(4))
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("earlier", [(), (3,)])
def test_a_kill_while_a_step_is_replaced_costs_neither_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_renames: int, is_whole: bool, earlier: tuple[int, ...]
) -> None:
    """Whichever renames were made, the next start resumes from the step; `check` sees it before that."""
    for step in (*earlier, 7):
        content = {"state": {"rollout": step}, "prompts_digest": "", "config": ""}
        checkpoint = make(tmp_path, step)
        (checkpoint / folders.STATE).write_text(json.dumps(content))
        folders.write_sums(checkpoint, folders.sums_of(sorted(checkpoint.rglob("*.*")), checkpoint))
    unfinished = tmp_path / ".step_00000007.9.unfinished"
    shutil.copytree(checkpoint, unfinished)
    (unfinished / folders.STATE).write_text(json.dumps(content | {"config": "new"}))
    folders.write_sums(unfinished, folders.sums_of(sorted(unfinished.rglob("*.*")), unfinished))
    left = [num_renames]
    for name in ("rename", "replace"):
        renamed = getattr(Path, name)

        def one_less(path: Path, target: Path, renamed: Any = renamed) -> Path:
            if left[0] == 0:
                raise SystemExit
            left[0] -= 1
            return renamed(path, target)

        monkeypatch.setattr(Path, name, one_less)
    with contextlib.suppress(SystemExit):
        folders.publish(unfinished, checkpoint)
    monkeypatch.undo()
    if not is_whole and unfinished.exists():
        truncate(unfinished / folders.STATE)
    saved = folders.saved_run(tmp_path)
    assert saved is not None and saved.num_rollouts == 7
    assert folders.recover(tmp_path) == (checkpoint if num_renames == 1 else None)
    (newest, *others) = folders.candidates(tmp_path)
    assert (newest.name, len(others), folders.faults(newest)) == ("step_00000007", len(earlier), [])
    is_new = num_renames > 1 or (num_renames == 1 and is_whole)
    assert json.loads((newest / folders.STATE).read_text())["config"] == "new" * is_new
    assert folders.recover(tmp_path) is None


def test_a_replaced_copy_that_is_being_deleted_is_not_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make(tmp_path, 1)
    folders.hide(checkpoint, "replaced")
    monkeypatch.setattr(folders.shutil, "rmtree", lambda *_, **__: None)  # killed before anything is gone
    folders.delete(folders.leftovers(tmp_path))
    assert folders.recover(tmp_path) is None and len(folders.leftovers(tmp_path)) == 1


def test_deleted_checkpoints_leave_sight_at_once(tmp_path: Path) -> None:
    paths = [make(tmp_path, step) for step in (1, 2)]
    unfinished = tmp_path / ".step_00000003.9.unfinished"
    shutil.copytree(paths[0], unfinished)
    folders.delete([paths[0], *folders.leftovers(tmp_path)])
    assert folders.complete(tmp_path) == [paths[1]]
    wait_until(lambda: not folders.leftovers(tmp_path), 120)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000002"]


SCORES = [0.1, 0.9, None, 0.3, 0.2]


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(0, 0, 0, True), [0, 1, 2, 3, 4]),
        (Retention(2, 0, 0, True), [3, 4]),
        (Retention(1, 20, 0, True), [1, 3, 4]),
        (Retention(1, 0, 1, True), [1, 4]),
        (Retention(1, 0, 2, False), [0, 4]),
        (Retention(1, 0, 9, True), [0, 1, 3, 4]),
        (Retention(9, 0, 0, True), [0, 1, 2, 3, 4]),
    ],
)
def test_retention_rules_add_up(retention: Retention, kept: list[int]) -> None:
    checkpoints = [Kept(Path(str(i)), 10 * (i + 1), score) for i, score in enumerate(SCORES)]
    deleted = retention.choose_deleted(checkpoints)
    assert [i for i in range(5) if Path(str(i)) not in deleted] == kept


@pytest.mark.parametrize(
    ("scores", "highest_is_best"), [([-0.2, 0.0, -0.1, -0.3], True), ([0.2, 0.0, 0.1], False)]
)
def test_a_score_of_0_is_a_score(scores: list[float], highest_is_best: bool) -> None:
    checkpoints = [Kept(Path(str(i)), i + 1, score) for i, score in enumerate(scores)]
    deleted = Retention(1, 0, 1, highest_is_best).choose_deleted(checkpoints)
    assert Path("1") not in deleted and len(deleted) == len(scores) - 2


def test_a_disk_that_is_too_small_is_refused_with_the_figures(tmp_path: Path) -> None:
    folders.require_free(tmp_path, 1, 0)
    with pytest.raises(CheckpointError, match=r"1125899\.91 GB"):
        folders.require_free(tmp_path, 1 << 50, 0)
    with pytest.raises(CheckpointError, match=r"checkpoint\.reserve_gib = 1048576\.00"):
        folders.require_free(tmp_path, 1, 1 << 50)


def test_a_run_that_goes_back_leaves_newer_checkpoints_behind(tmp_path: Path) -> None:
    paths = [make(tmp_path, step) for step in (1, 2, 3)]
    assert folders.set_aside_newer(paths[2]) == []
    assert [path.name for path in folders.set_aside_newer(paths[0])] == [
        "step_00000002.abandoned",
        "step_00000003.abandoned",
    ]
    assert folders.complete(tmp_path) == paths[:1]


def test_the_newest_checkpoint_between_two_rollouts(tmp_path: Path) -> None:
    for step, rollout, opened in ((2, 1, None), (4, 2, None), (5, 2, {"num_done": 1}), (6, 3, None)):
        content = {"state": {"rollout": rollout}, "open_rollout": opened}
        state = make(tmp_path, step) / folders.STATE
        state.write_text(json.dumps(content))
        folders.write_sums(state.parent, folders.sums_of([state], state.parent))
    make(tmp_path, 1)  # its state.json cannot be read
    found = [folders.newest_between_rollouts(tmp_path, num) for num in (0, 1, 2, 9)]
    assert [path and path.name for path in found] == [None, *(folders.name_of(step) for step in (2, 4, 6))]


@pytest.mark.parametrize("character", range(8, 100, 9))
def test_a_state_that_was_changed_by_a_bit_is_read_by_nobody(character: int, tmp_path: Path) -> None:
    """It would be another config, which is refused as a changed setting instead of a torn checkpoint."""
    for step in (4, 6):
        state = make(tmp_path, step) / folders.STATE
        content = {"state": {"rollout": step}, "prompts_digest": "", "open_rollout": None}
        state.write_text(json.dumps(content | {"config": "optimizer.lr = 1e-6\nrun.seed = 3\n"}))
        folders.write_sums(state.parent, folders.sums_of([state], state.parent))
    changed = bytearray(state.read_bytes())
    changed[character] ^= 1
    newest, between = folders.saved_run(tmp_path), folders.newest_between_rollouts(tmp_path, 9)
    assert newest is not None and between is not None and newest.checkpoint == between == state.parent
    state.write_bytes(changed)
    newest, between = folders.saved_run(tmp_path), folders.newest_between_rollouts(tmp_path, 9)
    assert newest is not None and between is not None and newest.checkpoint == between != state.parent
