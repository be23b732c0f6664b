"""Writes a prompt file from a published data set: deduplicates problems and counts every dropped row."""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import AutoTokenizer

from megatron_dppo.architectures.sizes import config_file
from megatron_dppo.data.prompts.final_answer import answer_doubts, text_only_doubt
from megatron_dppo.data.prompts.messages import READ_COLUMNS, TEMPLATE_ARGUMENTS, TOOLS
from megatron_dppo.data.prompts.problems import (
    OPTION_KEYS,
    Language,
    Question,
    each_once,
    language_of,
    problem_alone,
    problem_in_chat,
    read_questions,
)
from megatron_dppo.data.prompts.prompts import PromptRow, prompt_of
from megatron_dppo.data.prompts.rows import (
    PROBLEM_SCHEMAS,
    DataSource,
    Row,
    Schema,
    fault,
    has,
    open_source,
    require_schema,
    with_roots,
)
from megatron_dppo.data.prompts.survey import FaultyRows, SpecialTokens, Survey
from megatron_dppo.data.prompts.templates import TEMPLATES, require_tokenizer, whole_tokens
from megatron_dppo.errors import DataError, Problem
from megatron_dppo.runtime.files import write_jsonl, write_whole
from megatron_dppo.types import AnswerForm, Prompt


@dataclass(frozen=True)
class DataSet:
    """Source, splits and number of problems of a published data set."""

    source: str | None
    split: str = "train"
    configs: tuple[str, ...] = ()
    num_problems: int | None = None


DATA_SETS = {
    "dapo-math-17k": DataSet("BytedTsinghua-SIA/DAPO-Math-17k"),
    "math": DataSet("EleutherAI/hendrycks_math", configs=("all",)),
    "math-sanity": DataSet("sail/Sanity-Test-R1D-1.5B", num_problems=1460),
    "aime24": DataSet("HuggingFaceH4/aime_2024", num_problems=30),
    "aime25": DataSet("opencompass/AIME2025", "test", ("all",), num_problems=30),
    "custom": DataSet(None),
}


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


def open_data_set(
    data_set: DataSet, source: str | None, configs: Sequence[str] | None, split: str | None
) -> DataSource:
    """Open the published data set, or the user's `source` without the published configs and split."""
    opened = data_set if source is None else DataSet(source)
    return open_source(opened.source or "", configs or opened.configs, split or opened.split)


def write_prompt_file(out: Path, opened: DataSource, tokenizer: Path, options: PrepareOptions) -> Prepared:
    """Prepare the prompts of a data set, and write them and their counts. Each file is written atomically."""
    prepared = prepare(opened, _load_tokenizer(tokenizer), options)
    write_jsonl(out, prepared.rows)
    found = {"read_from": opened.name, "tokenizer": str(tokenizer), **asdict(options)} | {
        "schema": asdict(prepared.schema),
        "counts": prepared.counts,
        "instructions_removed": prepared.num_instructions_removed,
        "answers_taken_out_of_texts": len(prepared.answers_taken),
        "doubts": list(prepared.doubts),
        "longest_prompt_tokens": prepared.longest_prompt_tokens,
        "sha256": sha256_of(out),
    }
    counts_file = out.with_name(f"{out.stem}.counts.json")
    write_whole(counts_file, [json.dumps(found, indent=2, ensure_ascii=False) + "\n"])
    return prepared


def _load_tokenizer(folder: Path) -> Any:
    if not folder.is_dir():
        raise fault("--tokenizer", f"{folder}", "the folder of a model", "Download the model first.")
    config = config_file(folder)  # a converted folder has it in hf/
    try:
        return AutoTokenizer.from_pretrained(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            folder if config is None else config.parent, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        action = "Give the folder that model.load will name."
        raise fault("--tokenizer", f"{folder}: {error}", "a tokenizer", action) from error


def prepare(source: DataSource, tokenizer: Any, options: PrepareOptions) -> Prepared:
    """Read a data set, deduplicate and filter its problems, and put them into the template.

    Args:
        source: Data set to read completely.
        tokenizer: The transformers tokenizer that training will use.
        options: Columns, filters and template.

    Raises:
        DataError: No known schema fits, rows cannot be used and are not dropped, the template does not fit the
            tokenizer, most answers are prose, a prompt is too long and `refuse_too_long` is set, the number of
            problems is not the expected one, or no prompt is left.
    """
    require_tokenizer(options.template, tokenizer)
    schema, counts, bad_rows = schema_of(source, options), dict[str, int](), FaultyRows()
    source = replace(source, rows=_progress(source.rows, "rows"))
    questions = each_once(read_questions(source, schema, options.keeps_answers, counts, bad_rows), counts)
    num_questions = len(questions)
    if options.language is not None:
        questions = [question for question in questions if language_of(question.problem) == options.language]
        counts["in another language"] = num_questions - len(questions)
    tokenized = list(_tokenize(source.name, questions, tokenizer, options, bad_rows))
    counts["that cannot be used"] = bad_rows.num_rows
    if bad_rows.num_rows and not options.drops_bad_rows:
        found = f"{bad_rows.num_rows} of {counts['read']} rows that cannot be used{bad_rows.shown}"
        action = "Correct these rows, or leave them out with --bad-rows drop."
        raise DataError(
            Problem(source.name, found, "a prompt and an answer in each row", action, bad_rows.lines)
        )
    if options.num_problems not in (None, num_questions):
        found = f"{num_questions} problems ({format_counts(counts)})"
        action = "Check --source, --config and --split; `custom` prepares any other set."
        raise fault(source.name, found, f"the {options.num_problems} of {options.name}", action)
    doubts = list[str]()
    if not options.keeps_answers:
        doubts += answer_doubts(source.name, [(question.row, question.answer) for question in questions])
    tokenized = _short_enough(source.name, tokenized, options, counts)
    if options.limit is not None:
        counts["beyond the limit"] = max(0, len(tokenized) - options.limit)
        places = random.Random(options.seed).sample(range(len(tokenized)), min(options.limit, len(tokenized)))
        tokenized = [tokenized[place] for place in sorted(places)]
    counts["written"] = len(tokenized)
    if not tokenized:
        action = "Loosen --language, --max-prompt-tokens or --limit, or check --source."
        raise fault(source.name, f"no prompt left ({format_counts(counts)})", "at least one", action)
    kept = [each.question for each in tokenized]
    found = Survey(SpecialTokens(tokenizer), options.max_prompt_tokens, expects_text=options.template != "none")
    for each in tokenized:
        found.add(PromptRow(each.question.row, each.prompt, options.template), each.tokens)
    form: AnswerForm | None = next(
        (form for form, count in found.num_asking.items() if count == len(tokenized)), None
    )
    if form == "boxed" and (doubt := text_only_doubt(found.bare_answers, found.num_answers["bare"])):
        doubts.append(doubt)
    doubts += [f"{count} of {len(tokenized)} prompts {oddity}." for oddity, count in found.oddities.items()]
    named = with_roots(schema.prompt, schema.answer) | READ_COLUMNS
    return Prepared(
        rows=[_row(each.prompt, options.template) for each in tokenized],
        schema=schema,
        counts=counts,
        num_instructions_removed=sum(options.replaces_instructions and each.had_instruction for each in kept),
        answers_taken=[(each.had_solution, each.answer) for each in kept if each.had_solution],
        longest_prompt_tokens=found.longest,
        unread_columns=[name for name in source.columns if name not in named],
        form=form,
        doubts=doubts,
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
    bad_rows: FaultyRows,
) -> Iterator[_Tokenized]:
    for question in _progress(questions, "prompts"):
        try:
            prompt = _prompt(question, options)
            yield _Tokenized(question, prompt, whole_tokens(tokenizer, prompt))
        except DataError as error:
            bad_rows.add(f"{where}, row {question.row}: {error}")


def schema_of(source: DataSource, options: PrepareOptions) -> Schema:
    """Return a schema of the named columns, or else the first schema that fits."""
    question, answer = options.question_column, options.answer_column
    if question is not None and answer is not None:
        missing = [column for column in (question, answer) if not has(source.columns, column)]
        if not missing:
            return Schema("named columns", question, answer)
        found, expected = f"columns {list(source.columns)}", " and ".join(missing)
        raise fault(source.name, found, expected, f"Correct {' or '.join(OPTION_KEYS)}.")
    action = "Name them with --question-column and --answer-column."
    return require_schema(source.name, source.columns, PROBLEM_SCHEMAS, action)


def format_counts(counts: Mapping[str, int]) -> str:
    """Format the counts as one line."""
    return ", ".join(f"{what}: {count}" for what, count in counts.items())


def _prompt(question: Question, options: PrepareOptions) -> Prompt:
    cell = question.cell
    if options.template == "chat":
        cell = replace(cell, asked=problem_in_chat(question, options.instruction))
    elif options.template != "none":
        cell = replace(cell, asked=TEMPLATES[options.template](problem_alone(question)))
    if isinstance(cell.asked, str) and (cell.tools or cell.template_arguments):
        found, action = "tools or chat_template_kwargs, and a template of text", "Use --template chat or none."
        raise fault(f"--template {options.template}", found, "a template of messages", action)
    prompt = prompt_of(f"{options.name}/{question.row}", question.answer, options.name, cell)
    return replace(prompt, label=question.label)


def _short_enough(
    where: str, tokenized: Sequence[_Tokenized], options: PrepareOptions, counts: dict[str, int]
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


def _progress(items: Iterable[Any], what: str) -> Iterable[Any]:
    return tqdm(items, desc=what, unit="", unit_scale=True, mininterval=1.0, leave=False)


def sha256_of(file: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
