"""Reads and writes the speeds of a GPU that the estimate of a step's time uses: a JSON object of named numbers.

    {"device": "NVIDIA H100 80GB HBM3", "layer_flops_per_s": 3.1e14, "host_bytes_per_s": 5.2e10}

`tools.gpu_machine` writes it, `megatron-dppo plan --rates FILE` reads it. Each number has its unit in its name.
A number that the file does not have keeps its default, which one H200 measured.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.plan.units import require_number

RATES_FILE = Path("runs/gpu/rates.json")
"""Where `tools.gpu_machine` writes the file, and where `plan` looks for it."""
PCIE_BYTES_PER_S = 64e9
DEVICE = "device"


@dataclass(frozen=True)
class GpuRates:
    """Speeds of one GPU. Operations are counted as in `cost.py`.

    The defaults of layers, output layer and update fit five measured steps of Qwen3-30B-A3B's layers on one
    H200 within 1 %: examples/guides/gpu_measurements.md. The default of the host is 70 % of the data sheet's.
    """

    layer_flops_per_s: float = 341e12  # layers of our torch spec, with everything that they launch
    output_flops_per_s: float = 573e12  # output layer and loss
    update_parameters_per_s: float = 23.6e9  # gradients added, their norm, and AdamW
    host_bytes_per_s: float = 0.7 * PCIE_BYTES_PER_S  # page-locked memory to or from the GPU
    device: str = "NVIDIA H200"  # GPU of the numbers in `measured`
    measured: tuple[str, ...] = ("layer_flops_per_s", "output_flops_per_s", "update_parameters_per_s")
    file: str = "examples/guides/gpu_measurements.md"  # source of the numbers in `measured`


ASSUMED = GpuRates()
NUMBERS = tuple(field.name for field in fields(GpuRates) if field.type is float)
"""Names of the numbers that a file may have."""


def read_rates(file: Path | None) -> GpuRates:
    """Read a file of rates. For None, read `RATES_FILE` if the current folder has it, or else use the defaults.

    Raises:
        ConfigError: The file is missing or not a JSON object, or a name or a number in it is not valid.
    """
    if file is None and not RATES_FILE.exists():
        return ASSUMED
    file = RATES_FILE if file is None else file
    content = _read_object(file)
    numbers = {name: value for name, value in content.items() if name != DEVICE}
    for name, value in numbers.items():
        where, known = f"{file}: {name}", ", ".join(NUMBERS)
        if name not in NUMBERS:
            raise ConfigError(Problem(where, "an unknown name", f"one of {known}", "Correct or remove it."))
        require_number(where, value, "a number above 0")
    device = content.get(DEVICE)
    if not isinstance(device, str) or not device:
        expected = "the name of the GPU that was measured"
        raise ConfigError(Problem(f"{file}: {DEVICE}", repr(device), expected, "Add it."))
    given = {name: float(value) for name, value in numbers.items()}
    return GpuRates(**given, device=device, measured=tuple(given), file=str(file))


def write_rates(file: Path, device: str, numbers: Mapping[str, float]) -> None:
    """Write measured numbers. Numbers of the same device that the file already has are kept."""
    unknown = [name for name in numbers if name not in NUMBERS]
    assert not unknown, f"{unknown} are not fields of GpuRates"
    found = _read_object(file) if file.exists() else {}
    kept = found if found.get(DEVICE) == device else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({DEVICE: device, **kept, **numbers}, indent=1) + "\n", encoding="utf-8")


def _read_object(file: Path) -> dict[str, Any]:
    expected, action = "a JSON object of numbers", "Name the rates.json that tools.gpu_machine wrote."
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(str(file), f"{error}", expected, action)) from error
    if not isinstance(content, dict):
        raise ConfigError(Problem(str(file), type(content).__name__, expected, action))
    return content
