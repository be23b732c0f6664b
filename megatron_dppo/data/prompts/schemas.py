"""Recognises the prompt and answer columns of our own files and of other frameworks' files."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast


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
