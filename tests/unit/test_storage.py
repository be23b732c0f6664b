"""A disk that fails is no torn checkpoint, and absence is no first start: nothing is renamed or cut."""

import errno
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.checkpoints import checkpoint_folder as folders
from megatron_dppo.checkpoints.checkpoint_folder import Kept, Retention
from megatron_dppo.errors import CheckpointError, StorageError
from megatron_dppo.run_folder.folder import NO_CHECKPOINT, RunFolder
from megatron_dppo.runtime import files
from megatron_dppo.runtime.files import PAUSES_S, read_patiently
from tests.unit.test_checkpoint_folder import make

CONFIG = {"run": {"seed": 3, "num_rollouts": 4}}
OF_DISKS = (errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOTCONN)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that reading waited, none of which pass."""
    waited = list[float]()
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=waited.append))
    return waited


def fail(monkeypatch: pytest.MonkeyPatch, method: str, name: str, number: int, times: int) -> Counter[str]:
    """Let a method of paths with this name fail some times; returns how often it was called."""
    calls, whole = Counter[str](), getattr(Path, method)

    def failing(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.name != name:
            return whole(self, *arguments, **options)
        calls[method] += 1
        if calls[method] <= times:
            raise OSError(number, os.strerror(number), str(self))
        return whole(self, *arguments, **options)

    monkeypatch.setattr(Path, method, failing)
    return calls


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every entry below a folder, with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("number", OF_DISKS)
@pytest.mark.parametrize("times", [1, 3, len(PAUSES_S), len(PAUSES_S) + 1, 99])
def test_failed_reads_are_retried_for_some_seconds(
    number: int, times: int, tmp_path: Path, pauses: list[float]
) -> None:
    left = iter(range(times))

    def read() -> str:
        if next(left, None) is not None:
            raise OSError(number, os.strerror(number))
        return "content"

    if times <= len(PAUSES_S):
        assert read_patiently(tmp_path, read) == "content" and pauses == list(PAUSES_S[:times])
    else:
        with pytest.raises(
            StorageError, match=rf"{tmp_path}: found that it cannot be read \({os.strerror(number)}"
        ):
            read_patiently(tmp_path, read)
        assert pauses == list(PAUSES_S) and sum(pauses) < 20


def test_absent_file_is_reported_without_retries(tmp_path: Path, pauses: list[float]) -> None:
    with pytest.raises(FileNotFoundError):
        read_patiently(tmp_path, (tmp_path / "nowhere").read_text)
    assert pauses == []


@pytest.mark.parametrize("number", OF_DISKS)
@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("open", "__0_0.distcp"),
        ("open", folders.STATE),
        ("open", "rank_00000.safetensors"),
        ("read_text", folders.SUMS),
    ],
)
@pytest.mark.parametrize("is_for_a_moment", [True, False])
def test_a_checkpoint_that_cannot_be_read_is_not_torn(
    number: int,
    method: str,
    name: str,
    is_for_a_moment: bool,
    tmp_path: Path,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = make(tmp_path, 7)
    calls = fail(monkeypatch, method, name, number, 2 if is_for_a_moment else 99)
    if is_for_a_moment:
        assert folders.faults(checkpoint) == []
        assert calls[method] >= 3
    else:
        with pytest.raises(StorageError, match=name):
            folders.faults(checkpoint)


@pytest.mark.parametrize("method", ["iterdir", "read_text"])
def test_candidates_are_never_fewer_because_a_disk_fails(
    method: str, tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [make(tmp_path / "checkpoints", step) for step in (3, 9)]
    name = {"iterdir": "checkpoints", "read_text": "latest"}[method]
    with monkeypatch.context() as patched:
        fail(patched, method, name, errno.ESTALE, 2)
        assert folders.candidates(tmp_path / "checkpoints") == places[::-1]
    fail(monkeypatch, method, name, errno.ESTALE, 99)
    with pytest.raises(StorageError):
        folders.candidates(tmp_path / "checkpoints")


def test_a_file_of_a_checkpoint_that_links_to_nothing_is_no_tear(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 1)
    (checkpoint / "megatron").rename(tmp_path / "other disk")
    (checkpoint / "megatron").symlink_to(tmp_path / "other disk")
    assert folders.faults(checkpoint) == []
    (tmp_path / "other disk").rename(tmp_path / "not mounted")
    with pytest.raises(StorageError, match="found a link to"):
        folders.faults(checkpoint)


def begun(path: Path, *, has_saved: bool) -> None:
    """The folder of a run with three rows, that has or has not published a checkpoint."""
    with RunFolder.open(path, CONFIG, resume=True) as folder:
        if folder.offset:
            folder.truncate(0)
        for rollout in range(3):
            folder.write_rollout(rollout, {"reward/mean": rollout / 7}, num_rollouts=4)
    if has_saved:
        make(path / "checkpoints", 2)
        (path / NO_CHECKPOINT).unlink()


def lose_all(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        path.rename(run.parent / path.name)


def set_all_aside(run: Path) -> None:
    for path in folders.complete(run / "checkpoints"):
        folders.set_aside(path, "torn")
    (run / "checkpoints" / "latest").unlink()


def keep_latest(run: Path) -> None:
    folders.complete(run / "checkpoints")[0].rename(run.parent / "elsewhere")


def unmount(run: Path) -> None:
    (run / "checkpoints").rename(run.parent / "elsewhere")
    (run / "checkpoints").symlink_to(run.parent / "nowhere")


def lose_the_folder(run: Path) -> None:
    (run / "checkpoints").rename(run.parent / "elsewhere")


def lose_rows(run: Path) -> None:
    (run / "metrics.jsonl").rename(run.parent / "elsewhere")


def unlink_rows(run: Path) -> None:
    lose_rows(run)
    (run / "metrics.jsonl").symlink_to(run.parent / "nowhere")


@pytest.mark.parametrize(
    "lose", [lose_all, set_all_aside, keep_latest, unmount, lose_the_folder, lose_rows, unlink_rows]
)
def test_a_run_that_lost_its_checkpoints_does_not_begin_again(
    lose: Callable[[Path], None], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    begun(run, has_saved=True)
    lose(run)
    before = tree(run)
    for _ in range(2):  # a second try is no first start either
        with pytest.raises((CheckpointError, StorageError), match="expected"):
            RunFolder.open(run, CONFIG, resume=True)
    assert tree(run) == before


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "run"])
def test_a_run_folder_that_cannot_be_read_is_no_new_one(
    name: str, tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    begun(run, has_saved=True)
    before = tree(run)
    with monkeypatch.context() as patched:
        fail(patched, "iterdir" if name == "checkpoints" else "stat", name, errno.EIO, 99)
        with pytest.raises(StorageError, match="found that it cannot be read"):
            RunFolder.open(run, CONFIG, resume=True)
    assert tree(run) == before


def test_a_run_that_ended_before_its_first_checkpoint_begins_again_and_keeps_its_rows(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begun(run, has_saved=False)
    rows = (run / "metrics.jsonl").read_bytes()
    begun(run, has_saved=False)
    assert (run / "metrics.1.jsonl").read_bytes() == rows
    assert (run / "metrics.jsonl").read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("seed", range(8))
def test_the_number_of_checkpoints_is_bounded_by_the_rules_after_any_run(seed: int, tmp_path: Path) -> None:
    """Saves between and in the middle of rollouts, scores, roll-backs, and checkpoints that were torn."""
    chance = random.Random(seed)
    last, every, best = chance.randint(1, 3), chance.choice([0, 2, 5]), chance.randint(0, 2)
    rule, known, rollout, step = Retention(last, every, best, True), dict[Path, Kept](), 0, 0
    for _ in range(120):
        action, step = chance.random(), step + 1
        if action < 0.08 and known:
            lost = chance.choice(list(known))
            folders.set_aside(lost, chance.choice(["torn", "abandoned"]))
            del known[lost]
            rollout = max((kept.rollout for kept in known.values()), default=0)
        else:
            is_open = chance.random() < 0.4
            rollout += not is_open
            path = make(tmp_path, step)
            known[path] = Kept(path, rollout, chance.choice([None, chance.random()]), is_open)
        deleted = rule.choose_deleted(list(known.values()))
        folders.delete([*deleted, *folders.oldest_aside(tmp_path), *folders.leftovers(tmp_path)])
        known = {path: kept for path, kept in known.items() if path not in deleted}
        assert sorted(folders.complete(tmp_path)) == sorted(known)
        num_multiples = rollout // every if every else 0
        aside = list(tmp_path.glob("step_*.*"))  # what is being deleted begins with a dot
        assert len(known) <= last + num_multiples + best and len(aside) <= folders.MOST_ASIDE
        whole = {kept.rollout for kept in known.values() if not kept.is_open}
        assert num_multiples == 0 or action < 0.08 or rollout % every or is_open or rollout in whole
