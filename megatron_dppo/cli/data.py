"""The command of `megatron-dppo` that makes files of prompts: prepare-data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatron_dppo.cli.options import user_errors

if TYPE_CHECKING:  # it imports transformers, which takes seconds
    from megatron_dppo.data.prompts.prepare import Prepared

app = typer.Typer()

Name = Literal["dapo-math-17k", "math", "math-sanity", "aime24", "aime25", "custom"]
Template = Literal["base", "r1_distill", "thinking", "dapo", "chat", "none"]
Instruction = Annotated[
    str | None,
    typer.Option(help="For --template chat: a line below the problem, or a text around {problem}."),
]
Answers = Annotated[
    Literal["final", "as-is"],
    typer.Option(help="Take the final answer out of texts that mark it, or keep every cell as it is."),
]
BadRows = Annotated[Literal["refuse", "drop"], typer.Option(help="What to do with rows that cannot be used.")]
TooLong = Annotated[Literal["drop", "refuse"], typer.Option(help="What to do with longer prompts.")]
SourceName = Annotated[
    str | None, typer.Option(help="A .jsonl or .parquet file, a folder, or a name on the Hugging Face hub.")
]


@app.command()
def prepare_data(
    name: Annotated[Name, typer.Argument(help="Which set; custom is any other.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the model to be trained, converted or not.")],
    template: Annotated[Template, typer.Option(help="How problems are put; none keeps the source's prompts.")],
    out: Annotated[Path, typer.Option(help="The .jsonl file to write; must not exist.")],
    instruction: Instruction = None,
    source: SourceName = None,
    config: Annotated[list[str] | None, typer.Option(help="Configurations to read; all for all.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a folder or a data set on the hub.")] = None,
    question_column: Annotated[str | None, typer.Option(help="With --answer-column: not detected.")] = None,
    answer_column: Annotated[str | None, typer.Option(help="With --question-column: not detected.")] = None,
    answers: Answers = "final",
    bad_rows: BadRows = "refuse",
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="As data.max_prompt_tokens will be.")] = 1024,
    too_long: TooLong = "drop",
    language: Annotated[Literal["en", "zh"] | None, typer.Option(help="Keep only these problems.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Keep so many, drawn by --seed.")] = None,
    seed: Annotated[int, typer.Option(help="For --limit.")] = 0,
) -> None:
    r"""Make a file of prompts out of a published data set: each problem once, and every drop counted.

    Without --source the set is read from where it is published; with it, from a file that you have:

        megatron-dppo prepare-data dapo-math-17k --tokenizer MODEL --template dapo --out dapo.jsonl

        megatron-dppo prepare-data aime24 --source a.parquet --tokenizer MODEL --template dapo --out a.jsonl

    For a chat model and wording of your own, the chat template writes one message of the user:

        megatron-dppo prepare-data custom --source a.jsonl --tokenizer MODEL --template chat --out b.jsonl
        --instruction "Put your final answer within \boxed{}."

    The template decides which reward reads the answers: "dapo" goes with data.reward = "dapo"; "base",
    "thinking" and "r1_distill" go with "math"; for "chat" and "none" the prompts' words decide. OUT with
    .counts.json holds the count of rows by outcome. Errors in what you gave end with 2.
    """
    with user_errors():
        from megatron_dppo.data.prompts.prepare import Options
        from megatron_dppo.data.prompts.prompt_file import (
            DATA_SETS,
            open_data_set,
            refuse_unusable,
            write_prompt_file,
        )

        data_set = DATA_SETS[name]
        options = Options(
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
        columns = (question_column, answer_column)
        refuse_unusable(out, source or data_set.source, *columns, template, instruction)
        opened = open_data_set(data_set, source, config, split)
        typer.echo(f"reading {opened.name}: columns {', '.join(opened.columns)}", err=True)
        prepared = write_prompt_file(out, opened, tokenizer, options)
    _report(prepared, out)


def _report(prepared: "Prepared", out: Path) -> None:
    """Print the counts, the doubts, and the rewards that go with the prompts."""
    from megatron_dppo.data.prompts.prompt_file import sha256_of, summary
    from megatron_dppo.rewards import REWARDS, answer_form

    typer.echo(summary(prepared))
    typer.echo(f"{out}: sha256 {sha256_of(out)}")
    for doubt in prepared.doubts:
        typer.echo(f"warning: {doubt}", err=True)
    fitting = [
        reward for reward in REWARDS if prepared.form is not None and answer_form(reward) == prepared.form
    ]
    for reward in fitting:
        typer.echo(f'these prompts go with data.reward = "{reward}"')
    if not fitting:
        typer.echo(
            "note: not all prompts ask for an answer in one form that a registered reward reads", err=True
        )
