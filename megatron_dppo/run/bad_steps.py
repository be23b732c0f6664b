"""Keeps the batch and the gradients' faults of a skipped gradient step."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.data.batches.batch_file import write_batches
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import TrainBatch

MAX_FOLDERS = 10  # a run that is sick every tenth step must not fill the disk


def keep_evidence(folder: Path, step: int, batch: TrainBatch, faults: Sequence[str], runtime: Runtime) -> None:
    """Write `step_<n>/faults.json` and each rank's micro-batches; every rank calls this together.

    Only the first `MAX_FOLDERS` steps of a run are kept. `read_batches` reads the micro-batches back.

    Args:
        folder: The run's `evidence/`.
        step: Number of the gradient step.
        batch: What this rank trained on.
        faults: What was not finite, over all ranks.
        runtime: This process.
    """
    target = folder / f"step_{step:08d}"

    def begin() -> bool:
        others = [path for path in folder.glob("step_*") if path != target]
        if len(others) >= MAX_FOLDERS:
            return False
        target.mkdir(parents=True, exist_ok=True)
        (target / "faults.json").write_text(json.dumps(list(faults), indent=1) + "\n")
        return True

    if runtime.on_main(begin):
        write_batches(target / f"rank_{runtime.rank:05d}.safetensors", [batch])
