"""What commands of `megatron-dppo` have in common: arguments, and how errors made for users end."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from megatron_dppo.errors import ConfigError, MegatronDppoError
from megatron_dppo.runtime.full_disk import full_disk_explained

Configs = Annotated[
    list[Path],
    typer.Argument(metavar="CONFIG", help="TOML files; a later one overrides an earlier one, key by key."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be given many times."),
]
AcceptChanges = Annotated[
    bool,
    typer.Option(
        "--accept-changes",
        help="Resume the run with settings that make it another experiment; metrics.jsonl notes them.",
    ),
]
SplitGpus = Annotated[
    int | None,
    typer.Option(metavar="GPUS", min=2, help="Also divide so many GPUs between servers and training."),
]
MeasuredRun = Annotated[
    Path | None, typer.Option(metavar="RUN", help="A run's folder, whose rates --split takes.")
]
Assumptions = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="A rate for --split, such as serving_rate=2000; many times."),
]


@contextmanager
def user_errors() -> Iterator[None]:
    """Errors made for users end as a message and status 2; each rank finds the same faults in a config.

    So does a full disk, whichever command meets it.
    """
    try:
        with full_disk_explained():
            yield
    except MegatronDppoError as error:
        rank = os.environ.get("RANK", "0")
        if rank == "0" or not isinstance(error, ConfigError):
            prefix = "" if rank == "0" else f"rank {rank}: "
            typer.echo(f"{prefix}{type(error).__name__}: {error}", err=True)
        raise typer.Exit(2) from None


def program(command: Callable[..., None]) -> typer.Typer:
    """Returns an app of one command alone, with the same options and help: what a program in tools/ runs."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command)
    return app
