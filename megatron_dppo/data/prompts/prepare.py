"""Prepares a file of prompts from a published data set, and counts the rows that are dropped."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_dppo.data.prompts.final_answer import (
    KINDS,
    AnswerKind,
    answer_kind,
    excerpt,
    text_only_doubt,
)
from megatron_dppo.data.prompts.messages import READ_COLUMNS, TEMPLATE_ARGUMENTS, TOOLS
from megatron_dppo.data.prompts.problems import (
    OPTION_KEYS,
    BadRows,
    Counts,
    Language,
    Question,
    QuestionReader,
    each_once,
    language_of,
    problem_alone,
    problem_in_chat,
)
from megatron_dppo.data.prompts.prompts import prompt_of
from megatron_dppo.data.prompts.rows import (
    PROBLEM_SCHEMAS,
    DataSource,
    Row,
    Schema,
    detect,
    fault,
    has,
    spellings,
)
from megatron_dppo.data.prompts.survey import NUM_BARE, SpecialTokens
from megatron_dppo.data.prompts.templates import TEMPLATES, asked_form, require_tokenizer, whole_tokens
from megatron_dppo.errors import DataError
from megatron_dppo.types import AnswerForm, Prompt

Progress = Callable[[Iterable[Any], str, int | None], Iterable[Any]]
"""Receives an iterable, its description and its length. Yields the items unchanged, and shows the progress."""


@dataclass(frozen=True)
class PrepareOptions:
    """Options for preparing a data set."""

    name: str  # source of the prompts; their ids begin with it
    template: str = "none"  # one of TEMPLATES, "chat", or "none", which keeps the source's prompts unchanged
    instruction: str | None = None  # instruction of template "chat"
    keeps_answers: bool = False  # whether cells are kept as they are, without extraction
    drops_bad_rows: bool = False
    max_prompt_tokens: int = 1024
    refuse_too_long: bool = False
    language: Language | None = None
    limit: int | None = None
    seed: int = 0
    num_problems: int | None = None  # expected number, if it is known
    question_column: str | None = None
    answer_column: str | None = None

    @property
    def replaces_instructions(self) -> bool:
        """Whether DAPO's instruction around a problem is removed."""
        return self.instruction is not None if self.template == "chat" else self.template != "none"


@dataclass(frozen=True)
class Prepared:
    """The prepared rows, and the number of rows by outcome."""

    rows: Sequence[Mapping[str, object]]  # id, prompt, answer, source, and optional fields of a prompt
    schema: Schema
    counts: Mapping[str, int]
    num_instructions_removed: int
    answers_taken: Sequence[tuple[str, str]]  # (text, final answer that was extracted from it)
    longest_prompt_tokens: int
    unread_columns: Sequence[str]
    form: AnswerForm | None  # form that every prompt asks for; None if they differ
    doubts: Sequence[str]  # sentences about what may be wrong with the rows


def prepare(source: DataSource, tokenizer: Any, options: PrepareOptions, progress: Progress) -> Prepared:
    """Read a data set, deduplicate and filter its problems, and put them into the template.

    Args:
        source: Data set to read completely.
        tokenizer: The transformers tokenizer that training will use.
        options: Columns, filters and template.
        progress: Shows the progress of reading rows and of tokenising prompts.

    Raises:
        DataError: No known schema fits, rows cannot be used and are not dropped, the template does not fit the
            tokenizer, most answers are prose, a prompt is too long and `refuse_too_long` is set, the number of
            problems is not the expected one, or no prompt is left.
    """
    require_tokenizer(options.template, tokenizer)
    schema, counts = schema_of(source, options), dict[str, int]()
    bad_rows = BadRows(source.name, options.drops_bad_rows)
    reader = QuestionReader(source.name, schema, options.keeps_answers, bad_rows)
    rows = progress(source.rows, "rows", None)
    questions = each_once(reader.read(rows, counts), counts)
    num_questions = len(questions)
    questions = _of_language(questions, options.language, counts)
    tokenized = list(_tokenize(source.name, questions, tokenizer, options, bad_rows, progress))
    bad_rows.refuse(counts["read"])
    counts["that cannot be used"] = bad_rows.rows.num_rows
    _require_number(source.name, num_questions, options, counts)
    answer_doubts = [] if options.keeps_answers else list(_doubts_of_answers(source.name, questions))
    tokenized = _short_enough(source.name, tokenized, options, counts)
    if options.limit is not None:
        counts["beyond the limit"] = max(0, len(tokenized) - options.limit)
        places = random.Random(options.seed).sample(range(len(tokenized)), min(options.limit, len(tokenized)))
        tokenized = [tokenized[place] for place in sorted(places)]
    counts["written"] = len(tokenized)
    if not tokenized:
        action = "Loosen --language, --max-prompt-tokens or --limit, or check --source."
        raise fault(source.name, f"no prompt left ({format_counts(counts)})", "at least one", action)
    forms: set[AnswerForm | None] = {asked_form(each.prompt, options.template) for each in tokenized}
    if forms == {"boxed"}:
        answer_doubts += _doubts_of_labels([each.question for each in tokenized])
    return Prepared(
        rows=[_row(each.prompt, options.template) for each in tokenized],
        schema=schema,
        counts=counts,
        num_instructions_removed=sum(
            options.replaces_instructions and each.question.had_instruction for each in tokenized
        ),
        answers_taken=[
            (each.question.had_solution, each.question.answer)
            for each in tokenized
            if each.question.had_solution
        ],
        longest_prompt_tokens=max(len(each.tokens) for each in tokenized),
        unread_columns=[name for name in source.columns if name not in reader.named | READ_COLUMNS],
        form=forms.pop() if len(forms) == 1 else None,
        doubts=[*answer_doubts, *_doubts_of_tokens(tokenizer, tokenized, options.template)],
    )


@dataclass(frozen=True)
class _Tokenized:
    """A prompt with its token ids."""

    question: Question
    prompt: Prompt
    tokens: Sequence[int]


def _tokenize(
    where: str,
    questions: Sequence[Question],
    tokenizer: Any,
    options: PrepareOptions,
    bad_rows: BadRows,
    progress: Progress,
) -> Iterator[_Tokenized]:
    for question in progress(questions, "prompts", len(questions)):
        try:
            prompt = _prompt(where, question, options)
        except DataError as error:
            bad_rows.rows.add(str(error))
            continue
        try:
            yield _Tokenized(question, prompt, whole_tokens(tokenizer, prompt))
        except DataError as error:
            bad_rows.rows.add(f"{where}, row {question.row}: {error}")


def _doubts_of_answers(where: str, questions: Sequence[Question]) -> Iterator[str]:
    """Yield doubts about answer cells with more text than the answer.

    Raises:
        DataError: Most cells are texts without a marked final answer.
    """
    odd = dict[AnswerKind, list[Question]]()
    for question in questions:
        odd.setdefault(answer_kind(question.answer), []).append(question)
    prose = odd.get("prose", [])
    if 2 * len(prose) > len(questions):
        found = (
            f"{len(prose)} of {len(questions)} answers that are texts without a marked final answer, such as "
        )
        found += f"{excerpt(prose[0].answer)} in row {prose[0].row}"
        expected = r"bare answers, or texts that end in '#### 18', \boxed{18} or 'The answer is 18'"
        action = (
            "Name a column of bare answers with --question-column and --answer-column, or keep these for a "
            "custom reward with --answers as-is."
        )
        raise fault(where, found, expected, action)
    for kind, what in KINDS.items():
        if kind in odd:
            share = f"{len(odd[kind])} of {len(questions)} answers {what}"
            first = odd[kind][0]
            cell = f"{excerpt(first.answer)} in row {first.row}"
            yield f"{share}, such as {cell}: a response with a bare right answer may earn nothing."


def _doubts_of_labels(questions: Sequence[Question]) -> Iterator[str]:
    """Yield a doubt if `math` can only match some bare answers as text. At most NUM_BARE of them are tried."""
    bare = [(each.row, each.answer) for each in questions if answer_kind(each.answer) == "bare"]
    doubt = text_only_doubt(bare[:: -(-len(bare) // NUM_BARE) or 1], len(bare))
    if doubt is not None:
        yield doubt


def _doubts_of_tokens(tokenizer: Any, tokenized: Sequence[_Tokenized], template: str) -> Iterator[str]:
    special, oddities = SpecialTokens(tokenizer), Counter[str]()
    for each in tokenized:
        may_be_text = template != "none" or each.prompt.messages is not None
        oddities.update(special.oddities(each.tokens, may_be_text=may_be_text))
    for oddity, count in oddities.items():
        yield f"{count} of {len(tokenized)} prompts {oddity}."


def schema_of(source: DataSource, options: PrepareOptions) -> Schema:
    """Return a schema of the named columns, or else the first schema that fits.

    Raises:
        DataError: A named column is missing, or no schema fits.
    """
    question, answer = options.question_column, options.answer_column
    if question is not None and answer is not None:
        missing = [column for column in (question, answer) if not has(source.columns, column)]
        if not missing:
            return Schema("named columns", question, answer)
        found, expected = f"columns {list(source.columns)}", " and ".join(missing)
        raise fault(source.name, found, expected, f"Correct {' or '.join(OPTION_KEYS)}.")
    schema = detect(source.columns, PROBLEM_SCHEMAS)
    if schema is None:
        expected = f"columns {spellings(PROBLEM_SCHEMAS)}"
        action = "Name them with --question-column and --answer-column."
        raise fault(source.name, f"columns {list(source.columns)}", expected, action)
    return schema


def format_counts(counts: Mapping[str, int]) -> str:
    """Format the counts as one line."""
    return ", ".join(f"{what}: {count}" for what, count in counts.items())


def _require_number(where: str, num_questions: int, options: PrepareOptions, counts: Counts) -> None:
    if options.num_problems not in (None, num_questions):
        found = f"{num_questions} problems ({format_counts(counts)})"
        action = "Check --source, --config and --split; `custom` prepares any other set."
        raise fault(where, found, f"the {options.num_problems} of {options.name}", action)


def _of_language(questions: list[Question], language: Language | None, counts: Counts) -> list[Question]:
    if language is None:
        return questions
    kept = [question for question in questions if language_of(question.problem) == language]
    counts["in another language"] = len(questions) - len(kept)
    return kept


def _prompt(where: str, question: Question, options: PrepareOptions) -> Prompt:
    cell = question.cell
    if options.template == "chat":
        cell = replace(cell, asked=problem_in_chat(where, question, options.instruction))
    elif options.template != "none":
        cell = replace(cell, asked=TEMPLATES[options.template](problem_alone(where, question)))
    if isinstance(cell.asked, str) and (cell.tools or cell.template_arguments):
        found = f"tools or chat_template_kwargs with --template {options.template}, which makes text"
        action = "Use --template chat or none."
        raise fault(f"{where}, row {question.row}", found, "a template of messages", action)
    prompt = prompt_of(f"{options.name}/{question.row}", question.answer, options.name, cell)
    return replace(prompt, label=question.label)


def _short_enough(
    where: str, tokenized: Sequence[_Tokenized], options: PrepareOptions, counts: Counts
) -> list[_Tokenized]:
    limit = options.max_prompt_tokens
    kept = [each for each in tokenized if len(each.tokens) <= limit]
    counts["too long"] = len(tokenized) - len(kept)
    if counts["too long"] and options.refuse_too_long:
        longest = max(tokenized, key=lambda each: len(each.tokens))
        found = f"{counts['too long']} prompts of more than {limit} tokens, the longest in row "
        found += f"{longest.question.row} with {len(longest.tokens)}"
        action = "Raise --max-prompt-tokens, or use --too-long drop."
        raise fault(where, found, f"at most {limit} tokens in each", action)
    return kept


def _row(prompt: Prompt, template: str) -> Row:
    asked: object = prompt.text if prompt.messages is None else list(prompt.messages)
    row = {"id": prompt.id, "prompt": asked, "answer": prompt.typed_answer, "source": prompt.source}
    row |= {} if prompt.tools is None else {TOOLS: list(prompt.tools)}
    row |= {} if prompt.template_arguments is None else {TEMPLATE_ARGUMENTS: prompt.template_arguments}
    return row | ({} if template == "none" else {"template": template})
