"""Make a file of prompts out of a published data set: each problem once, and every drop counted.

python tools/prepare_data.py dapo-math-17k --tokenizer MODEL --template dapo --out data/dapo_math_17k.jsonl
python tools/prepare_data.py aime24 --source a.parquet --tokenizer MODEL --template dapo --out data/aime24.jsonl

The template decides which reward reads the answers: "dapo" goes with data.reward = "dapo"; "base", "thinking"
and "r1_distill" go with "math". Beside the output stands what became of the rows: OUT with .counts.json.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from tqdm import tqdm
from transformers import AutoTokenizer

from megatron_dppo.data.prompts.prepare import Options, Prepared, prepare
from megatron_dppo.data.prompts.sources import Source, open_source
from megatron_dppo.data.prompts.templates import ASKS_FOR
from megatron_dppo.errors import DataError, MegatronDppoError, Problem
from megatron_dppo.rewards import REWARDS, answer_form
from megatron_dppo.runtime.jsonl import write_jsonl

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class DataSet:
    """Where a set is published, and how many problems it has."""

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

Name = Literal["dapo-math-17k", "math", "math-sanity", "aime24", "aime25", "custom"]
Template = Literal["base", "r1_distill", "thinking", "dapo", "none"]


@app.command(help=__doc__)
def main(
    name: Annotated[Name, typer.Argument(help="Which set; custom is any other.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the model that will be trained.")],
    template: Annotated[Template, typer.Option(help="How problems are put; none keeps the source's prompts.")],
    out: Annotated[Path, typer.Option(help="The .jsonl file to write; must not exist.")],
    source: Annotated[
        str | None, typer.Option(help="A .jsonl or .parquet file, a folder, or a name on the Hugging Face hub.")
    ] = None,
    config: Annotated[list[str] | None, typer.Option(help="Configurations to read; all for all.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a folder or a data set on the hub.")] = None,
    question_column: Annotated[str | None, typer.Option(help="With --answer-column: not detected.")] = None,
    answer_column: Annotated[str | None, typer.Option(help="With --question-column: not detected.")] = None,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="As data.max_prompt_tokens will be.")] = 1024,
    too_long: Annotated[
        Literal["drop", "refuse"], typer.Option(help="What to do with longer prompts.")
    ] = "drop",
    language: Annotated[Literal["en", "zh"] | None, typer.Option(help="Keep only these problems.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Keep so many, drawn by --seed.")] = None,
    seed: Annotated[int, typer.Option(help="For --limit.")] = 0,
) -> None:
    """Prepare a data set."""
    data_set = DATA_SETS[name]
    options = Options(
        name=name.replace("-", "_"),
        template=template,
        max_prompt_tokens=max_prompt_tokens,
        refuse_too_long=too_long == "refuse",
        language=language,
        limit=limit,
        seed=seed,
        num_problems=data_set.num_problems,
        question_column=question_column,
        answer_column=answer_column,
    )
    try:
        _refuse_unusable(out, source or data_set.source, question_column, answer_column)
        opened = _open(data_set, source, config, split)
        typer.echo(f"reading {opened.name}: columns {', '.join(opened.columns)}", err=True)
        prepared = prepare(opened, _load_tokenizer(tokenizer), options, _progress)
        _write(out, prepared, {"read_from": opened.name, "tokenizer": str(tokenizer), **asdict(options)})
    except MegatronDppoError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(_table(prepared))
    typer.echo(f"{out}: sha256 {_sha256(out)}")
    for reward in REWARDS:
        if answer_form(reward) == ASKS_FOR.get(template, ""):
            typer.echo(f'these prompts go with data.reward = "{reward}"')


def counts_file(out: Path) -> Path:
    """Where the counts of an output stand."""
    return out.with_name(f"{out.stem}.counts.json")


def _refuse_unusable(out: Path, source: str | None, question: str | None, answer: str | None) -> None:
    if source is None:
        raise _problem("--source", "nothing", "a file, a folder or a name on the hub", "Name the data set.")
    if out.suffix != ".jsonl":
        raise _problem("--out", str(out), "a name that ends in .jsonl", "Choose another name.")
    if out.exists():
        raise _problem("--out", f"{out}, which exists", "a new file", "Choose another name, or delete it.")
    if (question is None) != (answer is None):
        found = "one of --question-column and --answer-column"
        raise _problem("columns", found, "both or none", "Name both columns.")


def _open(data_set: DataSet, source: str | None, configs: list[str] | None, split: str | None) -> Source:
    """The set's published place, or the user's, of which nothing is assumed."""
    if source is not None or data_set.source is None:
        return open_source(source or "", configs or (), split or "train")
    return open_source(data_set.source, configs or data_set.configs, split or data_set.split)


def _load_tokenizer(folder: Path) -> Any:
    if not folder.is_dir():
        raise _problem("--tokenizer", f"{folder}", "the folder of a model", "Download the model first.")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        action = "Give the folder that model.load will name."
        raise _problem("--tokenizer", f"{folder}: {error}", "a tokenizer", action) from error


def _progress(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
    return tqdm(items, desc=what, total=total, unit="", unit_scale=True, mininterval=1.0, leave=False)


def _write(out: Path, prepared: Prepared, asked: dict[str, Any]) -> None:
    """The prompts, then their counts; each appears whole or not at all."""
    write_jsonl(out, prepared.rows)
    found = {
        "schema": asdict(prepared.schema),
        "counts": prepared.counts,
        "instructions_removed": prepared.num_instructions_removed,
        "longest_prompt_tokens": prepared.longest_prompt_tokens,
        "sha256": _sha256(out),
    }
    temporary = counts_file(out).with_suffix(".tmp")
    temporary.write_text(json.dumps(asked | found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(counts_file(out))


def _table(prepared: Prepared) -> str:
    schema = prepared.schema
    rows = [*prepared.counts.items(), ("longest prompt, tokens", prepared.longest_prompt_tokens)]
    if prepared.num_instructions_removed:
        rows.append(("had DAPO's instruction, which was replaced", prepared.num_instructions_removed))
    lines = [f"schema: {schema.name} ({schema.prompt}, {schema.answer})"]
    return "\n".join([*lines, *(f"{count:>12,}  {what}" for what, count in rows)])


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _problem(where: str, found: str, expected: str, action: str) -> DataError:
    return DataError(str(Problem(where, found, expected, action)))


if __name__ == "__main__":
    app()
