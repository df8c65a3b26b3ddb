"""The `flashkernels` command: one file per subcommand, imported only when that subcommand runs."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Annotated, Any

import typer
import typer.core
import typer.main

COMMANDS = tuple(module.name for module in pkgutil.iter_modules(__path__))  # cli/<name>.py holds the function <name>


class Commands(typer.core.TyperGroup):
    """Loads a command from its file on demand. A refusal (ValueError), or a file that is not there or cannot be read or
    written (OSError), becomes one line instead of a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        single = typer.Typer(add_completion=False)
        single.command(cmd_name)(getattr(importlib.import_module(f"flashkernels.cli.{cmd_name}"), cmd_name))
        return typer.main.get_command(single)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # nobody reads on: click ends quietly
            raise
        except OSError as error:
            raise refusal(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from error
        except ValueError as error:
            raise refusal(str(error)) from error


def refusal(words: str) -> typer.Exit:
    """The end of a command that could not do what was asked, said in one line."""
    typer.echo(f"error: {' '.join(words.split())}", err=True)
    return typer.Exit(2)


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        from flashkernels import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fast GPU kernels that say why they were chosen and how far from the roofline they run."""


def main() -> None:
    app(prog_name="flashkernels")
