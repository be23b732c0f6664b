"""Prompts: read from a file with every fault named, and streamed in an order that a resume continues."""

import difflib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch

from megatron_dppo.data.jsonl import read_jsonl
from megatron_dppo.errors import DataError, Problem
from megatron_dppo.types import Message, Prompt

_SUFFIXES = (".jsonl", ".parquet")


def load_prompts(path: Path, prompt_column: str, answer_column: str) -> list[Prompt]:
    """All prompts of a .jsonl or .parquet file, in its order.

    A prompt cell is a string, or a list of {role, content} messages; an answer cell is a string or an integer
    (taken as its decimal digits). Columns `id` and `source` are used where they are there; otherwise the id is
    the row number (the line number in a .jsonl file) and the source the file's name. Rows count from 1.

    Raises:
        DataError: The file is missing, of another kind, torn or empty, or a row lacks a column, holds another
            type, or repeats an id.
    """
    columns = read_columns(path)
    for column in (prompt_column, answer_column):
        if column not in columns:
            raise _missing_column(str(path), column, columns)
    prompts: list[Prompt] = []
    rows_by_id: dict[str, int] = {}
    for number, row in _rows(path):
        where = f"{path}, row {number}"
        for column in (prompt_column, answer_column):
            if column not in row:
                raise _missing_column(where, column, list(row))
        defaults = {"id": str(number), "source": path.stem}
        prompt = _prompt(where, row, (prompt_column, answer_column), defaults)
        first = rows_by_id.setdefault(prompt.id, number)
        if first != number:
            found = f"id {prompt.id!r}, which row {first} has too"
            raise _error(where, found, "a different id in each row", "Make ids unique, or drop the id column.")
        prompts.append(prompt)
    return prompts


def read_columns(path: Path) -> list[str]:
    """The file's columns, without reading its rows: the Parquet schema, or the keys of the first JSON line.

    Raises:
        DataError: The file is missing, neither .jsonl nor .parquet, torn at its start, or holds no row.
    """
    if path.suffix not in _SUFFIXES:
        close = difflib.get_close_matches(path.suffix, _SUFFIXES, n=1)
        hint = f"Is it {path.with_suffix(close[0])}?" if close else "tools/prepare_data.py converts data sets."
        raise _error(str(path), f"suffix {path.suffix!r}", "a .jsonl or .parquet file", hint)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise _error(str(path), found, "a prompt file", "Check the path, relative to the working directory.")
    if path.suffix == ".parquet":
        metadata = _parquet_file(path)
        columns, is_empty = cast(list[str], metadata.schema_arrow.names), metadata.metadata.num_rows == 0
    else:
        first = next(read_jsonl(path), None)
        columns, is_empty = list(first[1]) if first else [], first is None
    if is_empty:
        raise _error(str(path), "no rows", "at least one prompt", "Check how the file was written.")
    return columns


class PromptStream:
    """Prompts without end, epoch after epoch, from any cursor on.

    An epoch's order depends on (seed, epoch) only, so a stream made from a cursor continues exactly as the
    one that left it there. All ranks hold the same stream and take their share of what `next` returns.
    """

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, shuffle: bool, cursor: Mapping[str, int] | None = None
    ) -> None:
        """Start at `cursor`, or at the beginning.

        Raises:
            DataError: There are no prompts, or the cursor is none of a stream over this many prompts.
        """
        if not prompts:
            raise _error("prompts", "none", "at least one prompt", "Check data.prompts.")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch, self._index = _read_cursor(cursor, len(prompts))
        self._order = self._order_of(self._epoch)

    @property
    def cursor(self) -> dict[str, int]:
        """Where the next prompt comes from; as JSON in a checkpoint, all that resuming needs."""
        return {"epoch": self._epoch, "index": self._index}

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts; crosses epochs as often as needed, so one may come more than once."""
        return list(islice(self._endless(), n))

    def _endless(self) -> Iterator[Prompt]:
        while True:
            prompt = self._prompts[self._order[self._index]]
            self._index += 1
            if self._index == len(self._prompts):
                self._epoch, self._index = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            yield prompt

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._prompts))
        digest = hashlib.blake2b(f"{self._seed}/{epoch}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        order = torch.randperm(len(self._prompts), generator=generator)
        return cast(list[int], order.tolist())  # pyright: ignore[reportUnknownMemberType]


def _read_cursor(cursor: Mapping[str, int] | None, num_prompts: int) -> tuple[int, int]:
    if cursor is None:
        return 0, 0
    expected = f"{{'epoch': 0 or more, 'index': 0 to {num_prompts - 1}}} for {num_prompts} prompts"
    is_cursor = set(cursor) == {"epoch", "index"} and all(type(value) is int for value in cursor.values())
    if not is_cursor or cursor["epoch"] < 0 or not 0 <= cursor["index"] < num_prompts:
        action = "Resume with the prompt file that the run started with, or start a new run folder."
        raise _error("data cursor", repr(dict(cursor)), expected, action)
    return cursor["epoch"], cursor["index"]


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    batches = (cast(list[dict[str, object]], batch.to_pylist()) for batch in _parquet_file(path).iter_batches())
    return enumerate((row for batch in batches for row in batch), start=1)


def _parquet_file(path: Path) -> Any:
    """A pyarrow ParquetFile. pyarrow has no type stubs, so `Any` ends here and callers cast."""
    parquet: Any = import_module("pyarrow.parquet")
    try:
        return parquet.ParquetFile(path)
    except ValueError as error:  # pyarrow.ArrowInvalid
        action = "Write the file again; it may have been cut off."
        raise _error(str(path), str(error), "a Parquet file", action) from error


def _prompt(
    where: str, row: Mapping[str, object], columns: tuple[str, str], defaults: Mapping[str, str]
) -> Prompt:
    """One row as a prompt, given its (prompt, answer) columns and its id and source where it has none."""
    question, answer = (row[column] for column in columns)
    row_id, source = (_text(where, name, row.get(name, defaults[name])) for name in ("id", "source"))
    reference = _text(where, "the answer", answer)
    if isinstance(question, str) and question:
        return Prompt(row_id, reference, source, text=question)
    return Prompt(row_id, reference, source, messages=_messages(where, question))


def _text(where: str, what: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    action = "Convert the column to strings."
    raise _error(where, f"{_shown(value)} as {what}", "a string or an integer", action)


def _messages(where: str, value: object) -> tuple[Message, ...]:
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
    return _error(where, f"{found} as the prompt", expected, action)


def _missing_column(where: str, column: str, columns: Sequence[str]) -> DataError:
    close = difflib.get_close_matches(column, columns, n=1)
    action = f"Did you mean {close[0]!r}?" if close else "Set data.prompt_column and data.answer_column."
    return _error(where, f"columns {list(columns)}", f"a column {column!r}", action)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"


def _error(where: str, found: str, expected: str, action: str) -> DataError:
    return DataError(str(Problem(where, found, expected, action)))
