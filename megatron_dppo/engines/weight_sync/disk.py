"""Sends weights through a folder that trainer and servers share."""

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

    Servers load it like any checkpoint, and quantise it if they were started with quantisation.
    """

    needs_begin = False

    def __init__(
        self, weights: Weights, runtime: Runtime, folder: Path, template: Path, bucket_bytes: int
    ) -> None:
        """Store the folder, and write nothing.

        Args:
            weights: Weights of all pipeline stages, on every rank.
            runtime: Runtime of this rank.
            folder: Folder of the versions, one at a time; trainer and servers see it under the same path.
            template: Hugging Face folder with config, tokenizer and the other files without weights.
            bucket_bytes: Size of one file, which is kept in memory until it is complete.
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
        for _ in stream:  # all ranks gather together, even if writing failed
            pass

        def load() -> None:
            if fault is not None:
                raise WeightSyncError(
                    f"{folder}: found that weights cannot be written ({fault}); expected enough free space "
                    "on the disk of run.folder. Free some space, or change rollout.sglang.weight_sync."
                ) from fault
            fleet.tell(lambda member: member.calls.from_disk(str(folder.absolute()), version))
            shutil.rmtree(folder)

        self._runtime.on_main(load)
        fleet.agree(self._runtime.all_gather(fleet.failures))

    def close(self) -> None:
        """Remove the files of a failed push."""
        if self._runtime.is_main:
            shutil.rmtree(self._folder, ignore_errors=True)
