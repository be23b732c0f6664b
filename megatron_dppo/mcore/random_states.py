"""Copies and restores a rank's random-number states of torch and Megatron."""

from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def random_states() -> dict[str, torch.Tensor]:
    """Return copies of this rank's random-number states by name."""
    trackers = {f"megatron.{name}": state.clone() for name, state in _tracker().get_states().items()}
    return {"torch": torch.get_rng_state(), **trackers}


def restore_random_states(states: dict[str, torch.Tensor]) -> None:
    """Restore what `random_states` returned."""
    torch.set_rng_state(states.pop("torch"))
    _tracker().set_states({name.removeprefix("megatron."): state for name, state in states.items()})


def _tracker() -> Any:
    """Return Megatron's random-number tracker, created by `initialize_groups`."""
    return get_cuda_rng_tracker()
