"""The facts that rules read from the disk and the launcher, and the ordered registry of rules."""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from tqdm import tqdm

from megatron_dppo.architectures.registry import read_model_sizes
from megatron_dppo.architectures.sizes import ModelSizes, architecture_of, config_file, read_model_config
from megatron_dppo.checkpoints.checkpoint_folder import SavedRun, saved_run
from megatron_dppo.config.rollout import SingleTurnSource
from megatron_dppo.config.schema import Config
from megatron_dppo.data.prompts.prompts import read_columns
from megatron_dppo.data.prompts.survey import Survey, survey
from megatron_dppo.errors import ConfigError, DataError, Problem
from megatron_dppo.runtime.libraries import Library
from megatron_dppo.runtime.process import gpu_libraries
from megatron_dppo.types import Prompt

_KEY = ".prompts"
TRAINING = "data"
"""Section of the training prompts. Evaluation sets have `evaluation.sets.<name>`."""


@dataclass(frozen=True)
class Facts:
    """The facts that rules judge."""

    config: Config
    world_size: int
    model: Mapping[str, Any] | Problem  # config.json
    sizes: ModelSizes | Problem
    columns: Mapping[str, list[str] | Problem]  # of the files of prompts, by the key that names one file
    transformer_engine: Library | None  # only if the config uses it: importing it takes seconds
    deep_ep: Library | None = None  # only if the config uses it
    saved: SavedRun | None = None  # the run that would be resumed
    accepts_changes: bool = False  # whether a resume may change the experiment

    @property
    def architecture(self) -> str | None:
        """The model's architecture, or None if its config.json could not be read."""
        return None if isinstance(self.model, Problem) else architecture_of(self.model)

    @property
    def model_sizes(self) -> ModelSizes | None:
        """The model's sizes, or None if they could not be read."""
        return None if isinstance(self.sizes, Problem) else self.sizes

    @property
    def is_prompt_what_a_model_reads(self) -> bool:
        """Whether conversations start with the prompt itself, not with a text that user code makes from it."""
        return self.config.rollout.source == SingleTurnSource()

    @cached_property
    def tokenizer(self) -> Any | Problem | None:
        """The model's tokenizer, or None if its folder has none."""
        file = config_file(self.config.model.load)
        if file is None or isinstance(self.model, Problem):
            return None
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            found = f"a tokenizer in {file.parent} that does not load ({type(error).__name__}: {error})"
            action = "Copy the model's tokenizer files again, next to its config.json."
            return Problem("model.load", found, "a tokenizer that transformers loads", action)

    @property
    def usable_tokenizer(self) -> Any | None:
        """The model's tokenizer, or None if its folder has none, or one that does not load."""
        return None if isinstance(self.tokenizer, Problem) else self.tokenizer

    @cached_property
    def surveys(self) -> Mapping[str, Survey]:
        """The survey of each file of prompts, by the key that names it, without files that cannot be read."""
        found: dict[Path, Survey] = {}
        files = {key: path for key, path in prompt_files(self.config).items() if key in self._readable}
        for path in files.values():
            if path not in found:
                with contextlib.suppress(DataError):  # about its columns, which another rule reports
                    found[path] = self._survey(path)
        return {key: found[path] for key, path in files.items() if path in found}

    def surveys_of(self, section: str) -> list[Survey]:
        """Return the surveys of a section's files, in the order of the files."""
        return [found for key, found in self.surveys.items() if section_of(key) == section]

    def first_prompt(self, section: str) -> Prompt | None:
        """Return the first prompt of a section's files that can be read."""
        return next((found.first for found in self.surveys_of(section) if found.first is not None), None)

    @property
    def _readable(self) -> set[str]:
        return {key for key, columns in self.columns.items() if not isinstance(columns, Problem)}

    def _survey(self, path: Path) -> Survey:
        data = self.config.data
        return survey(
            path,
            data.prompt_column,
            data.answer_column,
            self.usable_tokenizer if self.is_prompt_what_a_model_reads else None,
            data.max_prompt_tokens,
            lambda rows: _with_progress(rows, path),
        )

    @property
    def free_bytes(self) -> int:
        """Free bytes on the disk of the run folder."""
        return shutil.disk_usage(nearest_folder(self.config.run.folder)).free


def gather_facts(config: Config, world_size: int, *, accepts_changes: bool = False) -> Facts:
    """Gather the facts that rules need: config.json, columns of the prompt files, libraries, the saved run."""
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
    """Read the facts for rules that need only the config: the model's config.json, and nothing else."""
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
    """Return the files of prompts by the key that names one, such as `data.prompts` or `data.prompts[1]`."""
    sets = {f"evaluation.sets.{name}": own.prompts for name, own in config.evaluation.used_sets.items()}
    return {
        f"{section}{_KEY}[{number}]" if len(files) > 1 else f"{section}{_KEY}": file.path
        for section, files in {TRAINING: config.data.prompts, **sets}.items()
        for number, file in enumerate(files)
    }


def section_of(key: str) -> str:
    """Return the section of the key of a file of prompts: "data", or "evaluation.sets.<name>"."""
    return key.rpartition(_KEY)[0]


def nearest_folder(folder: Path) -> Path:
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
    """Show a progress bar on a terminal, if a file takes more than a moment."""
    return tqdm(rows, desc=f"reading {path}", unit=" prompts", disable=None, leave=False, delay=2)


Check = Callable[[Config, Facts], Iterable[Problem]]
Need = Literal["config", "machine", "data", "trial", "now"]
"""Input of a rule, which decides the commands that run the rule.

config: only the config, the model's config.json and the number of processes, so that `plan` runs the rule too.
machine: other files, and libraries. data: every row of the prompt files. trial: the result of user code, or of
a library, in a separate process. now: the present state of another process, which `train` finds out by itself.
"""


@dataclass(frozen=True)
class Rule:
    """A condition on the config.

    Attributes:
        id: A short name, unique.
        description: The condition, in one sentence.
        check: Function that yields a `Problem` for each fault. It yields none if its input could not be read,
            because the rule about that input reports it.
        needs: Input of the rule, which decides the commands that run it.
    """

    id: str
    description: str
    check: Check
    needs: Need = "config"


_rules: dict[str, Rule] = {}
RULES: Mapping[str, Rule] = MappingProxyType(_rules)
"""Every rule, in the order in which problems are reported."""


def rule(id: str, needs: Need = "config") -> Callable[[Check], Check]:
    """Register a function as a rule; the docstring's first line is the description."""

    def register(function: Check) -> Check:
        assert id not in _rules, f"rule {id} is registered twice"
        assert function.__doc__, f"rule {id} has no description"
        _rules[id] = Rule(id, function.__doc__.splitlines()[0], function, needs)
        return function

    return register
