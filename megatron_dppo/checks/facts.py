"""Facts that rules read from the disk and the launcher, each gathered once and on demand."""

import contextlib
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_dppo.architectures.registry import read_model_sizes
from megatron_dppo.architectures.sizes import ModelSizes, architecture_of, config_file, read_model_config
from megatron_dppo.checkpoints.checkpoint_folder import SavedRun, saved_run
from megatron_dppo.config.schema import Config
from megatron_dppo.data.prompts.prompts import read_columns
from megatron_dppo.data.prompts.survey import Survey, survey
from megatron_dppo.errors import ConfigError, DataError, Problem
from megatron_dppo.runtime.libraries import Library
from megatron_dppo.runtime.process import gpu_libraries

TRAINING = "data.prompts"
"""The key of the training prompts; those of evaluation sets are `evaluation.sets.<name>.prompts`."""


@dataclass(frozen=True)
class Facts:
    """What was found; nothing here is wrong or right yet."""

    config: Config
    world_size: int
    model: Mapping[str, Any] | Problem  # config.json
    sizes: ModelSizes | Problem
    columns: Mapping[str, list[str] | Problem]  # of the files of prompts, by the key that names one
    transformer_engine: Library | None  # where the config asks for it: importing it takes seconds
    deep_ep: Library | None = None  # where the config asks for it
    saved: SavedRun | None = None  # what a resume would take
    accepts_changes: bool = False  # whether a resume may change the experiment

    @property
    def architecture(self) -> str | None:
        """The model's architecture, where its config.json could be read."""
        return None if isinstance(self.model, Problem) else architecture_of(self.model)

    @property
    def model_sizes(self) -> ModelSizes | None:
        """The model's sizes, where they could be read."""
        return None if isinstance(self.sizes, Problem) else self.sizes

    @property
    def is_prompt_what_a_model_reads(self) -> bool:
        """Whether conversations open with the prompt itself, not with what user code makes of it."""
        return self.config.rollout.environment == "single_turn" and self.config.rollout.generate is None

    @cached_property
    def tokenizer(self) -> Any | Problem | None:
        """The model's tokenizer; none where its folder has none."""
        file = config_file(self.config.model.load)
        if file is None or isinstance(self.model, Problem):
            return None
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            found = f"a tokenizer in {file.parent} that does not load ({type(error).__name__}: {error})"
            action = "Copy the model's tokenizer files beside its config.json again."
            return Problem("model.load", found, "a tokenizer that transformers loads", action)

    @cached_property
    def surveys(self) -> Mapping[str, Survey]:
        """What the files of prompts hold, by the key that names one; those that cannot be read are left out."""
        found: dict[Path, Survey] = {}
        files = {key: path for key, path in prompt_files(self.config).items() if key in self._readable}
        for path in files.values():
            if path not in found:
                with contextlib.suppress(DataError):  # of its columns, which a rule of their own reports
                    found[path] = self._survey(path)
        return {key: found[path] for key, path in files.items() if path in found}

    @property
    def _readable(self) -> set[str]:
        return {key for key, columns in self.columns.items() if not isinstance(columns, Problem)}

    def _survey(self, path: Path) -> Survey:
        data = self.config.data
        tokenizer = self.tokenizer if self.is_prompt_what_a_model_reads else None
        return survey(
            path,
            data.prompt_column,
            data.answer_column,
            None if isinstance(tokenizer, Problem) else tokenizer,
            data.max_prompt_tokens,
            lambda rows: _with_progress(rows, path),
        )

    @property
    def free_bytes(self) -> int:
        """What is free where the run folder is, or will be."""
        return shutil.disk_usage(existing(self.config.run.folder)).free


def gather_facts(config: Config, world_size: int, *, accepts_changes: bool = False) -> Facts:
    """Find out what rules need: config.json, columns of the prompt files, a library, the run to resume."""
    is_asked_for = config.model.layer_spec == "transformer_engine"
    is_flex = config.megatron.get("moe_token_dispatcher_type") == "flex"
    return replace(
        model_facts(config, world_size),
        columns={key: _columns(key, path) for key, path in prompt_files(config).items()},
        transformer_engine=gpu_libraries().transformer_engine if is_asked_for else None,
        deep_ep=gpu_libraries().deep_ep if is_flex else None,
        saved=saved_run(config.run.folder / "checkpoints") if config.checkpoint.resume else None,
        accepts_changes=accepts_changes,
    )


def model_facts(config: Config, world_size: int) -> Facts:
    """Read what rules that need the config alone ask for: the model's config.json, and nothing else."""
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
    return Facts(config, world_size, model, sizes, columns={}, transformer_engine=None)


def prompt_files(config: Config) -> dict[str, Path]:
    """Return the files of prompts by the key that names one."""
    sets = config.evaluation.used_sets
    held_out = {f"evaluation.sets.{name}.prompts": own.prompts for name, own in sets.items()}
    return {TRAINING: config.data.prompts, **held_out}


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _columns(key: str, path: Path) -> list[str] | Problem:
    try:
        return read_columns(path)
    except DataError as error:
        if error.problem is None:
            return Problem(key, str(error), "a file of prompts", "Name another file.")
        return replace(error.problem, where=key, found=f"{error.problem.where}: {error.problem.found}")


def _with_progress(rows: Iterable[Any], path: Path) -> Iterable[Any]:
    """On a terminal, a bar for files that take longer than moments."""
    return tqdm(rows, desc=f"reading {path}", unit=" prompts", disable=None, leave=False, delay=2)
