"""Which process group carries what: what ranks tell each other stays off the device's own group."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dppo.runtime.process import Runtime
from tests.support.ranks import run_ranks


def collectives_of_each(runtime: Runtime) -> dict[str, tuple[int, int]]:
    """How many collectives each message takes: of the default group (NCCL's on GPUs), and of the gloo group."""
    assert runtime.control is not None and dist.group.WORLD is not None
    groups: tuple[Any, ...] = (dist.group.WORLD, runtime.control)
    parcels = [torch.tensor([runtime.rank, rank], dtype=torch.uint8) for rank in range(runtime.world_size)]
    messages: dict[str, Callable[[], Any]] = {
        "any": lambda: runtime.any(runtime.rank == 1),
        "all_gather": lambda: runtime.all_gather(runtime.rank),
        "on_main": lambda: runtime.on_main(lambda: "of rank 0"),
        "barrier": runtime.barrier,
        "exchange": lambda: [parcel.tolist() for parcel in runtime.exchange(parcels)],
    }
    expected = {
        "any": True,
        "all_gather": [0, 1],
        "on_main": "of rank 0",
        "barrier": None,
        "exchange": [[rank, runtime.rank] for rank in range(runtime.world_size)],
    }
    taken = {}
    for name, send in messages.items():
        before = [group._get_sequence_number_for_group() for group in groups]
        assert send() == expected[name]
        after = [group._get_sequence_number_for_group() for group in groups]
        taken[name] = (after[0] - before[0], after[1] - before[1])
    return taken


def test_only_parcels_go_through_the_default_group(tmp_path: Path) -> None:
    """A rank that waits for the others in NCCL runs a kernel on a GPU that an engine may be sampling on."""
    for taken in run_ranks(collectives_of_each, 2, tmp_path):
        assert {name for name, (of_default, _) in taken.items() if of_default} == {"exchange"}
        assert taken["exchange"][0] == 1, "sizes travel in the control group"
        assert all(of_control for _, of_control in taken.values())
