"""What rules need from the disk and the launcher, read once."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.actor.layout import ModelSizes, architecture_of, read_model_config, read_model_sizes
from megatron_dppo.config.schema import Config
from megatron_dppo.data.prompts import read_columns
from megatron_dppo.errors import ConfigError, DataError, Problem
from megatron_dppo.libraries import Library
from megatron_dppo.runtime import gpu_libraries


@dataclass(frozen=True)
class Facts:
    """What was found; nothing here is wrong or right yet."""

    world_size: int
    model: Mapping[str, Any] | Problem  # config.json
    sizes: ModelSizes | Problem
    columns: Mapping[str, list[str] | Problem]  # of the files of prompts, by the key that names one
    transformer_engine: Library | None  # where the config asks for it: importing it takes seconds

    @property
    def architecture(self) -> str | None:
        """The model's architecture, where its config.json could be read."""
        return None if isinstance(self.model, Problem) else architecture_of(self.model)

    @property
    def model_sizes(self) -> ModelSizes | None:
        """The model's sizes, where they could be read."""
        return None if isinstance(self.sizes, Problem) else self.sizes


def gather_facts(config: Config, world_size: int) -> Facts:
    """Find out what the rules need: config.json, columns of the prompt files, a library that is asked for."""
    model: Mapping[str, Any] | Problem
    sizes: ModelSizes | Problem
    try:
        model = read_model_config(config.model.load)[1]
    except ConfigError as error:
        model = error.problems[0]
    try:
        sizes = read_model_sizes(config.model.load)
    except ConfigError as error:
        sizes = error.problems[0]
    held_out = {f"evaluation.sets.{name}.prompts": own.prompts for name, own in config.evaluation.sets.items()}
    files = {"data.prompts": config.data.prompts, **held_out}
    columns = {key: _columns(key, path) for key, path in files.items()}
    is_asked_for = config.model.layer_spec == "transformer_engine"
    transformer_engine = gpu_libraries().transformer_engine if is_asked_for else None
    return Facts(world_size, model, sizes, columns, transformer_engine)


def _columns(key: str, path: Path) -> list[str] | Problem:
    try:
        return read_columns(path)
    except DataError as error:
        return Problem(key, f"{path}, which does not serve", "a file of prompts", str(error))
