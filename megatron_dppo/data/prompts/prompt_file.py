"""Writes a prompt file from a published data set: deduplicates problems and counts every dropped row."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from tqdm import tqdm
from transformers import AutoTokenizer

from megatron_dppo.architectures.sizes import config_file
from megatron_dppo.data.prompts.final_answer import excerpt
from megatron_dppo.data.prompts.prepare import Prepared, PrepareOptions, prepare
from megatron_dppo.data.prompts.rows import DataSource, open_source
from megatron_dppo.errors import DataError, Problem, writing_to
from megatron_dppo.runtime.files import write_jsonl, write_whole


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


def write_prompt_file(out: Path, opened: DataSource, tokenizer: Path, options: PrepareOptions) -> Prepared:
    """Prepare the prompts of a data set, and write them and their counts.

    Raises:
        DataError: There is no tokenizer, or the data set cannot be prepared with these options.
    """
    prepared = prepare(opened, _load_tokenizer(tokenizer), options, _progress)
    _write(out, prepared, {"read_from": opened.name, "tokenizer": str(tokenizer), **asdict(options)})
    return prepared


def counts_file(out: Path) -> Path:
    """Return the path of the counts of an output file."""
    return out.with_name(f"{out.stem}.counts.json")


def refuse_unusable(
    out: Path,
    source: str | None,
    question: str | None,
    answer: str | None,
    template: str,
    instruction: str | None,
) -> None:
    """Reject contradictory options before anything is read.

    Raises:
        DataError: There is no source, the output has another suffix or exists, only one of the two columns is
            named, or an instruction is given for a template that does not use it.
        ConfigError: The output cannot be written.
    """
    if source is None:
        raise _problem("--source", "nothing", "a file, a folder or a name on the hub", "Name the data set.")
    if out.suffix != ".jsonl":
        raise _problem("--out", str(out), "a name that ends in .jsonl", "Choose another name.")
    if out.exists():
        raise _problem("--out", f"{out}, which exists", "a new file", "Choose another name, or delete it.")
    if instruction is not None and template != "chat":
        found, expected = f"one with --template {template}", "--template chat, which inserts it into prompts"
        raise _problem("--instruction", found, expected, "Choose that template, or leave the instruction out.")
    if (question is None) != (answer is None):
        found = "one of --question-column and --answer-column"
        raise _problem("columns", found, "both or none", "Name both columns.")
    with writing_to("--out", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out.parent):
            pass


def open_data_set(
    data_set: DataSet, source: str | None, configs: Sequence[str] | None, split: str | None
) -> DataSource:
    """Open the published data set, or the user's `source` without the published configs and split."""
    if source is not None or data_set.source is None:
        return open_source(source or "", configs or (), split or "train")
    return open_source(data_set.source, configs or data_set.configs, split or data_set.split)


def _load_tokenizer(folder: Path) -> Any:
    if not folder.is_dir():
        raise _problem("--tokenizer", f"{folder}", "the folder of a model", "Download the model first.")
    config = config_file(folder)  # a converted folder has it in hf/
    try:
        return AutoTokenizer.from_pretrained(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            folder if config is None else config.parent, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        action = "Give the folder that model.load will name."
        raise _problem("--tokenizer", f"{folder}: {error}", "a tokenizer", action) from error


def _progress(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
    return tqdm(items, desc=what, total=total, unit="", unit_scale=True, mininterval=1.0, leave=False)


def _write(out: Path, prepared: Prepared, asked: dict[str, Any]) -> None:
    """Write the prompts, then their counts. Each file is written atomically."""
    write_jsonl(out, prepared.rows)
    found = {
        "schema": asdict(prepared.schema),
        "counts": prepared.counts,
        "instructions_removed": prepared.num_instructions_removed,
        "answers_taken_out_of_texts": len(prepared.answers_taken),
        "doubts": list(prepared.doubts),
        "longest_prompt_tokens": prepared.longest_prompt_tokens,
        "sha256": sha256_of(out),
    }
    write_whole(counts_file(out), [json.dumps(asked | found, indent=2, ensure_ascii=False) + "\n"])


def summary(prepared: Prepared) -> str:
    """Return the recognised schema and each count as lines for the terminal."""
    schema = prepared.schema
    rows = [*prepared.counts.items(), ("longest prompt, tokens", prepared.longest_prompt_tokens)]
    if prepared.num_instructions_removed:
        rows.append(("had DAPO's instruction, which was replaced", prepared.num_instructions_removed))
    if prepared.answers_taken:
        text, answer = prepared.answers_taken[0]
        rows.append(
            (
                f"answers taken out of a text, the first, {answer!r}, out of {excerpt(text)}",
                len(prepared.answers_taken),
            )
        )
    lines = [f"schema: {schema.name} ({schema.prompt}, {schema.answer})"]
    if prepared.unread_columns:
        lines.append(f"columns that are not read: {', '.join(prepared.unread_columns)}")
    return "\n".join([*lines, *(f"{count:>12,}  {what}" for what, count in rows)])


def sha256_of(file: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _problem(where: str, found: str, expected: str, action: str) -> DataError:
    return DataError(str(Problem(where, found, expected, action)))
