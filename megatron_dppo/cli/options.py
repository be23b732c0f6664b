"""Common arguments and error handling of the commands of `megatron-dppo`."""

import errno
import inspect
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from megatron_dppo.errors import ConfigError, MegatronDppoError, Problem, exit_status
from megatron_dppo.plan.gpu_rates import RATES_FILE
from megatron_dppo.runtime.files import full_disk_explained

Configs = Annotated[
    list[Path],
    typer.Argument(metavar="CONFIG", help="TOML files; a later one overrides an earlier one, key by key."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key (repeatable)."),
]
AcceptChanges = Annotated[
    bool,
    typer.Option(
        "--accept-changes",
        help="Resume although settings changed that make it another experiment; metrics.jsonl records them.",
    ),
]
Gpus = Annotated[int, typer.Option("--gpus", min=1, help="Number of GPUs, one process each, over all nodes.")]
GpuMemory = Annotated[
    str,
    typer.Option("--gpu-memory", metavar="SIZE", help="Memory of each GPU: 80GB (80e9 bytes), 79.6GiB, ..."),
]
HostMemory = Annotated[
    str | None,
    typer.Option("--host-memory", metavar="SIZE", help="Host memory of each node. [default: not checked]"),
]
RatesFile = Annotated[
    Path | None,
    typer.Option(
        "--rates",
        metavar="FILE",
        help=f"Measured speeds of a GPU, by tools.gpu_machine. [default: {RATES_FILE} if it exists]",
    ),
]
SplitGpus = Annotated[
    int | None,
    typer.Option(metavar="GPUS", min=2, help="Also divide this many GPUs between servers and training."),
]
MeasuredRun = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="Run folder that measured a colocated server's memory in training."),
]
Assumptions = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="A rate for --split, such as serving_rate=2000, or response_tokens=3000 (repeatable).",
    ),
]


def _refuse_trace(context: typer.Context, value: bool | int | None) -> None:
    if value and not context.resilient_parsing:
        raise typer.BadParameter(
            "plan traces no step anymore. Without the option it prints the memory of the same moments; "
            "tests/recipes/test_full_size.py compares the formulas with a traced step."
        )


RemovedTrace = Annotated[bool, typer.Option("--trace", hidden=True, callback=_refuse_trace)]
RemovedTraceLayers = Annotated[int | None, typer.Option("--trace-layers", hidden=True, callback=_refuse_trace)]


def _refuse_rule_options(context: typer.Context, value: str | None) -> None:
    if value is not None and not context.resilient_parsing:
        first = value.partition(",")[0].strip() or "NAME=VALUE"
        raise typer.BadParameter(f"Set each option by a sweep of one value: --sweep rule_options.{first}.")


RemovedRuleOptions = Annotated[
    str | None, typer.Option("--rule-options", hidden=True, callback=_refuse_rule_options)
]


@contextmanager
def user_errors() -> Iterator[None]:
    """Print errors of this package, a full disk and Ctrl-C as a message, and exit with `errors.exit_status`.

    Only rank 0 prints config errors, because every rank finds the same ones.
    """
    try:
        with full_disk_explained(), _long_name_explained():
            yield
    except MegatronDppoError as error:
        rank = os.environ.get("RANK", "0")
        if rank == "0" or not isinstance(error, ConfigError):
            prefix = "" if rank == "0" else f"rank {rank}: "
            typer.echo(f"{prefix}{type(error).__name__}: {error}", err=True)
        raise typer.Exit(exit_status(error)) from None
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            typer.echo("SIGINT: ended", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None


@contextmanager
def _long_name_explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        found, expected = str(error.filename), "a path of names that the file system takes"
        raise ConfigError(Problem("a path", found, expected, "Choose a shorter name.")) from error


def keep_examples(app: typer.Typer) -> None:
    """Keep the line breaks of the indented examples in the help of an app's commands."""
    for command in app.registered_commands:
        assert command.callback is not None, "each command is a function"
        command.help = re.sub(r"\n\n(?= {4})", "\n\n\b\n", inspect.getdoc(command.callback) or "")
    for group in app.registered_groups:
        if group.typer_instance is not None:
            keep_examples(group.typer_instance)


def program(command: Callable[..., None]) -> typer.Typer:
    """Return an app with only this command, its options and its help, for a program in tools/."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command)
    keep_examples(app)
    return app
