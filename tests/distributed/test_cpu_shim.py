"""The CPU shim patches torch for Megatron only."""

from pathlib import Path
from typing import Any

from megatron_dppo.runtime.process import Runtime
from tests.support.ranks import run_ranks


def look(runtime: Runtime) -> dict[str, Any]:
    """What torch is to Megatron and to others once the shim is installed."""
    import torch

    before = (torch.arange, torch.empty, torch.cuda.current_device)
    import megatron.core.optimizer.clip_grads as loaded_before

    from megatron_dppo.mcore import cpu

    cpu.install()
    cpu.install()
    import megatron.core.dist_checkpointing.strategies.state_dict_saver as loaded_after

    with torch.device("meta"):
        is_meta = torch.arange(3).is_meta
    return {
        "untouched": before == (torch.arange, torch.empty, torch.cuda.current_device),
        "device contexts work": is_meta,
        "answers": [str(m.torch.zeros(1, device="cuda").device) for m in (loaded_before, loaded_after)],
        "type": torch.zeros(1).type() == "torch.cuda.FloatTensor"
        and torch.zeros(1).type() == "torch.FloatTensor",
        "another type": torch.zeros(1).type() == "torch.cuda.HalfTensor",
    }


def test_only_megatrons_cuda_calls_are_sent_to_the_cpu(tmp_path: Path) -> None:
    (seen,) = run_ranks(look, 1, tmp_path)
    assert seen == {
        "untouched": True,
        "device contexts work": True,
        "answers": ["cpu", "cpu"],
        "type": True,
        "another type": False,
    }
