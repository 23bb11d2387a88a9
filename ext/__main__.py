"""The command line: ``python -m ext <command>``. Exit codes: 0 ok, 2 infeasible, 3 bad config."""

from __future__ import annotations

import typer

from ext.commands.check import check
from ext.commands.doctor import doctor

app = typer.Typer(help="Pipeline schedules, recomputation and MoE dispatch.", no_args_is_help=True)
app.command()(check)
app.command()(doctor)

if __name__ == "__main__":
    app(prog_name="python -m ext")
