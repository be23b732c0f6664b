"""Opens data sets as rows: a local file, a local folder, or a name on the Hugging Face hub."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, cast

from megatron_dppo.data.prompts.rows import SUFFIXES, each_row, fault, read_columns
from megatron_dppo.errors import DataError

Row = Mapping[str, object]


@dataclass(frozen=True)
class Source:
    """An opened data set. Its rows can be read only once."""

    name: str
    columns: Sequence[str]
    rows: Iterable[tuple[int, Row | DataError]]  # (row number from 1, row); line numbers of a .jsonl file
    num_rows: int | None  # None if it is not known before reading


def open_source(name: str, configs: Sequence[str] = (), split: str = "train") -> Source:
    """Open a data set.

    Args:
        name: A .jsonl or .parquet file, read as training reads it; a folder that `datasets` wrote or that
            contains data files; or a name on the hub. `datasets` reads folders and names.
        configs: Configurations to read one after the other; ("all",) for all.
        split: Split of a folder or of a data set on the hub.

    Raises:
        DataError: The file, configuration or split does not exist or cannot be read, or the hub cannot be
            reached.
    """
    path = Path(name)
    if path.is_file() and path.suffix not in SUFFIXES:
        found, expected = (
            f"{name}",
            f"a file that ends in {' or '.join(SUFFIXES)}, a folder, or a name on the hub",
        )
        raise fault("--source", found, expected, "Convert the file, or name the folder that contains it.")
    if path.is_file() or path.suffix in SUFFIXES:
        return Source(name, read_columns(path), each_row(path), None)
    datasets: Any = import_module("datasets")
    action = "Check --source, --config and --split; offline, give --source a file that was downloaded before."
    try:
        parts = _parts(datasets, name, configs, split)
        columns = _columns(parts[0])
    except (ValueError, OSError, KeyError) as error:
        found = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise fault(f"--source {name}", found, "a data set that opens", action) from error
    counts = [getattr(part, "num_rows", None) for part in parts]
    total = None if None in counts else sum(cast(list[int], counts))
    return Source(name, columns, enumerate(_read(name, parts), start=1), total)


def _parts(datasets: Any, name: str, configs: Sequence[str], split: str) -> list[Any]:
    path = Path(name)
    if (path / "dataset_dict.json").is_file():
        return [datasets.load_from_disk(name)[split]]
    if (path / "state.json").is_file():
        return [datasets.load_from_disk(name)]
    names = datasets.get_dataset_config_names(name) if list(configs) == ["all"] else configs
    return [
        datasets.load_dataset(name, config, split=split, streaming=True)
        for config in cast(Iterable[str | None], names or [None])
    ]


def _columns(part: Any) -> list[str]:
    """Return the columns of a part, from its metadata or else from its first row."""
    return cast(list[str], part.column_names or list(next(iter(part))))


def _read(name: str, parts: Sequence[Any]) -> Iterator[Row]:
    try:
        yield from cast(Iterable[Row], chain.from_iterable(parts))
    except (ValueError, OSError) as error:
        action = "Try again, or give --source a file that was downloaded before."
        raise fault(
            f"--source {name}", f"{type(error).__name__}: {error}", "rows to the end", action
        ) from error
