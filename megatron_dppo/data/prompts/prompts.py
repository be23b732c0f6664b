"""Loads prompts from a file, and streams them in an order that a resumed run continues exactly."""

import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from megatron_dppo.config.sections import PromptFile
from megatron_dppo.data.prompts.messages import READ_COLUMNS, PromptCell, prompt_cell
from megatron_dppo.data.prompts.rows import (
    CONFIG_KEYS,
    TRAINING_SCHEMAS,
    Row,
    Schema,
    answer_of,
    cell,
    describe_cell,
    each_row,
    fault,
    has,
    missing_column,
    read_columns,
    require_schema,
    text_of,
    with_roots,
)
from megatron_dppo.data.prompts.shares import Part, Shares, digest_of, parts_of
from megatron_dppo.errors import DataError
from megatron_dppo.types import DataCursor, Prompt

logger = logging.getLogger(__name__)


def load_prompts(path: Path, prompt_column: str, answer_column: str | None) -> list[Prompt]:
    """Load all prompts of a .jsonl or .parquet file, in file order.

    A prompt cell is a string, a list of {role, content} messages, or such a list as JSON text. An answer cell
    is a string or an integer (read as its decimal digits). `column.field` names a field of a column. Columns
    `tools` and `chat_template_kwargs` are for the chat template (see `messages.prompt_cell`). Column
    `metadata`, or verl's `extra_info`, is an object for the reward and the environment. Columns `id`, and
    `source` or `data_source`, are used if they are present. Without them, the id is the row number (the line
    number in a .jsonl file) and the source is the file's name. Rows count from 1.

    Args:
        path: Prompt file.
        prompt_column: Column of the prompt.
        answer_column: Column of the answer. `None` means the first of `TRAINING_SCHEMAS` that fits.
    """
    prompts: list[Prompt] = []
    for row in read_prompts(path, prompt_column, answer_column, logs_schema=True):
        if isinstance(row, DataError):
            raise row
        prompts.append(row.prompt)
    return prompts


_METADATA = ("metadata", "extra_info")
_READ = READ_COLUMNS | {"id", "source", "data_source", "template", *_METADATA}
"""Columns that are read in addition to the prompt and the answer."""


@dataclass(frozen=True)
class PromptRow:
    """A row of a prompt file."""

    number: int  # from 1
    prompt: Prompt
    template: str | None  # template used by megatron-dppo prepare-data, if the row names it
    unread: Collection[str] = ()  # columns of the row that are not read


def read_prompts(
    path: Path, prompt_column: str, answer_column: str | None, *, logs_schema: bool = False
) -> Iterator[PromptRow | DataError]:
    """Yield the prompt of each row, or the row's error (see `load_prompts`)."""
    available = read_columns(path)
    if not has(available, prompt_column):
        raise missing_column(str(path), prompt_column, available)
    if not answer_column:
        schema = detect_schema(path, prompt_column, available)
        answer_column = schema.answer
        if logs_schema:
            logger.info("%s: %s's columns: %s and %s", path, schema.name, schema.prompt, schema.answer)
    if not has(available, answer_column):
        raise missing_column(str(path), answer_column, available)
    schema = Schema("", prompt_column, answer_column)
    source_column = "data_source" if "data_source" in available and "source" not in available else "source"
    rows_by_id = dict[str, int]()
    for number, row in each_row(path):
        if isinstance(row, DataError):
            yield row
            continue
        where = f"{path}, row {number}"
        try:
            read = _read_row(where, row, schema, number, path.stem, source_column)
            row_id = read.prompt.id
            first = rows_by_id.setdefault(row_id, number)
            if first != number:
                found = f"id {row_id!r}, which row {first} has too"
                raise fault(
                    where, found, "a different id in each row", "Make ids unique, or drop the id column."
                )
            yield read
        except DataError as error:
            yield error


def _read_row(where: str, row: Row, schema: Schema, number: int, source: str, source_column: str) -> PromptRow:
    """Read a row of a prompt file; its number and `source` are defaults."""
    named = with_roots(schema.prompt, schema.answer)
    value, answer = (cell(where, row, name) for name in (schema.prompt, schema.answer))
    row_id = text_of(where, "id", row.get("id", number))
    source = text_of(where, source_column, row.get(source_column, source))
    answer, label = answer_of(where, answer)
    asked = prompt_cell(where, row, value, named, CONFIG_KEYS[0])
    prompt = replace(prompt_of(row_id, answer, source, asked), metadata=_metadata(where, row), label=label)
    template = row.get("template")
    unread = [name for name, value in row.items() if value is not None and name not in named | _READ]
    return PromptRow(number, prompt, template if isinstance(template, str) else None, unread)


class PromptsDigest:
    """Digest of all prompts, answers and ids in order. A cursor is valid only for the same digest."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, prompt: Prompt) -> None:
        """Add the next prompt."""
        fields = asdict(prompt)
        for name in ("metadata", "file", "label"):  # earlier versions did not have them
            del fields[name]
        for name in ("tools", "template_arguments"):  # checkpoints of older runs do not have these fields
            if fields[name] is None:
                del fields[name]
        self._hash.update(json.dumps(fields, sort_keys=True).encode())

    def hexdigest(self) -> str:
        """Return the digest of all prompts so far."""
        return self._hash.hexdigest()


@dataclass(frozen=True)
class TrainingPrompts:
    """All prompts of `data.prompts`, file after file, and the part of each file."""

    prompts: Sequence[Prompt]
    parts: Sequence[Part]

    @property
    def digest(self) -> str:
        """Digest of all prompts, answers and ids in order, and of the shares of several files."""
        digests: list[str] = []
        for part in self.parts:
            of_part = PromptsDigest()
            for prompt in self.prompts[part.start : part.start + part.count]:
                of_part.add(prompt)
            digests.append(of_part.hexdigest())
        return digest_of(self.parts, digests)


def load_training_prompts(
    files: Sequence[PromptFile], prompt_column: str, answer_column: str | None
) -> TrainingPrompts:
    """Load the files of `data.prompts`. If there are several, each prompt has its file's name."""
    loaded = [load_prompts(file.path, prompt_column, answer_column) for file in files]
    parts = parts_of(files, [len(prompts) for prompts in loaded])
    if len(files) > 1:
        pairs = zip(files, loaded, strict=True)
        loaded = [[replace(prompt, file=file.label) for prompt in prompts] for file, prompts in pairs]
    return TrainingPrompts([prompt for prompts in loaded for prompt in prompts], parts)


def detect_schema(path: Path, prompt_column: str, columns: Sequence[str]) -> Schema:
    """Return the schema of a file with these columns: our own, verl's or slime's."""
    action = "Set data.answer_column, or make a prompt file with megatron-dppo prepare-data."
    return require_schema(str(path), columns, TRAINING_SCHEMAS, action, prompt_column)


def _metadata(where: str, row: Mapping[str, object]) -> Mapping[str, Any] | None:
    """Return the object of the first metadata column that has one."""
    name = next((name for name in _METADATA if row.get(name) is not None), None)
    if name is None:
        return None
    value = row[name]
    try:
        value = json.loads(value) if isinstance(value, str) else json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        action = "Store numbers, texts, lists and objects of these."
        raise fault(where, f"{describe_cell(value)} as {name}", f"a JSON object ({error})", action) from None
    if not isinstance(value, dict):
        action = "Store an object, such as {'difficulty': 3}, or rename the column."
        raise fault(where, f"{describe_cell(value)} as {name}", "a JSON object", action)
    return cast(dict[str, Any], value)


def prompt_of(row_id: str, answer: str, source: str, asked: PromptCell) -> Prompt:
    """Build the prompt of a row from its id, answer, source and prompt cell."""
    if isinstance(asked.asked, str):
        return Prompt(row_id, answer, source, text=asked.asked)
    return Prompt(row_id, answer, source, None, asked.asked, asked.tools, asked.template_arguments)


@dataclass(frozen=True)
class Drawn:
    """A prompt and its index in the stream."""

    place: int  # index in the stream, counted over all epochs; the same after a resume
    prompt: Prompt


class PromptStream:
    """Endless sequence of prompts, epoch after epoch, by index; the same on every rank.

    Prompts of several files are mixed at random, in proportion to their weights (`Shares`). Each file has its
    own epochs: when all its prompts were drawn, it starts again in another order. An epoch's order depends only
    on (seed, epoch), and on the file's name if there are several. `rollout.staleness.Places` chooses the
    indices of a rank.

    Attributes:
        upcoming: First index that was never taken, and the indices to take again before it.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        shuffle: bool,
        cursor: DataCursor | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        """Read `upcoming` from a cursor; else it is the beginning. No parts: all prompts are one part."""
        if not prompts:
            raise fault("prompts", "none", "at least one prompt", "Check data.prompts.")
        self._prompts, self._seed, self._shuffle = prompts, seed, shuffle
        self._parts = parts or [Part("", 0, len(prompts), 1.0)]
        self._shares = Shares([part.weight for part in self._parts], seed)
        self.upcoming = _read_cursor(cursor, len(prompts))
        self._orders: dict[tuple[int, int], Sequence[int]] = {}

    def cursor_at(self, next_place: int, again: Sequence[int]) -> DataCursor:
        """Return the cursor of a stream with this `upcoming`. Checkpoints store it as JSON."""
        epoch, index = divmod(next_place, len(self._prompts))
        return {"epoch": epoch, "index": index} | ({"again": list(again)} if again else {})

    @property
    def num_prompts(self) -> int:
        """Number of prompts of all files."""
        return len(self._prompts)

    @property
    def period(self) -> int:
        """Number of prompts after which their order repeats; 0 if they are shuffled."""
        return 0 if self._shuffle else len(self._prompts)

    def at(self, place: int) -> Drawn:
        """Return the prompt at an index of the stream."""
        number, item = self._shares.at(place)
        part = self._parts[number]
        epoch, index = divmod(item, part.count)
        order = self._orders.get((number, epoch))  # several threads may call this
        if order is None:
            if len(self._orders) >= 2 * len(self._parts):  # each part needs two only at the end of an epoch
                self._orders.clear()
            order = self._orders[number, epoch] = self._order_of(part, epoch)
        return Drawn(place, self._prompts[part.start + order[index]])

    def epochs(self, place: int) -> dict[str, float]:
        """Return the passes over each of several files before an index of the stream, by name."""
        counts = self._shares.counts(place) if len(self._parts) > 1 else []
        pairs = zip(self._parts, counts, strict=False)
        return {part.name: count / part.count for part, count in pairs}

    def _order_of(self, part: Part, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(part.count)
        of_file = f"/{part.name}" if len(self._parts) > 1 else ""
        digest = hashlib.blake2b(f"{self._seed}/{epoch}{of_file}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        order = torch.randperm(part.count, generator=generator)
        return cast(list[int], order.tolist())  # pyright: ignore[reportUnknownMemberType]


def _read_cursor(cursor: DataCursor | None, num_prompts: int) -> tuple[int, Sequence[int]]:
    """Return `PromptStream.upcoming` of a cursor."""
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
    raise fault("data cursor", repr(dict(cursor)), expected, action)
