"""The command line: ``python -m ext <command>``. Exit codes: 0 ok, 2 infeasible, 3 bad config or usage.

With ``--json`` standard output is exactly one JSON object, ``{"error": ...}`` where a command fails.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from ext.core.errors import ConfigError, ExtError, InfeasibleError, nearest

COMMANDS = (
    "check",
    "doctor",
    "simulate",
    "trace",
)
"""Each is a function, or an app of commands, of this name in ``ext/commands/<name>.py``, imported when it is used."""

EXIT_INFEASIBLE = 2
EXIT_BAD_CONFIG = 3

# Newer releases of typer bring a click of their own; the base of this class is in whichever they use.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Commands(TyperGroup):
    """Looks commands up by name, so that each imports only what it needs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            raise ConfigError(
                f"unknown command '{cmd_name}'.{nearest(cmd_name, COMMANDS)} Known: {', '.join(COMMANDS)}."
            )
        function = getattr(importlib.import_module(f"ext.commands.{cmd_name}"), cmd_name)
        if isinstance(function, typer.Typer):
            group = typer.main.get_command(function)
            group.name = cmd_name
            return group
        app = typer.Typer(add_completion=False)
        app.command(cmd_name)(function)
        return typer.main.get_command(app)


app = typer.Typer(
    cls=Commands, help="Pipeline schedules, recomputation and MoE dispatch.", add_completion=False, no_args_is_help=True
)


@app.callback()
def _commands() -> None:
    """Makes the app a group although its commands are not registered here."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments or ["--help"], prog_name="python -m ext", standalone_mode=False)
    except UsageError as error:
        return _fail(error.format_message(), arguments, EXIT_BAD_CONFIG, usage=error)  # type: ignore[attr-defined]
    except ExtError as error:
        return _fail(str(error), arguments, EXIT_INFEASIBLE if isinstance(error, InfeasibleError) else EXIT_BAD_CONFIG)
    return code if isinstance(code, int) else 0


def _fail(message: str, arguments: Sequence[str], code: int, usage: Any = None) -> int:
    if "--json" in arguments:
        typer.echo(json.dumps({"error": message}))
    elif usage is not None:
        usage.show()
    else:
        typer.echo(f"error: {message}", err=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
