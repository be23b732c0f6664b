"""Weights through a folder that trainer and servers share."""

import shutil
from pathlib import Path

from safetensors import SafetensorError

from megatron_dppo.checkpoints.hf_folder import write_hf_checkpoint
from megatron_dppo.engines.weight_sync.base import Weights
from megatron_dppo.engines.weight_sync.fleet import Fleet
from megatron_dppo.errors import WeightSyncError
from megatron_dppo.runtime.process import Runtime


class DiskTransport:
    """Rank 0 writes a Hugging Face folder, and each server loads it; implements `weight_sync.base.Transport`.

    Servers load it as they load any checkpoint: quantised, where they were started so.
    """

    needs_begin = False

    def __init__(
        self, weights: Weights, runtime: Runtime, folder: Path, template: Path, bucket_bytes: int
    ) -> None:
        """Store the folder, and write nothing.

        Args:
            weights: Of all pipeline stages, on every rank.
            runtime: Of this rank.
            folder: Where the versions go, one at a time; seen by trainer and servers under the same path.
            template: A Hugging Face folder with the files that stand beside weights.
            bucket_bytes: Of one file, which is held in memory until it is whole.
        """
        self._weights, self._runtime, self._folder = weights, runtime, folder
        self._template, self._bucket_bytes = template, bucket_bytes

    def send(self, fleet: Fleet, version: int) -> None:
        """See `Transport.send`."""
        stream, folder = self._weights(), self._folder / f"version_{version}"
        fault: Exception | None = None
        if self._runtime.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                write_hf_checkpoint(stream, folder, self._template, self._bucket_bytes)
            except (OSError, SafetensorError) as error:
                fault = error
        for _ in stream:  # gathered by all ranks together, whatever became of the files
            pass

        def load() -> None:
            if fault is not None:
                raise WeightSyncError(
                    f"{folder}: found that weights cannot be written ({fault}); expected room for all "
                    "of them on the disk of run.folder. Make room, or change rollout.sglang.weight_sync."
                ) from fault
            fleet.tell(lambda member: member.calls.from_disk(str(folder.absolute()), version))
            shutil.rmtree(folder)

        self._runtime.on_main(load)
        fleet.agree(self._runtime.all_gather(fleet.failures))

    def close(self) -> None:
        """Remove the files of a failed push."""
        if self._runtime.is_main:
            shutil.rmtree(self._folder, ignore_errors=True)
