"""Reads the rows of files and of published data sets, finds their columns, and checks their cells.

Every error names its row.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, cast

from megatron_dppo.errors import DataError, Problem, did_you_mean
from megatron_dppo.runtime.files import each_line

SUFFIXES = (".jsonl", ".parquet")
SOURCES = (
    "a file that ends in .jsonl, .csv or .tsv, also with .gz, .bz2 or .xz after it, or in .parquet, a folder, "
    "or a name on the hub"
)
"""What `prepare-data` reads. Training reads `SUFFIXES`."""
_COMPRESSED: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_NUM_ROWS_WITH_COLUMNS = 100  # rows of a .jsonl file that are searched for columns

CONFIG_KEYS = ("data.prompt_column", "data.answer_column")
"""Config settings that name the prompt and answer columns."""


def read_columns(path: Path) -> list[str]:
    """Read the columns of a file: from the Parquet schema, or from the keys of the first JSON lines.

    Lines without a JSON object are skipped, unless no line has one.

    Raises:
        DataError: The file is missing, neither .jsonl nor .parquet, without a valid line, or empty.
    """
    if path.suffix not in SUFFIXES:
        advice = (
            "megatron-dppo prepare-data --source FILE converts .csv, .tsv and compressed files, and data sets."
        )
        hint = did_you_mean(path.suffix, SUFFIXES, advice, lambda suffix: str(path.with_suffix(suffix)))
        raise fault(str(path), f"suffix {path.suffix!r}", "a .jsonl or .parquet file", hint)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise fault(str(path), found, "a prompt file", "Check the path, relative to the working directory.")
    if path.suffix == ".parquet":
        metadata = _parquet_file(path)
        columns, is_empty = cast(list[str], metadata.schema_arrow.names), metadata.metadata.num_rows == 0
    else:
        columns = _json_columns(each_line(path))
        is_empty = columns is None
    if is_empty:
        raise fault(str(path), "no rows", "at least one prompt", "Check how the file was written.")
    return columns or []


def _json_columns(rows: "Iterable[tuple[int, Row | DataError]]") -> list[str] | None:
    """Return the keys of the first lines with a JSON object, or `None` if there are no lines.

    Raises:
        DataError: No line of the file has a JSON object.
    """
    columns, num_rows, first_fault = dict[str, None](), 0, None
    for _, row in rows:
        if isinstance(row, DataError):
            first_fault = first_fault or row
            continue
        columns.update(dict.fromkeys(row))
        num_rows += 1
        if num_rows == _NUM_ROWS_WITH_COLUMNS:
            break
    if not num_rows and first_fault is not None:
        raise first_fault
    return list(columns) if num_rows else None


def each_row(path: Path) -> Iterator[tuple[int, Mapping[str, object] | DataError]]:
    """Yield (row number, row or error). Rows count from 1; in a .jsonl file the number is the line number."""
    if path.suffix == ".jsonl":
        return each_line(path)
    batches = (cast(list[dict[str, object]], batch.to_pylist()) for batch in _parquet_file(path).iter_batches())
    return enumerate((row for batch in batches for row in batch), start=1)


def _parquet_file(path: Path) -> Any:
    """Open a pyarrow ParquetFile. pyarrow has no type stubs, so `Any` ends here and callers cast."""
    parquet: Any = import_module("pyarrow.parquet")
    try:
        return parquet.ParquetFile(path)
    except ValueError as error:  # pyarrow.ArrowInvalid
        action = "Write the file again; it may have been cut off."
        raise fault(str(path), str(error), "a Parquet file", action) from error


def text_of(where: str, what: str, value: object) -> str:
    """Return a cell's text: a string, or an integer's decimal digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    action = "Convert the column to strings."
    raise fault(where, f"{describe_cell(value)} as {what}", "a string or an integer", action)


def answer_of(where: str, value: object) -> tuple[str, Any]:
    """Return the text of an answer's cell, and its JSON value if it is no text."""
    if isinstance(value, str):
        return value, None
    try:
        label = json.loads(json.dumps(value, allow_nan=False))
        if label is None:
            raise TypeError
    except (TypeError, ValueError) as error:
        action = "Convert the column to strings."
        found = f"{describe_cell(value)} as the answer"
        raise fault(
            where, found, "a text, a number, a truth value, or a list or an object of these", action
        ) from error
    return (str(label) if type(label) is int else json.dumps(label, ensure_ascii=False)), label


def missing_column(
    where: str, column: str, columns: Sequence[str], keys: Sequence[str] = CONFIG_KEYS
) -> DataError:
    """Return the error for a missing column. It suggests the closest name, or else the settings to correct."""
    action = did_you_mean(column, columns, f"Correct {' and '.join(keys)}, or the row.")
    return fault(where, f"columns {list(columns)}", f"a column {column!r}", action)


def describe_cell(value: Any) -> str:
    """Return a cell's type and how its value begins, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"


def fault(where: str, found: str, expected: str, action: str) -> DataError:
    """Return the error for a fault in a prompt file."""
    return DataError(Problem(where, found, expected, action))


@dataclass(frozen=True)
class Schema:
    """Paths of the prompt and the answer: a column, or a column and its fields, joined by dots."""

    name: str
    prompt: str
    answer: str
    is_solution: bool = False  # the answer is in the last \boxed{} of a worked solution


# Schemas that training reads directly. The first one that fits is used.
TRAINING_SCHEMAS = (
    Schema("megatron_dppo", "prompt", "answer"),
    Schema("verl", "prompt", "reward_model.ground_truth"),
    Schema("slime", "prompt", "label"),
)

# Schemas that `megatron-dppo prepare-data` reads: also problems without an instruction.
PROBLEM_SCHEMAS = (
    *TRAINING_SCHEMAS,
    Schema("problem and answer", "problem", "answer"),
    Schema("Problem and Answer", "Problem", "Answer"),
    Schema("question and answer", "question", "answer"),
    Schema("problem and solution", "problem", "solution", is_solution=True),
)


def detect(columns: Iterable[str], schemas: Iterable[Schema], prompt: str | None = None) -> Schema | None:
    """Return the first schema with columns that all exist. `prompt` overrides the prompt column."""
    present = set(columns)
    for schema in schemas:
        wanted = prompt or schema.prompt
        if has(present, wanted) and has(present, schema.answer):
            return Schema(schema.name, wanted, schema.answer, schema.is_solution)
    return None


def has(columns: Iterable[str], path: str) -> bool:
    """Whether a path begins with one of the columns."""
    present = set(columns)
    return path in present or path.partition(".")[0] in present


def with_roots(*paths: str) -> frozenset[str]:
    """Return the paths, and the columns that they begin with."""
    return frozenset(paths) | {path.partition(".")[0] for path in paths}


def cell(row: Mapping[str, object], path: str) -> object:
    """Return the value at a path of a row.

    Raises:
        KeyError: The row has no such column, or the column has no such field.
    """
    if path in row:
        return row[path]
    column, _, field = path.partition(".")
    inner = row[column]
    if not field or not isinstance(inner, dict):
        raise KeyError(path)
    return cell(cast(dict[str, object], inner), field)


def spellings(schemas: Iterable[Schema]) -> str:
    """Return the known pairs of columns as text for messages."""
    return " or ".join(f"{schema.prompt} and {schema.answer}" for schema in schemas)


Row = Mapping[str, object]


@dataclass(frozen=True)
class DataSource:
    """An opened data set. Its rows can be read only once."""

    name: str
    columns: Sequence[str]
    rows: Iterable[tuple[int, Row | DataError]]  # (row number from 1, row); line numbers of a .jsonl file
    num_rows: int | None  # None if it is not known before reading


def open_source(name: str, configs: Sequence[str] = (), split: str = "train") -> DataSource:
    """Open a data set.

    Args:
        name: A .jsonl or .parquet file, read as training reads it; a table or a compressed file; a folder that
            `datasets` wrote or that contains data files; or a name on the hub. `datasets` reads the last two.
        configs: Configurations to read one after the other; ("all",) for all.
        split: Split of a folder or of a data set on the hub.

    Raises:
        DataError: The file, configuration or split does not exist or cannot be read, or the hub cannot be
            reached.
    """
    path = Path(name)
    if path.suffix in SUFFIXES:
        return DataSource(name, read_columns(path), each_row(path), None)
    if path.is_file():
        return _open_other_file(path)
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
    return DataSource(name, columns, enumerate(_read(name, parts), start=1), total)


def _open_other_file(path: Path) -> DataSource:
    """Open a table of text, or a compressed file. Cells of a table stay text: "007" is no number.

    Raises:
        DataError: The file is of another kind, cannot be read, or has no rows.
    """
    open_file = _COMPRESSED.get(path.suffix)
    kind = Path(path.stem).suffix if open_file else path.suffix
    if kind == ".jsonl" and open_file:
        rows = partial(each_line, path, open_file)
    elif kind in _DELIMITERS:
        rows = partial(_table_rows, path, open_file or Path.open, _DELIMITERS[kind])
    else:
        found = f"{path}, which ends in {path.suffix!r}"
        raise fault("--source", found, SOURCES, "Convert the file, or name the folder that contains it.")
    columns = _json_columns(_whole(path, rows()))
    if columns is None:
        raise fault(str(path), "no rows", "at least one prompt", "Check how the file was written.")
    return DataSource(str(path), columns, _whole(path, rows()), None)


def _table_rows(
    path: Path, open_file: Callable[..., Any], delimiter: str
) -> Iterator[tuple[int, Row | DataError]]:
    """Yield (row number from 1, row or error) of a table of text; the first line has the columns."""
    with io.TextIOWrapper(open_file(path, "rb"), "utf-8-sig", newline="") as lines:
        table: Iterator[list[str]] = csv.reader(lines, delimiter=delimiter, strict=True)
        columns = next(table, list[str]())
        if len({*columns}) < len(columns):
            raise fault(str(path), f"columns {columns}", "different names", "Correct the first line.")
        for number, cells in enumerate((cells for cells in table if cells), start=1):
            if len(cells) == len(columns):
                yield number, dict(zip(columns, cells, strict=True))
            else:
                found, action = f"{len(cells)} cells", "Put cells with a delimiter or a line break into quotes."
                yield number, fault(f"{path}, row {number}", found, f"{len(columns)}, one per column", action)


def _whole(path: Path, rows: Iterable[tuple[int, Row | DataError]]) -> Iterator[tuple[int, Row | DataError]]:
    """Yield the rows of a file.

    Raises:
        DataError: The file ends too early, or is not what its name says.
    """
    try:
        yield from rows
    except (OSError, EOFError, zlib.error, lzma.LZMAError, csv.Error, UnicodeDecodeError) as error:
        found = f"{type(error).__name__}: {error}"
        expected = "a complete file of the kind that its name ends with, in UTF-8"
        raise fault(str(path), found, expected, "Write the file again; it may have been cut off.") from error


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
