"""Prepares a file of prompts from a published data set, and counts the rows that are dropped."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.data.prompts.problems import (
    Counts,
    Language,
    Question,
    each_once,
    language_of,
    problem_alone,
    read_questions,
)
from megatron_dppo.data.prompts.rows import fault
from megatron_dppo.data.prompts.schemas import PROBLEM_SCHEMAS, Schema, detect, has, spellings
from megatron_dppo.data.prompts.sources import Row, Source
from megatron_dppo.data.prompts.templates import (
    TEMPLATES,
    prompt_tokens,
    require_chat_template,
    require_tokenizer,
)
from megatron_dppo.types import Prompt

Progress = Callable[[Iterable[Any], str, int | None], Iterable[Any]]
"""Given an iterable, what it is of, and how many: yields the same, and shows how far it is."""


@dataclass(frozen=True)
class Options:
    """Options of preparing a data set."""

    name: str  # the prompts' source, and the beginning of their ids
    template: str = "none"  # one of TEMPLATES; none keeps prompts as the source has them
    max_prompt_tokens: int = 1024
    refuse_too_long: bool = False
    language: Language | None = None
    limit: int | None = None
    seed: int = 0
    num_problems: int | None = None  # that the set is known to have
    question_column: str | None = None
    answer_column: str | None = None


@dataclass(frozen=True)
class Prepared:
    """The prepared rows, and the count of rows by outcome."""

    rows: Sequence[Mapping[str, object]]  # id, prompt, answer, source, and template where there is one
    schema: Schema
    counts: Mapping[str, int]
    num_instructions_removed: int
    longest_prompt_tokens: int


def prepare(source: Source, tokenizer: Any, options: Options, progress: Progress) -> Prepared:
    """Read a data set, keep each problem once, filter, and put the rest into the template.

    Args:
        source: Is read to its end.
        tokenizer: The transformers tokenizer that training will use.
        options: How.
        progress: Shows how far reading and counting tokens are.

    Raises:
        DataError: No known columns, a cell of another type, a template that does not suit the tokenizer, a
            prompt too long where that is refused, another number of problems than the set has, or none left.
    """
    require_tokenizer(options.template, tokenizer)
    schema, counts = schema_of(source, options), dict[str, int]()
    rows = progress(source.rows, "rows", source.num_rows)
    questions = each_once(read_questions(source.name, rows, schema, counts), counts)
    _require_number(source.name, len(questions), options, counts)
    questions = _of_language(questions, options.language, counts)
    prompts = [_prompt(source.name, question, options) for question in questions]
    if any(prompt.messages is not None for prompt in prompts):
        require_chat_template(tokenizer)
    lengths = [
        len(prompt_tokens(tokenizer, p.text, p.messages)) for p in progress(prompts, "prompts", len(prompts))
    ]
    places = _short_enough(source.name, questions, lengths, options, counts)
    if options.limit is not None:
        counts["beyond the limit"] = max(0, len(places) - options.limit)
        places = sorted(random.Random(options.seed).sample(places, min(options.limit, len(places))))
    counts["written"] = len(places)
    if not places:
        action = "Loosen --language, --max-prompt-tokens or --limit, or check --source."
        raise fault(source.name, f"no prompt left ({shown(counts)})", "at least one", action)
    is_replaced = options.template != "none"
    return Prepared(
        [_row(prompts[place], options.template) for place in places],
        schema,
        counts,
        sum(is_replaced and questions[place].had_instruction for place in places),
        max(lengths[place] for place in places),
    )


def schema_of(source: Source, options: Options) -> Schema:
    """Return the named columns, or those of the first schema that fits.

    Raises:
        DataError: They are not there, or no schema fits.
    """
    question, answer = options.question_column, options.answer_column
    if question is not None and answer is not None:
        missing = [column for column in (question, answer) if not has(source.columns, column)]
        if not missing:
            return Schema("named columns", question, answer)
        found, expected = f"columns {list(source.columns)}", " and ".join(missing)
        raise fault(source.name, found, expected, "Correct --question-column or --answer-column.")
    schema = detect(source.columns, PROBLEM_SCHEMAS)
    if schema is None:
        expected = f"columns {spellings(PROBLEM_SCHEMAS)}"
        action = "Name them with --question-column and --answer-column."
        raise fault(source.name, f"columns {list(source.columns)}", expected, action)
    return schema


def shown(counts: Mapping[str, int]) -> str:
    """Format the counts as one line."""
    return ", ".join(f"{what}: {count}" for what, count in counts.items())


def _require_number(where: str, num_questions: int, options: Options, counts: Counts) -> None:
    if options.num_problems not in (None, num_questions):
        found = f"{num_questions} problems ({shown(counts)})"
        action = "Check --source, --config and --split; `custom` prepares any other set."
        raise fault(where, found, f"the {options.num_problems} of {options.name}", action)


def _of_language(questions: list[Question], language: Language | None, counts: Counts) -> list[Question]:
    if language is None:
        return questions
    kept = [question for question in questions if language_of(question.problem) == language]
    counts["in another language"] = len(questions) - len(kept)
    return kept


def _prompt(where: str, question: Question, options: Options) -> Prompt:
    asked = question.asked
    if options.template != "none":
        asked = TEMPLATES[options.template](problem_alone(where, question))
    row_id = f"{options.name}/{question.row}"
    if isinstance(asked, str):
        return Prompt(row_id, question.answer, options.name, text=asked)
    return Prompt(row_id, question.answer, options.name, messages=asked)


def _short_enough(
    where: str, questions: Sequence[Question], lengths: Sequence[int], options: Options, counts: Counts
) -> list[int]:
    limit = options.max_prompt_tokens
    places = [place for place, length in enumerate(lengths) if length <= limit]
    counts["too long"] = len(lengths) - len(places)
    if counts["too long"] and options.refuse_too_long:
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        found = f"{counts['too long']} prompts of more than {limit} tokens, the longest in row "
        found += f"{questions[longest].row} with {lengths[longest]}"
        action = "Raise --max-prompt-tokens, or take --too-long drop."
        raise fault(where, found, f"at most {limit} tokens in each", action)
    return places


def _row(prompt: Prompt, template: str) -> Row:
    asked: object = prompt.text if prompt.messages is None else list(prompt.messages)
    row = {"id": prompt.id, "prompt": asked, "answer": prompt.answer, "source": prompt.source}
    return row | ({} if template == "none" else {"template": template})
