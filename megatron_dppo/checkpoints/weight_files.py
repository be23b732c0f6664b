"""Chooses the files of a Hugging Face folder that contain the weights, and refuses two sets of them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from megatron_dppo.checkpoints.checkpoint_folder import is_megatron_checkpoint
from megatron_dppo.errors import ConversionError, Problem

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ADAPTER = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin")
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")


class WeightFilesError(ConversionError):
    """The files of a folder are not one complete set of weights; `problem` describes why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True)
class WeightFiles:
    """Files of a Hugging Face folder.

    Attributes:
        read: Names of the files that hold the weights.
        ignored: Names of files with weights that are not read: pickles, and files that the index does not name.
    """

    read: tuple[str, ...]
    ignored: tuple[str, ...]


def weight_files(folder: Path, named: Iterable[str] | None) -> WeightFiles:
    """Choose the files that contain a folder's weights, only by their names.

    Args:
        folder: A Hugging Face folder.
        named: Files that the folder's index names. None if there is no index.

    Raises:
        WeightFilesError: There are no safetensors, a file is missing, there are two sets of weights, or the
            folder has an adapter in addition to a model's weights.
    """
    there = sorted(file.name for file in folder.glob("*.safetensors") if file.is_file())
    adapter = [name for name in _ADAPTER if (folder / name).is_file()]
    if adapter:
        expected = "a model's weights alone: an adapter is not applied when a model is read"
        action = "Move the adapter to another folder, or add it with megatron-dppo convert merge-adapter."
        raise WeightFilesError(Problem(str(folder), f"{_listed(adapter)}, an adapter,", expected, action))
    found = _without_index(folder, there) if named is None else _of_index(folder, there, sorted(set(named)))
    if isinstance(found, Problem):
        raise WeightFilesError(found)
    others = [name for name in there if name not in found]
    pickles = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    return WeightFiles(tuple(found), (*others, *pickles))


def _of_index(folder: Path, there: Sequence[str], named: Sequence[str]) -> Sequence[str] | Problem:
    missing = [name for name in named if name not in there]
    others = [files for files in _sets(name for name in there if name not in named) if not _lacking(files)]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        found = f"{INDEX}, which names {_listed(missing)}: {len(missing)} of {len(named)} files {are} not there"
        action = "Download the missing files."
        if others:
            found += f", and {_listed(others[0])} is, which it does not name"
            action = (
                f"Remove {INDEX} if {_listed(others[0])} has the model. Otherwise download the missing files."
            )
        return Problem(str(folder), found, "the files of the index", action)
    if others:
        found = f"two sets of weights, {_dated(folder, others[0])} and {_dated(folder, named)}"
        expected = "one, because programs differ in the set that they read"
        action = f"Remove {_listed(others[0])}, or remove {INDEX} and the files that it names."
        return Problem(str(folder), found, expected, action)
    return named


def _without_index(folder: Path, there: Sequence[str]) -> Sequence[str] | Problem:
    if not there and is_megatron_checkpoint(folder):
        action = f"Run megatron-dppo convert to-hf --megatron {folder} --out NEW, and name NEW."
        return Problem(str(folder), "a Megatron checkpoint", "a Hugging Face folder", action)
    if not there:
        expected = "a Hugging Face checkpoint in that format (pickled .bin files are not read)"
        return Problem(str(folder), "no *.safetensors files", expected, "Save it again with save_pretrained.")
    sets = _sets(there)
    whole = [files for files in sets if not _lacking(files)]
    if len(whole) > 1:
        found = f"{len(whole)} sets of weights and no {INDEX}: {' and '.join(_dated(folder, x) for x in whole)}"
        return Problem(str(folder), found, "one set", "Remove the files of the others.")
    torn = next((files for files in sets if _lacking(files)), None)
    if torn is not None:
        action = f"Remove {_listed(torn)} if {_listed(whole[0])} has the model." if whole else "Download them."
        found = f"{_listed(torn)} without {_listed(_lacking(torn))}"
        return Problem(str(folder), found, "all files of a set", action)
    return there


def _sets(names: Iterable[str]) -> list[list[str]]:
    """Return the files that make up a checkpoint by their names: `model.safetensors`, and numbered shards."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        shard = _SHARD.fullmatch(name)
        if name == SINGLE or (shard is not None and not name.startswith("consolidated")):
            found.setdefault((shard[1], shard[3]) if shard is not None else (name, ""), []).append(name)
    return list(found.values())


def _lacking(files: Sequence[str]) -> list[str]:
    """Return the names of the shards that a set lacks."""
    shards = [match for match in map(_SHARD.fullmatch, files) if match is not None]
    if not shards:
        return []
    prefix, width, count = shards[0][1], len(shards[0][2]), shards[0][3]
    there = {int(match[2]) for match in shards}
    first = 0 if 0 in there else 1
    numbers = (number for number in range(first, first + int(count)) if number not in there)
    return [f"{prefix}-{number:0{width}d}-of-{count}.safetensors" for number in numbers]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]} ({len(names)} files)"


def _dated(folder: Path, names: Sequence[str]) -> str:
    newest = max((folder / name).stat().st_mtime for name in names)
    return f"{_listed(names)} (written {datetime.fromtimestamp(newest).isoformat(' ', 'minutes')})"
