"""Reads and writes JSON lines files: writes are atomic, and read errors name the number of a torn line."""

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from megatron_dppo.errors import DataError, Problem


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON object per line, atomically: readers see the old file or the complete new one."""
    write_whole(path, (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


def write_whole(path: Path, parts: Iterable[str]) -> None:
    """Write a text file atomically: readers see the old file or the complete new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # such as a full disk during a write
            error.filename = str(path)
        raise


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (line number from 1, object) of each line, except blank lines.

    Raises:
        DataError: A line is not UTF-8, not JSON (a torn write), or not a JSON object.
    """
    for number, row in each_line(path):
        if isinstance(row, DataError):
            raise row
        yield number, row


def each_line(path: Path) -> Iterator[tuple[int, dict[str, object] | DataError]]:
    """Yield (line number from 1, object) of each line that is not blank, or the fault of the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, _parse(path, number, line)
            except DataError as error:
                yield number, error


def _parse(path: Path, number: int, line: bytes) -> dict[str, object]:
    where = f"{path}, line {number}"
    expected = "one JSON object per line"
    excerpt = line.decode("utf-8", errors="replace").strip()
    excerpt = excerpt if len(excerpt) <= 60 else excerpt[:60] + "..."
    try:
        value: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        found, action = f"bytes that are not UTF-8 ({excerpt!r})", "Write the file again, as UTF-8."
        raise DataError(Problem(where, found, expected, action)) from error
    except ValueError as error:
        action = "Write the file again; a last line like this comes from a write that was cut off."
        raise DataError(Problem(where, f"{excerpt!r} ({error})", expected, action)) from error
    if not isinstance(value, dict):
        found = f"a JSON {type(cast(object, value)).__name__}"
        raise DataError(Problem(where, found, expected, "Put the row's fields into an object."))
    return cast(dict[str, object], value)
