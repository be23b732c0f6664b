"""What commands of `megatron-dppo` have in common: arguments, and how errors made for users end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from megatron_dppo.errors import ConfigError, MegatronDppoError

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


@contextmanager
def user_errors() -> Iterator[None]:
    """Errors made for users end as a message and status 2; each rank finds the same faults in a config."""
    try:
        yield
    except MegatronDppoError as error:
        rank = os.environ.get("RANK", "0")
        if rank == "0" or not isinstance(error, ConfigError):
            prefix = "" if rank == "0" else f"rank {rank}: "
            typer.echo(f"{prefix}{type(error).__name__}: {error}", err=True)
        raise typer.Exit(2) from None
