"""A save and a resume in which each call of the operating system fails, one after another.

A call fails once or for good: the run reports it, no complete checkpoint is moved or lost, and the same work
on the healthy disk ends as if nothing had happened.
"""

import errno
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_dppo.runtime.process import Runtime
from tests.faults.failing_calls import ERRORS, FailingCalls, failing, install
from tests.support.ranks import run_ranks
from tests.support.tiny import write_model

CONFIG = {"run": {"seed": 3, "num_rollouts": 4}}
MOST_CALLS = 400  # that an action makes; more would be another action than this test's


class Runs:
    """A run folder with a saved step, copied for each fault."""

    def __init__(self, runtime: Runtime, model: str, folder: str) -> None:
        from megatron_dppo.actor.actor import Actor
        from megatron_dppo.config.schema import Config
        from megatron_dppo.runtime import files

        files.time = SimpleNamespace(sleep=lambda _: None)  # type: ignore[assignment]
        tables: dict[str, Any] = {"model": {"load": model}, "parallel": {"max_tokens_per_microbatch": 60}}
        tables["parallel"]["expert"] = runtime.world_size
        self.runtime, self.model = runtime, Path(model)
        self.weights = load_file(next(self.model.glob("*.safetensors")))
        self.actor = Actor(Config.model_validate(tables), runtime)
        self.folder, self.good = Path(folder) / "run", Path(folder) / "good"

    def begin(self) -> None:
        """Make the folder that each fault finds: a run that has saved steps 1 and 2, with their rows."""
        for step in (1, 2):
            self.save(step, self.good)

    def copy(self) -> None:
        """Take the folder as it was."""
        self.runtime.on_main(self._copy)

    def _copy(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "delete checkpoints":
                thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.good, self.folder)

    def checkpoints(self, folder: Path) -> Any:
        from megatron_dppo.config.schema import CheckpointConfig
        from megatron_dppo.run.checkpoints import Checkpoints

        options = CheckpointConfig(asynchronous=False, reserve_gib=0, keep_last=2, max_failed_saves=2)
        return Checkpoints(folder / "checkpoints", options, self.model, self.runtime)

    def save(self, step: int, folder: Path | None = None) -> int:
        """Write a row and save; returns the step."""
        from megatron_dppo.run.state import RunPoint
        from megatron_dppo.run_folder.folder import RunFolder
        from megatron_dppo.types import RunState

        folder = folder or self.folder

        def write_row() -> int:
            with RunFolder.open(folder, CONFIG, resume=True) as run:
                run.truncate(run.offset)
                run.write_rollout(step - 1, {"reward/mean": step / 7}, num_rollouts=4)
                return run.offset

        offset = self.runtime.on_main(write_row)
        checkpoints = self.checkpoints(folder)
        checkpoints.save(self.actor, RunPoint(RunState(step, step, step, {"index": step}), offset, "digest"))
        checkpoints.wait()
        return step

    def push(self, version: int) -> int:
        """Push by disk to a server that loads what it finds; returns the version."""
        from megatron_dppo.engines.weight_sync.transports import DiskTransport

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.weights.items():
                yield name, tensor + version

        def load(path: str, version: int) -> None:
            with failing(None):
                found = [load_file(file) for file in sorted(Path(path).glob("*.safetensors"))]
                loaded = {name: tensor for each in found for name, tensor in each.items()}
                expected = dict(weights())
                assert loaded.keys() == expected.keys() and len(found) > 2
                assert all(torch.equal(loaded[name], expected[name]) for name in expected)

        def tell(call: Callable[[Any], object]) -> None:
            call(SimpleNamespace(calls=SimpleNamespace(from_disk=load)))

        fleet: Any = SimpleNamespace(failures={}, agree=lambda _: None, tell=tell)
        folder = self.folder / "weights"
        DiskTransport(weights, self.runtime, folder, self.model, 4096).send(fleet, version)
        left = self.runtime.on_main(lambda: sorted(path.name for path in folder.iterdir()))
        assert version == 3 or not left, left
        return version

    def judge(self, _: int) -> int:
        """Choose the checkpoint to resume from; returns its step."""
        return int(self.checkpoints(self.folder)._newest_whole().name.removeprefix("step_"))

    def resume(self, _: int) -> int:
        """Resume; returns the step."""
        from megatron_dppo.run_folder.folder import RunFolder
        from megatron_dppo.run_folder.lock import locked

        opened = list[RunFolder]()
        with ExitStack() as stack:
            if self.runtime.is_main:
                stack.enter_context(locked(self.folder))
            self.runtime.on_main(lambda: opened.append(RunFolder.open(self.folder, CONFIG, resume=True)))
            for run in opened:
                stack.callback(run.close)
            point = self.checkpoints(self.folder).resume(self.actor)
            self.runtime.on_main(lambda: opened[0].truncate(point.metrics_offset))
        return point.state.step


def fail_each(runtime: Runtime, model: str, folder: str, action: str, rank: int, most: int) -> list[str]:
    """Let each call of one rank fail, or `most` of them; returns how it ended, and what went wrong."""
    from megatron_dppo.checkpoints import checkpoint_folder as folders
    from megatron_dppo.errors import MegatronDppoError
    from megatron_dppo.runtime.files import full_disk_explained

    install()
    runs, wrong, ended = Runs(runtime, model, folder), list[str](), Counter[str]()
    if runtime.is_main:
        runs.folder.parent.mkdir(exist_ok=True)
    runs.begin()
    do: Callable[[int], int] = getattr(runs, action)
    expected = 3 if action in ("save", "push") else 2

    def attempt(calls: FailingCalls) -> str:
        runs.copy()
        runtime.all_gather(0)
        try:
            with full_disk_explained(), failing(calls):
                step = do(3)
        except MegatronDppoError as error:
            return f"{type(error).__name__}: {error}"
        except OSError as error:
            is_known = error.errno == errno.ENOTEMPTY  # users see it only after a rename
            return f"{'' if is_known else 'wrong: '}{type(error).__name__}: {error}"
        return "" if step == expected else f"wrong: step {step}"

    thread = "write checkpoint" if action == "save" and rank else ""
    none = FailingCalls(runs.folder, thread=thread)
    assert attempt(none) == ""
    num_calls = runtime.all_gather(len(none.calls))[rank]
    assert 3 < num_calls < MOST_CALLS, num_calls
    num_tried = min(num_calls, most)
    for attempts in range(num_tried):
        first = attempts * num_calls // num_tried
        for lasts in (False, True):
            number = ERRORS[(attempts + lasts) % len(ERRORS)]
            is_here = runtime.rank == rank
            calls = FailingCalls(runs.folder, first if is_here else None, number, lasts, thread)
            said = attempt(calls)
            where = f"{action}, call {first} ({(calls.calls + ['?'] * 999)[first]}), error {number}, {lasts=}"
            told = runtime.all_gather(said)
            if len({bool(each) for each in told}) > 1:
                wrong.append(f"{where}: only one rank ended: {told}")
            ended[said.partition(":")[0]] += 1
            is_blamed = action not in ("save", "push") and said.startswith("CheckpointError")
            if said.startswith("wrong") or (is_blamed and number in (errno.EIO, errno.ESTALE)):
                wrong.append(f"{where}: {said}")
            wrong += [f"{where}: {each} ({said})" for each in runtime.on_main(lambda: whole(runs.folder))]
            step, last = (do(4), 4) if action in ("save", "push") else (do(3), 2)
            if step != last:
                wrong.append(f"{where}: afterwards step {step} ({said})")
            wrong += [f"{where}: afterwards {each}" for each in runtime.on_main(lambda: whole(runs.folder))]
            names = sorted(path.name for path in folders.complete(runs.folder / "checkpoints"))
            if len(names) != 2:
                wrong.append(f"{where}: afterwards {names} ({said})")
    return [str(dict(ended)), *wrong]


def whole(run: Path) -> list[str]:
    """Sentences on lost or torn checkpoints and rows of a run."""
    from megatron_dppo.checkpoints import checkpoint_folder as folders

    found = [f"{path.name} is set aside" for path in run.glob("checkpoints/step_*.*")]
    complete = folders.complete(run / "checkpoints")
    found += [f"{path.name}: {folders.faults(path)}" for path in complete if folders.faults(path)]
    best = folders.candidates(run / "checkpoints")
    if not best or best[0].name < "step_00000002":
        found.append(f"resumes from {best[:1]}")
    if (run / "metrics.jsonl").read_bytes().count(b'"reward/mean"') < 2:
        found.append("rows are lost")
    return found


@pytest.mark.parametrize("most", [20, pytest.param(MOST_CALLS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("action", "world_size", "rank"),
    [("save", 1, 0), ("save", 2, 1), ("judge", 2, 1), ("resume", 1, 0), ("push", 1, 0), ("push", 2, 0)],
)
def test_nothing_is_lost_whichever_call_fails(
    action: str, world_size: int, rank: int, most: int, tmp_path: Path
) -> None:
    """Of several ranks: while one writes its files, and while it compares checksums, each by itself.

    A rank that fails alone in a collective ends the job: `cases.py` has that.
    """
    write_model(tmp_path / "model")
    model, folder = str(tmp_path / "model"), str(tmp_path / "runs")
    found = run_ranks(fail_each, world_size, tmp_path, model, folder, action, rank, most)
    assert found[0][1:] == [], found[0][0]
