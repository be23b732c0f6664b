"""Reads the rows of files and of published data sets, finds their columns, and checks their cells.

Every error names its row. `datasets` reads folders and the hub, but no single file, because it would change
values: a column has one type, so that 7 becomes 7.0 if another row has 0.5, and integers above 64 bits fail.
One torn line fails its complete file. In a table, rows with too few cells are filled up, and if all have one
too many, each cell moves to the column before it.
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
from importlib import import_module
from itertools import chain, islice
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
Row = Mapping[str, object]


def read_columns(path: Path) -> list[str]:
    """Read the columns of a file: from the Parquet schema, or from the keys of the first JSON lines.

    Lines without a JSON object are skipped, unless no line has one.
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
    return _columns_of(path)


def _columns_of(path: Path) -> list[str]:
    if path.suffix == ".parquet":
        file = _parquet_file(path)
        if file.metadata.num_rows:
            return cast(list[str], file.schema_arrow.names)
    else:
        rows = (row for _, row in each_row(path) if not isinstance(row, DataError))
        columns = dict.fromkeys(chain.from_iterable(islice(rows, _NUM_ROWS_WITH_COLUMNS)))
        _, first = next(iter(each_row(path)), (0, None))
        if isinstance(first, DataError) and not columns:
            raise first
        if first is not None:
            return list(columns)
    raise fault(str(path), "no rows", "at least one prompt", "Check how the file was written.")


def each_row(path: Path) -> Iterable[tuple[int, Row | DataError]]:
    """Return (row number, row or error) of each row. Rows count from 1; a .jsonl file has line numbers."""
    if path.suffix == ".jsonl":
        return each_line(path)
    if path.suffix != ".parquet":
        return _text_rows(path)
    batches = (cast(list[Row], batch.to_pylist()) for batch in _parquet_file(path).iter_batches())
    return enumerate((row for batch in batches for row in batch), start=1)


def _text_rows(path: Path) -> Iterator[tuple[int, Row | DataError]]:
    """Yield the rows of a table of text, or of a compressed file.

    The first line of a table has the columns. Its cells stay text: "007" is no number.
    """
    kind, open_file = _kind_of(path)
    try:
        if kind not in _DELIMITERS:
            yield from each_line(path, open_file)
            return
        with io.TextIOWrapper(open_file(path, "rb"), "utf-8-sig", newline="") as lines:
            table: Iterator[list[str]] = csv.reader(lines, delimiter=_DELIMITERS[kind], strict=True)
            columns = next(table, list[str]())
            if len({*columns}) < len(columns):
                raise fault(str(path), f"columns {columns}", "different names", "Correct the first line.")
            for number, cells in enumerate((cells for cells in table if cells), start=1):
                row: Row | DataError = dict(zip(columns, cells, strict=False))
                if len(cells) != len(columns):
                    action = "Put cells with a delimiter or a line break into quotes."
                    expected = f"{len(columns)}, one per column"
                    row = fault(f"{path}, row {number}", f"{len(cells)} cells", expected, action)
                yield number, row
    except (OSError, EOFError, zlib.error, lzma.LZMAError, csv.Error, UnicodeDecodeError) as error:
        found = f"{type(error).__name__}: {error}"
        expected = "a complete file of the kind that its name ends with, in UTF-8"
        raise fault(str(path), found, expected, "Write the file again; it may have been cut off.") from error


def _kind_of(path: Path) -> tuple[str, Callable[..., Any]]:
    """Return the suffix of a file, or of the file that is compressed in it, and the function that opens it."""
    if path.suffix in _COMPRESSED:
        return Path(path.stem).suffix, _COMPRESSED[path.suffix]
    return path.suffix, Path.open


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


def require_schema(
    where: str, columns: Sequence[str], schemas: Sequence[Schema], action: str, prompt: str | None = None
) -> Schema:
    """Return the schema that `detect` finds, or raise the error with the columns of all schemas."""
    schema = detect(columns, schemas, prompt)
    if schema is None:
        expected = " or ".join(f"{schema.prompt} and {schema.answer}" for schema in schemas)
        raise fault(where, f"columns {list(columns)}", f"columns {expected}", action)
    return schema


def has(columns: Iterable[str], path: str) -> bool:
    """Whether a path begins with one of the columns."""
    present = set(columns)
    return path in present or path.partition(".")[0] in present


def with_roots(*paths: str) -> frozenset[str]:
    """Return the paths, and the columns that they begin with."""
    return frozenset(paths) | {path.partition(".")[0] for path in paths}


def cell(where: str, row: Row, path: str, keys: Sequence[str] = CONFIG_KEYS) -> object:
    """Return the value at a path of a row, or raise the error for a missing column."""
    inner: Any = row
    rest = path
    while isinstance(inner, dict):
        if rest in inner:
            return cast(object, inner[rest])
        column, _, rest = rest.partition(".")
        inner = cast(Row, inner).get(column)
    raise missing_column(where, path, list(row), keys)


@dataclass(frozen=True)
class DataSource:
    """An opened data set. Its rows can be read only once."""

    name: str
    columns: Sequence[str]
    rows: Iterable[tuple[int, Row | DataError]]  # (row number from 1, row); line numbers of a .jsonl file


def open_source(name: str, configs: Sequence[str] = (), split: str = "train") -> DataSource:
    """Open a data set.

    Args:
        name: A .jsonl or .parquet file, read as training reads it; a table or a compressed file; a folder that
            `datasets` wrote or that contains data files; or a name on the hub. `datasets` reads the last two.
        configs: Configurations to read one after the other; ("all",) for all.
        split: Split of a folder or of a data set on the hub.
    """
    path = Path(name)
    if path.suffix in SUFFIXES:
        return DataSource(name, read_columns(path), each_row(path))
    if path.is_file():
        kind, open_file = _kind_of(path)
        if kind not in _DELIMITERS and (kind != ".jsonl" or open_file is Path.open):
            found = f"{path}, which ends in {path.suffix!r}"
            raise fault("--source", found, SOURCES, "Convert the file, or name the folder that contains it.")
        return DataSource(str(path), _columns_of(path), each_row(path))
    datasets: Any = import_module("datasets")
    try:
        parts = _parts(datasets, name, configs, split)
        columns = cast(list[str], parts[0].column_names or list(next(iter(parts[0]))))
    except (ValueError, OSError, KeyError) as error:
        found = f"{type(error).__name__}: {' '.join(str(error).split())}"
        action = (
            "Check --source, --config and --split; offline, give --source a file that was downloaded before."
        )
        raise fault(f"--source {name}", found, "a data set that opens", action) from error
    return DataSource(name, columns, enumerate(_read(name, parts), start=1))


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


def _read(name: str, parts: Sequence[Any]) -> Iterator[Row]:
    try:
        yield from cast(Iterable[Row], chain.from_iterable(parts))
    except (ValueError, OSError) as error:
        found, action = (
            f"{type(error).__name__}: {error}",
            "Try again, or give --source a file on this machine.",
        )
        raise fault(f"--source {name}", found, "rows to the end", action) from error
