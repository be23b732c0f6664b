"""Prompts: read from a file with every fault named, and streamed in an order that a resume continues."""

import difflib
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch

from megatron_dppo.data.jsonl import read_jsonl
from megatron_dppo.errors import DataError, Problem
from megatron_dppo.types import DataCursor, Message, Prompt

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


@dataclass(frozen=True)
class Drawn:
    """A prompt, and where it stands in the stream."""

    place: int  # prompts of all epochs before it; the same after a resume
    prompt: Prompt


class PromptStream:
    """Prompts without end, epoch after epoch, from any cursor on.

    An epoch's order depends on (seed, epoch) only, so a stream made from a cursor continues exactly as the
    one that left it there. All ranks hold the same stream and take their share of what `draw` returns. What a
    rank takes out of turn, of what comes next, `pass_over` tells to the stream of every rank.
    """

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, shuffle: bool, cursor: DataCursor | None = None
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
        self._next, again = _read_cursor(cursor, len(prompts))
        self._again = deque(again)
        self._orders: dict[int, Sequence[int]] = {}

    @property
    def cursor(self) -> DataCursor:
        """Where the next prompts come from; as JSON in a checkpoint, all that resuming needs."""
        return self.cursor_with(())

    def cursor_with(self, open_places: Iterable[int]) -> DataCursor:
        """The cursor of a stream that gives these places once more, before all others."""
        epoch, index = divmod(self._next, len(self._prompts))
        again = [*sorted(open_places), *self._again]
        return {"epoch": epoch, "index": index} | ({"again": again} if again else {})

    def draw(self, n: int) -> list[Drawn]:
        """The next `n` prompts; crosses epochs as often as needed, so one may come more than once."""
        return [self._drawn(self._take()) for _ in range(n)]

    def next(self, n: int) -> list[Prompt]:
        """The prompts of `draw`."""
        return [drawn.prompt for drawn in self.draw(n)]

    def ahead(self, distance: int) -> Drawn:
        """What `draw` gives after `distance` others; stays where it is."""
        num_again = len(self._again)
        return self._drawn(self._again[distance] if distance < num_again else self._next + distance - num_again)

    def pass_over(self, places: Iterable[int]) -> None:
        """Leave out what was taken out of turn by `ahead`, on whatever rank; the others come in their order."""
        missing, passed = set(places), list[int]()
        while missing:
            place = self._take()
            if place in missing:
                missing.remove(place)
            else:
                passed.append(place)
        self._again.extendleft(reversed(passed))

    def _take(self) -> int:
        if self._again:
            return self._again.popleft()
        self._next += 1
        return self._next - 1

    def _drawn(self, place: int) -> Drawn:
        epoch, index = divmod(place, len(self._prompts))
        if epoch not in self._orders:
            if len(self._orders) == 2:  # one, but where epochs meet
                self._orders.clear()
            self._orders[epoch] = self._order_of(epoch)
        return Drawn(place, self._prompts[self._orders[epoch][index]])

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._prompts))
        digest = hashlib.blake2b(f"{self._seed}/{epoch}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        order = torch.randperm(len(self._prompts), generator=generator)
        return cast(list[int], order.tolist())  # pyright: ignore[reportUnknownMemberType]


def _read_cursor(cursor: DataCursor | None, num_prompts: int) -> tuple[int, Sequence[int]]:
    """Place of the next prompt, and those that come before it once more."""
    if cursor is None:
        return 0, ()
    epoch, index, again = cursor.get("epoch"), cursor.get("index"), cursor.get("again", [])
    if isinstance(epoch, int) and isinstance(index, int) and epoch >= 0 and 0 <= index < num_prompts:
        place = epoch * num_prompts + index
        is_known = set(cursor) <= {"epoch", "index", "again"} and bool not in {type(epoch), type(index)}
        if is_known and isinstance(again, list) and all(type(a) is int and 0 <= a < place for a in again):
            return place, again
    expected = f"{{'epoch': 0 or more, 'index': 0 to {num_prompts - 1}}} for {num_prompts} prompts"
    action = "Resume with the prompt file that the run started with, or start a new run folder."
    raise _error("data cursor", repr(dict(cursor)), expected, action)


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
