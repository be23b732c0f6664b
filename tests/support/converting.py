"""`megatron-dppo convert` in this process, and checkpoints compared bit for bit."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.cli import app


def convert(*arguments: object) -> Result:
    """Run `megatron-dppo convert` without starting an interpreter for it."""
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def converted(*arguments: object) -> None:
    """Run it and expect that it succeeds."""
    done = convert(*arguments)
    assert done.exit_code == 0, done.output + repr(done.exception)


def differences(folder: Path, tensors: Mapping[str, Tensor] | Path) -> list[str]:
    """Names of a folder's tensors that are missing, left over, or not the same bits in the other."""
    first = HFWeights(folder)
    other = HFWeights(tensors) if isinstance(tensors, Path) else tensors
    names = other.names if isinstance(other, HFWeights) else set(other)
    tensor_of = other.tensor if isinstance(other, HFWeights) else other.__getitem__

    def is_changed(name: str) -> bool:
        pair = first.tensor(name), tensor_of(name)
        kinds = {(tensor.dtype, tensor.shape) for tensor in pair}
        return len(kinds) > 1 or not torch.equal(*(t.contiguous().view(torch.uint8) for t in pair))

    changed = [name for name in first.names & names if is_changed(name)]
    return sorted((first.names ^ names) | set(changed))
