"""One process per run folder: refused while another lives, taken over when it is gone."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.errors import ConfigError, InUseError, StorageError
from megatron_dppo.run_folder import lock
from megatron_dppo.run_folder.lock import STEPS, Lock, Owner, Silence, Step, Watch, holder, locked
from megatron_dppo.run_folder.lock_file import LOCK, is_entry_of, is_here, this_process
from megatron_dppo.runtime import files
from tests.support.locks import begin_to_hold, hold_in_another_process, release
from tests.support.processes import wait_until
from tests.unit.test_storage import fail


def test_a_folder_is_free_again_after_use(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path / "new" / "run", beat_s=0.05):
            time.sleep(0.1)
            owner = json.loads((tmp_path / "new" / "run" / LOCK).read_text())
            assert owner["pid"] == os.getpid()
        assert (tmp_path / "new" / "run" / LOCK).read_text() == ""
        assert holder(tmp_path / "new" / "run") is None


def test_a_folder_in_use_is_refused_and_the_owner_named(tmp_path: Path) -> None:
    other = hold_in_another_process(tmp_path)
    try:
        with pytest.raises(ConfigError, match=f"process {other.pid} ") as error, locked(tmp_path):
            pass
        assert "choose another run.folder" in str(error.value)
        assert other.poll() is None
        assert f"process {other.pid} on " in str(holder(tmp_path))
    finally:
        other.kill()
        other.wait()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = hold_in_another_process(tmp_path)
    other.send_signal(signal.SIGKILL)
    other.wait()
    with locked(tmp_path):
        pass
    assert f"taking over from process {other.pid}" in caplog.text


def test_a_process_that_is_only_stopped_keeps_its_lock(tmp_path: Path) -> None:
    """Signs of life alone, as filelock's SoftFileLease has them, would give the folder away."""
    other = hold_in_another_process(tmp_path)
    other.send_signal(signal.SIGSTOP)
    try:
        time.sleep(0.5)  # several signs of life are missed
        with pytest.raises(ConfigError, match=f"process {other.pid}"), locked(tmp_path, beat_s=0.1):
            pass
    finally:
        other.kill()
        other.wait()


def owner_elsewhere(folder: Path, beat: int) -> None:
    (folder / LOCK).write_text(json.dumps({"host": "elsewhere", "pid": 1, "beat": beat}))


def while_asleep(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call a function whenever this process waits before it looks at the lock again."""

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        act()

    monkeypatch.setattr(lock, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))


def test_an_owner_on_another_host_that_lives_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands for a file system whose locks do not reach across hosts."""
    owner_elsewhere(tmp_path, 0)
    beats = itertools.count(1)
    while_asleep(monkeypatch, lambda: owner_elsewhere(tmp_path, next(beats)))
    expected = pytest.raises(InUseError, match="process 1 on elsewhere")
    with expected, locked(tmp_path, beat_s=0.2, patience_s=2.0):
        pass


def test_how_long_an_owner_on_another_host_may_be_silent_or_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent one whose lock is held is gone after three minutes; one that lives is waited for ten."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(lock, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def step_at(elapsed_s: float, beat: int) -> Step:
        clock.now = 1000.0 + elapsed_s
        return watch.next_step("held", {"host": "elsewhere", "pid": 1, "beat": beat})

    watch = Watch(tmp_path, "run.folder", 1.0, lock.PATIENCE_S, lock.SILENT_S)
    assert [step_at(elapsed_s, 0) for elapsed_s in (0, 120, 240)] == ["wait", "wait", "replace"]
    watch = Watch(tmp_path, "run.folder", 1.0, lock.PATIENCE_S, lock.SILENT_S, began=1000.0)
    assert {step_at(elapsed_s, beat) for beat, elapsed_s in enumerate(range(0, 600, 60))} == {"wait"}
    with pytest.raises(InUseError):
        step_at(660, 99)


@pytest.mark.parametrize(
    ("state", "expected"), [(state, expected) for state, expected in STEPS.items()], ids=str
)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_each_state_waits_until_its_silence_is_over(
    state: tuple[Lock, Owner],
    expected: tuple[Step, Silence],
    is_restarted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job that SLURM has started again is never refused, and its living owner counts as any other here."""
    clock = SimpleNamespace(now=50.0)
    monkeypatch.setattr(lock, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(int(is_restarted)))
    (has_lock, owner), me = state, this_process()
    watch = Watch(tmp_path, "run.folder", 2.0, patience_s=1e9, silent_s=70.0, began=0.0)
    entry: dict[str, Any] = {"nobody": {}, "elsewhere": {"host": "elsewhere"}}.get(owner, me)
    if owner == "living":
        watch.entry = me | {"beat": -1}
        expected = STEPS[has_lock, "here"] if is_restarted else expected
    step, silence = expected
    first_s = {"at once": 0.0, "after beats": 6.0, "after minutes": 70.0}[silence]
    for after_s in (0.0, 5.9, 6.1, 69.9, 70.1):
        clock.now = 50.0 + after_s
        is_due = after_s >= first_s
        is_refused = is_due and step == "refuse" and not is_restarted
        with pytest.raises(ConfigError) if is_refused else contextlib.nullcontext():
            found = watch.next_step(has_lock, entry)
            assert found == (step if is_due and step != "refuse" else "wait")


def test_only_a_dead_or_absent_owner_loses_its_folder() -> None:
    """The table itself: who has the lock, whose entry it is, and the earliest moment to take the folder."""
    at_once = {state for state, (step, silence) in STEPS.items() if step != "refuse" and silence == "at once"}
    assert at_once == {("ours", "nobody"), ("ours", "here"), ("ours", "living"), ("missing", "nobody")}
    refused = {state for state, (step, _) in STEPS.items() if step == "refuse"}
    assert refused == {("held", "nobody"), ("held", "here"), ("held", "living"), ("missing", "living")}
    assert [state for state, (step, _) in STEPS.items() if step == "replace"] == [("held", "elsewhere")]
    assert STEPS["held", "elsewhere"][1] == "after minutes"
    assert len(STEPS) == 3 * 4


def test_an_owner_on_another_host_that_is_silent_is_gone(tmp_path: Path) -> None:
    owner_elsewhere(tmp_path, 7)
    with locked(tmp_path, beat_s=0.1):
        assert (tmp_path / LOCK).exists()


@pytest.mark.parametrize(("host", "restarts"), [("elsewhere", "0"), ("", "1")])
@pytest.mark.parametrize("ends", [True, False])
def test_the_owner_of_an_attempt_before_is_waited_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    host: str,
    restarts: str,
    ends: bool,
) -> None:
    """The owner holds the lock itself, on another host or before SLURM started the job again."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    other = hold_in_another_process(tmp_path, host)
    words = f"process {other.pid} on {host}"
    expected = contextlib.nullcontext() if ends else pytest.raises(InUseError, match=words)
    if ends:
        while_asleep(monkeypatch, lambda: release(other))  # it has been looked at once
    try:
        with expected, locked(tmp_path, beat_s=0.2, patience_s=60.0 if ends else 1.5, silent_s=60.0):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
        assert f"waiting for {words}" in caplog.text
    finally:
        other.kill()
        other.wait()


def test_a_lock_that_outlives_its_silent_owner_goes_to_one_process(tmp_path: Path) -> None:
    """A file server keeps the lock of a host without power; here, of a process that is stopped."""
    silent = hold_in_another_process(tmp_path, "elsewhere")
    silent.send_signal(signal.SIGSTOP)
    both = [begin_to_hold(tmp_path, host) for host in ("a", "b")]
    try:
        wait_until(lambda: any(process.poll() is not None for process in both), 120)
        said = [process.communicate(timeout=120) for process in both]
        assert sorted(out for out, _ in said) == ["", "held\n"]
        assert sorted("taking over from" in err or "InUseError" in err for _, err in said) == [True, True]
        assert (tmp_path / LOCK).read_text() == ""
    finally:
        silent.kill()
        for process in (silent, *both):
            process.kill()
            process.communicate()


@pytest.mark.parametrize("is_released", [False, True])
def test_an_owner_that_comes_back_ends_and_leaves_the_folder_to_the_new_one(
    tmp_path: Path, is_released: bool
) -> None:
    """A job takes the folder over when it looks at its config, releases it, and locks it again to train."""
    silent = hold_in_another_process(tmp_path, "elsewhere")
    silent.send_signal(signal.SIGSTOP)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(tmp_path, beat_s=0.1, silent_s=1.0))
            if is_released:
                stack.close()
            silent.send_signal(signal.SIGCONT)
            assert silent.wait(120) == 1
            _, said = silent.communicate()
            new = "a process that has released it" if is_released else f"process {os.getpid()} on "
            assert f"taken over by {new}" in said
            expected = [] if is_released else [os.getpid()]
            assert [json.loads(line)["pid"] for line in (tmp_path / LOCK).read_text().splitlines()] == expected
    finally:
        silent.kill()
        silent.communicate()


def test_a_host_of_the_same_name_is_another_host(tmp_path: Path) -> None:
    """Without shared locks, two machines called localhost must not take over from each other at once."""
    owner = {"host": socket.gethostname(), "boot": "another", "pid": 1, "beat": 0}
    (tmp_path / LOCK).write_text(json.dumps(owner))
    began = time.monotonic()
    with locked(tmp_path, beat_s=0.2):
        assert time.monotonic() - began > 0.6


@pytest.mark.parametrize("name", ["host", "boot", "pid", "since"])
def test_an_entry_is_ofthis_process_only_if_every_part_of_its_identity_is(name: str) -> None:
    """A process of another host, of another start of this host, or of the same id at another time."""
    me = this_process()
    others: dict[str, Any] = {"host": "elsewhere", "boot": "another", "pid": me["pid"] + 1, "since": "earlier"}
    assert is_entry_of(me | {"beat": 9, "command": "any"}, me)
    assert not is_entry_of(me | {name: others[name]}, me)
    assert not is_entry_of({key: value for key, value in me.items() if key != name}, me)
    assert is_here(me | {name: others[name]}) == (name in ("pid", "since"))


@pytest.mark.parametrize("content", ["", "{torn", "[]", "7"])
def test_a_lock_file_that_says_nothing_is_free(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK).write_text(content)
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("has_locks", [True, False])
def test_a_lock_file_that_cannot_be_read_is_not_free(
    number: int, has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner_elsewhere(tmp_path, 3)
    before = (tmp_path / LOCK).read_bytes()
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    with monkeypatch.context() as patched:
        patched.setattr(files, "time", SimpleNamespace(sleep=lambda _: None))
        fail(patched, "read_text", LOCK, number, 99)
        with pytest.raises(StorageError, match=LOCK), locked(tmp_path, beat_s=0.2, patience_s=2.0):
            pass
    assert (tmp_path / LOCK).read_bytes() == before


def test_an_owner_stays_while_its_lock_file_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(tmp_path, beat_s=0.05):
        with monkeypatch.context() as patched:
            patched.setattr(files, "time", SimpleNamespace(sleep=lambda _: None))
            calls = fail(patched, "read_text", LOCK, errno.EIO, 10**9)
            wait_until(lambda: calls["read_text"] > 20, 60)
        wait_for_beat(tmp_path)
    assert (tmp_path / LOCK).read_bytes() == b""


def no_locks(*_: object) -> None:
    """Fail as flock does on a file system without locks."""
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("is_alive", [True, False])
def test_without_locks_signs_of_life_decide_on_the_same_host_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    other = hold_in_another_process(tmp_path)
    if not is_alive:
        other.kill()
        other.wait()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    if is_alive:
        while_asleep(monkeypatch, lambda: wait_for_beat(tmp_path))
    expected = (
        pytest.raises(ConfigError, match=f"process {other.pid}") if is_alive else contextlib.nullcontext()
    )
    try:
        with expected, locked(tmp_path, beat_s=0.2):
            pass
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("comes", [True, False])
def test_of_two_hosts_that_find_a_folder_free_in_the_same_moment_the_last_writer_owns_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """Locks do not work. The other host writes its entry after this one did, and before this one continues."""
    beats = itertools.count(1)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    while_asleep(monkeypatch, lambda: owner_elsewhere(tmp_path, next(beats)) if comes else None)
    expected = pytest.raises(InUseError, match="on elsewhere") if comes else contextlib.nullcontext()
    with expected, locked(tmp_path, beat_s=0.2, patience_s=2.0):
        assert not comes
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def wait_for_beat(folder: Path) -> None:
    before = (folder / LOCK).read_text()
    wait_until(lambda: (folder / LOCK).read_text() != before, 60)


def test_a_folder_that_cannot_be_written_is_named() -> None:
    expected = r"--out: found /proc/nowhere .*expected a place that can be written"
    with pytest.raises(ConfigError, match=expected), locked(Path("/proc/nowhere"), key="--out"):
        pass
