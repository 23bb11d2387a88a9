"""`python -m ext check`: all that is wrong with a ds_config, before anything is launched."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ext.config import check_config

EXIT_BAD_CONFIG = 3


def check(
    config: Annotated[str, typer.Argument(help="A ds_config, as DeepSpeed takes it.", metavar="CONFIG.json")],
    world_size: Annotated[int | None, typer.Option(help="Ranks in all.")] = None,
    pipeline_stages: Annotated[int | None, typer.Option(help="Pipeline ranks.")] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Ranks that share each layer.")] = 1,
    num_layers: Annotated[int | None, typer.Option(help="Layers of the module, as many as its list holds.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a ds_config and its "ext" block; what depends on a number that is not given is skipped.

    Exit code 0 where all is well, 3 with problems.
    """
    problems = check_config(
        config,
        world_size=world_size,
        pipeline_stages=pipeline_stages,
        tensor_parallel=tensor_parallel,
        num_layers=num_layers,
    )
    if as_json:
        typer.echo(json.dumps({"ok": not problems, "problems": [asdict(problem) for problem in problems]}, indent=1))
    else:
        console = Console(soft_wrap=True)
        for problem in problems:
            console.print(Text(problem.key, "bold red") + Text(f": {problem.message}"))
        console.print(Text(f"{config}: {f'{len(problems)} problem(s)' if problems else 'ok'}"))
    if problems:
        raise typer.Exit(EXIT_BAD_CONFIG)
