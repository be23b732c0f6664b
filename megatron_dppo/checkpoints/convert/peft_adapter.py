"""LoRA adapters in peft's format: exported from Megatron checkpoints, or added to the weights of a folder."""

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_dppo.checkpoints.checkpoint_folder import is_megatron_checkpoint
from megatron_dppo.checkpoints.convert.sources import HuggingFaceSource, MegatronSource, trained_from
from megatron_dppo.checkpoints.hf_folder import HFWeights, whole_folder
from megatron_dppo.checkpoints.megatron_folder import stored_lora
from megatron_dppo.checkpoints.model_files import ADAPTER_CONFIG as CONFIG
from megatron_dppo.checkpoints.model_files import ADAPTER_WEIGHTS as WEIGHTS
from megatron_dppo.config.schema import LoraConfig
from megatron_dppo.errors import ConfigError, ConversionError, Problem
from megatron_dppo.runtime.files import save_tensors

logger = logging.getLogger(__name__)

_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.(lora_A|lora_B)(?:\.weight|\.default\.weight)")
_OFF = (None, False, (), "none")
_PLAIN: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        (
            # origin of the adapter, and its initialisation and training
            *("base_model_name_or_path", "revision", "peft_version", "task_type", "auto_mapping"),
            *("inference_mode", "lora_dropout", "eva_config", "megatron_core", "qalora_group_size"),
            # modules with factors, and their scales: compared with the factors, and read by `scaling`
            *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
            *("rank_pattern", "alpha_pattern"),
        ),
        lambda value: True,
    ),
    "peft_type": lambda value: value == "LORA",
    "r": lambda value: isinstance(value, int) and value > 0,
    "lora_alpha": lambda value: isinstance(value, int | float),
    "use_rslora": lambda value: value in (None, False, True),
    "init_lora_weights": lambda value: value in (None, False, True, "gaussian", "orthogonal", "eva"),
    "runtime_config": lambda value: not value or value == {"ephemeral_gpu_offload": False},
    "alora_invocation_tokens": lambda value: value is None,
}
"""Keys of adapter_config.json that are known to mean `W + scaling * B A`, with the test of a value.

Every other key, of this or of a newer peft, must be off: null, false, empty or "none". PiSSA, OLoRA, CorDA,
LoRA-GA and LoftQ change the base weights at initialisation. aLoRA, DoRA and others compute another update.
"""


@dataclass(frozen=True)
class PeftAdapter:
    """The pairs of a LoRA adapter.

    Attributes:
        folder: Adapter folder in peft's format.
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
        """Read an adapter folder: names and options."""
        try:
            config = json.loads((folder / CONFIG).read_text())
            config["peft_type"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConversionError(
                f"{folder / CONFIG}: {type(error).__name__}: {error}. Expected a folder as peft's "
                "save_pretrained writes it."
            ) from error
        odd = {key: value for key, value in config.items() if not _PLAIN.get(key, _is_off)(value)}
        lacking = [key for key in ("r", "lora_alpha") if key not in config]
        if odd or lacking:
            found = [*(f"{key} = {value!r}" for key, value in odd.items()), *(f"no {key}" for key in lacking)]
            raise ConversionError(
                f"{folder / CONFIG}: found {', '.join(found)}. Expected peft_type = 'LORA' and only "
                "options that are known to mean W + scaling * B A. If peft can merge this kind, use its "
                "merge_and_unload."
            )
        if not (folder / WEIGHTS).is_file():
            raise ConversionError(f"{folder}: no {WEIGHTS}. Expected the adapter's weights in this file.")
        weights = HFWeights(folder, files=(WEIGHTS,))
        adapter = cls(folder, _pairs(weights), config, weights)
        adapter._require_config_of_factors()
        return adapter

    def _require_config_of_factors(self) -> None:
        """Compare the factors with the modules and ranks in the config, from which peft builds its layers."""
        shapes = self.weights.shapes()
        for name, (a, _) in self.pairs.items():
            module, rank = name.removesuffix(".weight"), shapes[a][0]
            expected = _by_pattern(self.config.get("rank_pattern") or {}, module, self.config["r"])
            if rank != expected:
                raise ConversionError(
                    f"{self.folder / WEIGHTS}: {a!r} has rank {rank}; expected {expected}, as in {CONFIG}. "
                    "Copy or download the adapter again."
                )
            if not _is_target(module, self.config):
                raise ConversionError(
                    f"{self.folder / WEIGHTS}: {a!r} is of no module that {CONFIG} names. Expected "
                    "only factors of target_modules in layers_to_transform, because peft reads no others. "
                    "Correct the config."
                )

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


def _is_off(value: Any) -> bool:
    return (tuple(value) if isinstance(value, list | dict) else value) in _OFF


def _is_target(module: str, config: Mapping[str, Any]) -> bool:
    """Whether peft builds an adapter for a module, by its rules for the names."""
    names, chosen = config.get("target_modules"), config.get("layers_to_transform")
    if _is_named(module, config.get("exclude_modules")) or not _is_named(module, names):
        return False
    if chosen in (None, []) or isinstance(names, str) or module in (names or ()):
        return True
    patterns = config.get("layers_pattern") or [r"[^.]*"]
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        match = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module)
        if match is not None:
            return int(match[1]) in ([chosen] if isinstance(chosen, int) else chosen)
    return False


def _is_named(module: str, names: str | Sequence[str] | None) -> bool:
    if isinstance(names, str):
        return names == "all-linear" or re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names or ())


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that a module's name ends with, as peft matches them."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


class MergedSource(HuggingFaceSource):
    """The weights of a folder with an adapter's updates, computed as peft merges them on a CPU."""

    def __init__(self, weights: HFWeights, adapter: Path) -> None:
        """Match the adapter's names and shapes with the folder's."""
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
        """Yield views of the mapped files, or new tensors for weights with an update."""
        for name, weight in super().read(names):
            yield name, self._merge(name, weight) if name in self._adapter.pairs else weight

    def _merge(self, name: str, weight: Tensor) -> Tensor:
        lora_a, lora_b = (self._adapter.weights.tensor(factor).float() for factor in self._adapter.pairs[name])
        update = (lora_b @ lora_a) * self._adapter.scaling(name, lora_a.shape[0])
        return weight.clone().add_(update)


def write_peft_adapter(megatron: Path, out: Path, base: str) -> None:
    """Read the adapters of a checkpoint, and write them.

    Args:
        megatron: A checkpoint of a LoRA run.
        out: Folder to write.
        base: Name or folder of the base model, for the adapter's config. "" means the run's `model.load`.
    """
    source, options = MegatronSource(megatron), stored_lora(megatron)
    if options is None:
        raise ConversionError(f"{megatron} holds no LoRA adapters. Use to-hf for its weights.")
    named = _base_name(megatron, base)
    logger.info("reading %s", megatron)
    tensors: dict[str, Tensor] = {}
    for name, adapter in source.adapters():
        for factor, tensor in (("lora_A", adapter.lora_a), ("lora_B", adapter.lora_b)):
            tensors[f"{name.removesuffix('.weight')}.{factor}.weight"] = tensor.contiguous()
    write_adapter(tensors, options, out, named)


def _base_name(megatron: Path, base: str) -> str:
    named = base or str(trained_from(megatron) or "")
    if not named:
        logger.warning("%s is in no run's folder; --base would name the base model in the adapter", megatron)
    elif is_megatron_checkpoint(Path(named)):
        found = f"{named}, a Megatron checkpoint" + ("" if base else ", as the run's model.load")
        expected = "the name or folder of a Hugging Face model, which peft loads below the adapter"
        action = "Give the folder that it was converted from, or one that convert to-hf writes, as --base."
        raise ConfigError(Problem("--base", found, expected, action))
    return named


def write_adapter(tensors: Mapping[str, Tensor], options: LoraConfig, out: Path, base: str) -> None:
    """Write an adapter folder that peft loads; it appears completely or not at all.

    `base` names the base model for the reader of the adapter.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "target_modules": list(options.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    named = {_PREFIX + name: tensor for name, tensor in tensors.items()}
    with whole_folder(out) as unfinished:
        (unfinished / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        save_tensors(named, unfinished / WEIGHTS, metadata={"format": "pt"})
