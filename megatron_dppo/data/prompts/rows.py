"""Reads rows of .jsonl and .parquet files, and checks their cells; every fault names its row."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from megatron_dppo.errors import DataError, Problem, did_you_mean
from megatron_dppo.runtime.jsonl import each_line, read_jsonl
from megatron_dppo.types import Message

_SUFFIXES = (".jsonl", ".parquet")


def read_columns(path: Path) -> list[str]:
    """Read the columns without the rows: from the Parquet schema, or the keys of the first JSON line.

    Raises:
        DataError: The file is missing, neither .jsonl nor .parquet, torn at its start, or holds no row.
    """
    if path.suffix not in _SUFFIXES:
        close = difflib.get_close_matches(path.suffix, _SUFFIXES, n=1)
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
        first = next(read_jsonl(path), None)
        columns, is_empty = list(first[1]) if first else [], first is None
    if is_empty:
        raise fault(str(path), "no rows", "at least one prompt", "Check how the file was written.")
    return columns


def read_rows(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield (number from 1, row); in a .jsonl file the number is the line's. `read_columns` comes first.

    Raises:
        DataError: A line of a .jsonl file is no JSON object.
    """
    for number, row in each_row(path):
        if isinstance(row, DataError):
            raise row
        yield number, row


def each_row(path: Path) -> Iterator[tuple[int, Mapping[str, object] | DataError]]:
    """Yield the rows of `read_rows`, or the problem with a row in its place."""
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
    raise fault(where, f"{_shown(value)} as {what}", "a string or an integer", action)


def prompt_of(where: str, value: object) -> str | tuple[Message, ...]:
    """Return a prompt cell: a non-empty string, or a non-empty list of {role, content} messages."""
    if isinstance(value, str) and value:
        return value
    messages: list[Message] = []
    for item in cast(list[object], value) if isinstance(value, list) else []:
        fields = cast(dict[str, object], item) if isinstance(item, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise _bad_prompt(where, f"message {_shown(item)}")
        messages.append(Message(role=role, content=content))
    if not messages:
        raise _bad_prompt(where, _shown(value))
    return tuple(messages)


def _bad_prompt(where: str, found: str) -> DataError:
    expected = "a non-empty string, or a non-empty list of messages with text 'role' and 'content'"
    action = "Correct the row, or name another data.prompt_column."
    return fault(where, f"{found} as the prompt", expected, action)


def missing_column(where: str, column: str, columns: Sequence[str]) -> DataError:
    """Return the error for a missing column, with the closest existing name."""
    action = did_you_mean(column, columns, "Set data.prompt_column and data.answer_column.")
    return fault(where, f"columns {list(columns)}", f"a column {column!r}", action)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"


def fault(where: str, found: str, expected: str, action: str) -> DataError:
    """Return the error for a fault in a file of prompts."""
    return DataError(Problem(where, found, expected, action))
