"""The command `megatron-dppo`."""

from typing import Annotated

import typer

from megatron_dppo import __version__
from megatron_dppo.cli import analysis, checkpoints, data, grid, train
from megatron_dppo.cli.options import keep_examples

app = typer.Typer(
    name="megatron-dppo",
    help="Reinforcement-learning post-training of MoE language models with Divergence PPO.",
    epilog="Start with: megatron-dppo check CONFIG, which loads no model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for commands in (train.app, grid.app, analysis.app, checkpoints.app, data.app):
    app.add_typer(commands)
keep_examples(app)


def main() -> None:
    """Run the command line."""
    app()


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"megatron-dppo {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Reinforcement-learning post-training of MoE language models with Divergence PPO."""
