"""Reads a peft LoRA adapter, and adds it to the weights of a Hugging Face folder while they are read."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.conversion.sources import HuggingFaceSource
from megatron_dppo.errors import ConversionError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.(lora_A|lora_B)(?:\.weight|\.default\.weight)")
_UNLIKE_LORA: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (False, None),
    "target_parameters": (None, []),
}
"""Keys of adapter_config.json whose other values mean more than `W + scaling * B A`."""


@dataclass(frozen=True)
class PeftAdapter:
    """The pairs of a LoRA adapter.

    Attributes:
        folder: In peft's format.
        pairs: The factors' names, A and B, by the Hugging Face name of the weight that they update.
        config: adapter_config.json.
        weights: The factors.
    """

    folder: Path
    pairs: Mapping[str, tuple[str, str]]
    config: Mapping[str, Any]
    weights: HFWeights

    @classmethod
    def read(cls, folder: Path) -> "PeftAdapter":
        """Read an adapter folder: names and options.

        Raises:
            ConversionError: The folder is no adapter, or of more than LoRA.
        """
        try:
            config = json.loads((folder / CONFIG).read_text())
            method = config["peft_type"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConversionError(
                f"{folder / CONFIG}: {type(error).__name__}: {error}. Expected a folder as peft's "
                "save_pretrained writes it."
            ) from error
        odd = {key: config[key] for key, plain in _UNLIKE_LORA.items() if config.get(key) not in plain}
        if method != "LORA" or odd:
            raise ConversionError(
                f"{folder / CONFIG}: found peft_type {method!r} with {odd or 'no other option'}; expected "
                "plain 'LORA'. Merge the adapter with peft's merge_and_unload, which knows the other kinds."
            )
        weights = HFWeights(folder)
        return cls(folder, _pairs(weights), config, weights)

    def scaling(self, name: str, rank: int) -> float:
        """Return the scaling of a weight's update, as peft's config patterns define it."""
        module = name.removesuffix(".weight")
        alpha = _by_pattern(self.config.get("alpha_pattern") or {}, module, self.config["lora_alpha"])
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def _pairs(weights: HFWeights) -> dict[str, tuple[str, str]]:
    factors: dict[str, dict[str, str]] = {}
    for name in sorted(weights.names):
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise ConversionError(
                f"{weights.file_of(name)}: {name!r} is no factor of a linear's update. Expected names that end "
                "in lora_A.weight or lora_B.weight; merge the adapter with peft's merge_and_unload."
            )
        factors.setdefault(match[1].removeprefix(_PREFIX) + ".weight", {})[match[2]] = name
    for name, pair in factors.items():
        if len(pair) != 2:
            found = f"{weights.folder}: {name!r} has {next(iter(pair))} alone"
            raise ConversionError(f"{found}; expected both factors. Copy or download the adapter again.")
    return {name: (pair["lora_A"], pair["lora_B"]) for name, pair in factors.items()}


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that a module's name ends with, as peft matches them."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


class MergedSource(HuggingFaceSource):
    """The weights of a folder with an adapter's updates, computed as peft merges them on a CPU."""

    def __init__(self, weights: HFWeights, adapter: Path) -> None:
        """Match the adapter's names and shapes with the folder's.

        Raises:
            ConversionError: The adapter is of another model, or no plain LoRA.
        """
        super().__init__(weights)
        self._adapter = PeftAdapter.read(adapter)
        self.files = [*weights.files, *self._adapter.weights.files, adapter / CONFIG]
        shapes, factors = weights.shapes(), self._adapter.weights.shapes()
        for name, (a, b) in self._adapter.pairs.items():
            if name not in shapes:
                raise ConversionError(
                    f"{adapter / WEIGHTS}: {a!r} updates {name!r}, which {weights.folder} has not. "
                    "The adapter is of another model."
                )
            if (factors[b][0], factors[a][1]) != shapes[name] or factors[a][0] != factors[b][1]:
                raise ConversionError(
                    f"{adapter / WEIGHTS}: {b!r} {factors[b]} times {a!r} {factors[a]} does not fit {name!r} "
                    f"{shapes[name]}. The adapter is of another model."
                )

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield views of the mapped files, and new tensors where there is an update."""
        for name, weight in super().read(names):
            yield name, self._merged(name, weight) if name in self._adapter.pairs else weight

    def _merged(self, name: str, weight: Tensor) -> Tensor:
        lora_a, lora_b = (self._adapter.weights.tensor(factor).float() for factor in self._adapter.pairs[name])
        update = (lora_b @ lora_a) * self._adapter.scaling(name, lora_a.shape[0])
        return weight.clone().add_(update)
