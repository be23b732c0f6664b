"""Reads rows of .jsonl and .parquet files, and checks their cells. Every error names its row."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from megatron_dppo.errors import DataError, Problem, did_you_mean
from megatron_dppo.runtime.files import each_line

SUFFIXES = (".jsonl", ".parquet")
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
        close = difflib.get_close_matches(path.suffix, SUFFIXES, n=1)
        advice = "megatron-dppo prepare-data converts data sets."
        hint = f"Is it {path.with_suffix(close[0])}?" if close else advice
        raise fault(str(path), f"suffix {path.suffix!r}", "a .jsonl or .parquet file", hint)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise fault(str(path), found, "a prompt file", "Check the path, relative to the working directory.")
    if path.suffix == ".parquet":
        metadata = _parquet_file(path)
        columns, is_empty = cast(list[str], metadata.schema_arrow.names), metadata.metadata.num_rows == 0
    else:
        columns = _json_columns(path)
        is_empty = columns is None
    if is_empty:
        raise fault(str(path), "no rows", "at least one prompt", "Check how the file was written.")
    return columns or []


def _json_columns(path: Path) -> list[str] | None:
    """Return the keys of the first lines with a JSON object, or `None` if the file has no lines.

    Raises:
        DataError: No line of the file has a JSON object.
    """
    columns, num_rows, first_fault = dict[str, None](), 0, None
    for _, row in each_line(path):
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
    raise fault(where, f"{shown(value)} as {what}", "a string or an integer", action)


def missing_column(
    where: str, column: str, columns: Sequence[str], keys: Sequence[str] = CONFIG_KEYS
) -> DataError:
    """Return the error for a missing column. It suggests the closest name, or else the settings to correct."""
    action = did_you_mean(column, columns, f"Correct {' and '.join(keys)}, or the row.")
    return fault(where, f"columns {list(columns)}", f"a column {column!r}", action)


def shown(value: Any) -> str:
    """Return a cell's type and the beginning of its value, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"


def fault(where: str, found: str, expected: str, action: str) -> DataError:
    """Return the error for a fault in a prompt file."""
    return DataError(Problem(where, found, expected, action))
