"""Ranks whose run folder another host holds end together with status 75: start the same command again."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_dppo.run_folder.lock import LOCK
from megatron_dppo.runtime.process import Runtime
from tests.support.locks import hold_in_another_process
from tests.support.ranks import run_ranks


def open_session(runtime: Runtime, folder: str) -> None:
    """Start a session in the processes that are there, without a look at the config."""
    from megatron_dppo.config.schema import Config
    from megatron_dppo.failure_detection import watching
    from megatron_dppo.run import session

    @contextlib.contextmanager
    def join(*_: Any) -> Iterator[Runtime]:
        with watching(runtime):
            yield runtime

    session.join_processes = join
    session.require_valid = lambda *_, **__: None
    config = Config.model_validate({"run": {"folder": folder, "timeout_s": 6}})
    with session.start_session(config):
        raise AssertionError("the folder is held")


def test_ranks_that_wait_too_long_for_their_folder_end_with_75(tmp_path: Path) -> None:
    run = tmp_path / "run"
    other = hold_in_another_process(run, "elsewhere")
    try:
        run_ranks(open_session, 2, tmp_path, str(run), exit_code=75)
        assert json.loads((run / LOCK).read_text())["pid"] == other.pid
    finally:
        other.kill()
        other.wait()
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in (0, 1)]
    assert [f"in use by process {other.pid} on elsewhere" in log for log in logs] == [True, False]
    assert "Traceback" not in "".join(logs)
