"""The command prepare-data, which writes prompt files."""

from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatron_dppo.cli.options import user_errors
from megatron_dppo.errors import writing_to

if TYPE_CHECKING:  # it imports transformers, which takes seconds
    from megatron_dppo.data.prompts.prepare import Prepared, PrepareOptions

app = typer.Typer()

Name = Literal["dapo-math-17k", "math", "math-sanity", "aime24", "aime25", "custom"]
Template = Literal["base", "r1_distill", "thinking", "dapo", "chat", "none"]
Instruction = Annotated[
    str | None,
    typer.Option(help="For --template chat: a line below the problem, or a text around {problem}."),
]
Answers = Annotated[
    Literal["final", "as-is"],
    typer.Option(help="Extract marked final answers, or keep the column unchanged."),
]
BadRows = Annotated[Literal["refuse", "drop"], typer.Option(help="Action for unusable rows.")]
TooLong = Annotated[Literal["drop", "refuse"], typer.Option(help="Action for longer prompts.")]
SourceName = Annotated[
    str | None,
    typer.Option(help="A .jsonl, .parquet, .csv or .tsv file, also .gz; a folder; or a name on the hub."),
]


@app.command()
def prepare_data(
    name: Annotated[Name, typer.Argument(help="Data set; custom for any other.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the model to be trained, converted or not.")],
    template: Annotated[Template, typer.Option(help="Prompt template; none keeps the source's prompts.")],
    out: Annotated[Path, typer.Option(help="The .jsonl file to write; must not exist.")],
    instruction: Instruction = None,
    source: SourceName = None,
    config: Annotated[list[str] | None, typer.Option(help="Dataset configs to read (all: every one).")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a folder or a data set on the hub.")] = None,
    question_column: Annotated[
        str | None, typer.Option(help="Column of problems; requires --answer-column.")
    ] = None,
    answer_column: Annotated[
        str | None, typer.Option(help="Column of answers; requires --question-column.")
    ] = None,
    answers: Answers = "final",
    bad_rows: BadRows = "refuse",
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Value of data.max_prompt_tokens.")] = 1024,
    too_long: TooLong = "drop",
    language: Annotated[Literal["en", "zh"] | None, typer.Option(help="Keep only these problems.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Keep this many random problems.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of --limit.")] = 0,
) -> None:
    r"""Write a prompt file from a data set, without duplicates, and count dropped rows.

    Without --source the data set is downloaded from the hub. --source reads your own file:

        megatron-dppo prepare-data dapo-math-17k --tokenizer MODEL --template dapo --out dapo.jsonl

        megatron-dppo prepare-data aime24 --source a.parquet --tokenizer MODEL --template dapo --out a.jsonl

    The chat template writes one user message, with your own instruction:

        megatron-dppo prepare-data custom --source a.jsonl --tokenizer MODEL \
            --template chat --out b.jsonl \
            --instruction "Put your final answer within \boxed{}."

    The template decides which reward can read the responses: "dapo" needs data.reward = "dapo", and "base",
    "thinking" and "r1_distill" need "math". For "chat" and "none" it depends on the prompts' text. OUT with
    the suffix .counts.json contains row counts. Exit code 2: invalid arguments.
    """
    with user_errors():
        from megatron_dppo.data.prompts.prepare import (
            DATA_SETS,
            PrepareOptions,
            open_data_set,
            write_prompt_file,
        )

        data_set = DATA_SETS[name]
        options = PrepareOptions(
            name=name.replace("-", "_"),
            template=template,
            instruction=instruction,
            keeps_answers=answers == "as-is",
            drops_bad_rows=bad_rows == "drop",
            max_prompt_tokens=max_prompt_tokens,
            refuse_too_long=too_long == "refuse",
            language=language,
            limit=limit,
            seed=seed,
            num_problems=data_set.num_problems,
            question_column=question_column,
            answer_column=answer_column,
        )
        _refuse_unusable(out, source or data_set.source, options)
        opened = open_data_set(data_set, source, config, split)
        typer.echo(f"reading {opened.name}: columns {', '.join(opened.columns)}", err=True)
        prepared = write_prompt_file(out, opened, tokenizer, options)
    _report(prepared, out)


def _refuse_unusable(out: Path, source: str | None, options: "PrepareOptions") -> None:
    """Reject contradictory options before anything is read."""
    from megatron_dppo.data.prompts.rows import fault

    if source is None:
        raise fault("--source", "nothing", "a file, a folder or a name on the hub", "Name the data set.")
    if out.suffix != ".jsonl":
        raise fault("--out", str(out), "a name that ends in .jsonl", "Choose another name.")
    if out.exists():
        raise fault("--out", f"{out}, which exists", "a new file", "Choose another name, or delete it.")
    if options.instruction is not None and options.template != "chat":
        expected = "--template chat, which inserts it into prompts"
        action = "Choose that template, or leave the instruction out."
        raise fault("--instruction", f"one with --template {options.template}", expected, action)
    if (options.question_column is None) != (options.answer_column is None):
        found = "one of --question-column and --answer-column"
        raise fault("columns", found, "both or none", "Name both columns.")
    with writing_to("--out", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out.parent):
            pass


def _report(prepared: "Prepared", out: Path) -> None:
    """Print the counts, the doubts, and the rewards that go with the prompts."""
    from megatron_dppo.data.prompts.prepare import sha256_of
    from megatron_dppo.rewards import REWARDS, answer_form

    typer.echo(_summary(prepared))
    typer.echo(f"{out}: sha256 {sha256_of(out)}")
    for doubt in prepared.doubts:
        typer.echo(f"warning: {doubt}", err=True)
    fitting = [reward for reward in REWARDS if prepared.form and answer_form(reward) == prepared.form]
    for reward in fitting:
        typer.echo(f'these prompts go with data.reward = "{reward}"')
    if not fitting:
        note = "note: not all prompts ask for an answer in one form that a registered reward reads"
        typer.echo(note, err=True)


def _summary(prepared: "Prepared") -> str:
    """Return the recognised schema and each count as lines for the terminal."""
    from megatron_dppo.data.prompts.final_answer import excerpt

    schema = prepared.schema
    rows = [*prepared.counts.items(), ("longest prompt, tokens", prepared.longest_prompt_tokens)]
    if prepared.num_instructions_removed:
        rows.append(("had DAPO's instruction, which was replaced", prepared.num_instructions_removed))
    if prepared.answers_taken:
        text, answer = prepared.answers_taken[0]
        what = f"answers taken out of a text, the first, {answer!r}, out of {excerpt(text)}"
        rows.append((what, len(prepared.answers_taken)))
    lines = [f"schema: {schema.name} ({schema.prompt}, {schema.answer})"]
    if prepared.unread_columns:
        lines.append(f"columns that are not read: {', '.join(prepared.unread_columns)}")
    return "\n".join([*lines, *(f"{count:>12,}  {what}" for what, count in rows)])
