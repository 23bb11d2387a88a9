"""`python -m ext trace`: timelines, simulated and measured, their difference and their picture."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ext.commands import simulate as simulate_command
from ext.commands.simulate_request import Request
from ext.core.errors import ConfigError, DataError
from ext.pipeline.chrome import TraceFile, read_trace
from ext.pipeline.simulate import simulate as simulate_plan
from ext.pipeline.trace import hand_over, mean_times, measured_costs, simulated_trace

trace = typer.Typer(add_completion=False, no_args_is_help=True)
"""Timelines, simulated and measured: Chrome/Perfetto files, their difference, pictures."""


@trace.callback()
def _trace() -> None:
    """Timelines, simulated and measured: Chrome/Perfetto files, their difference, pictures."""


@trace.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def simulate(
    context: typer.Context,
    output: Annotated[Path, typer.Option(help="The file to write.", metavar="FILE")],
    unit_ms: Annotated[float, typer.Option(help="Milliseconds of one unit of the given times.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate one step and write its timeline as a file for ui.perfetto.dev or about:tracing.

    Takes the options of `python -m ext simulate` too.
    """
    if not 0 < unit_ms < float("inf"):
        raise ConfigError(f"--unit-ms: found {unit_ms}; give a finite number above 0.")
    simulation = simulate_command.run(_request(context.args))
    step = simulated_trace(simulation, unit_ms / 1e3)
    _write(TraceFile("simulated", simulation.plan, (step,)), output)
    if as_json:
        answer = {"output": str(output), "pipeline_time_ms": step.pipeline_time * 1e3, "bubble_share": step.bubble}
        typer.echo(json.dumps(answer))
    else:
        typer.echo(f"{output}: step time {step.pipeline_time * 1e3:.6g} ms (simulated), bubble {step.bubble:.1%}")


@trace.command()
def diff(
    files: Annotated[list[Path], typer.Argument(help="[SIMULATED.json] MEASURED.json", metavar="FILES")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare the bubble of each stage, predicted and measured.

    Where only the measured file is given, the prediction is a simulation of its plan with the mean times and the
    hand-over between stages that it shows.
    """
    if len(files) not in (1, 2):
        raise ConfigError(f"FILES: found {len(files)}; give a measured file, or a simulated one and a measured one.")
    measured = read_trace(files[-1])
    predicted = read_trace(files[0]) if len(files) == 2 else _simulated_again(measured)
    if predicted.plan.rank_of != measured.plan.rank_of:
        raise ConfigError(
            f"{files[0]} has {predicted.plan.num_stages} stages on {predicted.plan.num_ranks} ranks, {files[-1]} has "
            f"{measured.plan.num_stages} on {measured.plan.num_ranks}. Simulate the shape that was run."
        )
    result = _compared(predicted, measured)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _show(result, predicted, measured)


@trace.command()
def draw(
    files: Annotated[list[Path], typer.Argument(help="Trace files, drawn one above the other.", metavar="FILES")],
    output: Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.", metavar="FILE")],
    step: Annotated[int | None, typer.Option(help="Which step.", show_default="the last of each file")] = None,
) -> None:
    """Draw timelines as a picture. Needs matplotlib."""
    from ext.commands.trace_draw import draw_files

    draw_files([read_trace(path) for path in files], output, step)
    typer.echo(str(output))


def _request(arguments: list[str]) -> Request:
    """Options of `simulate` as that command reads them."""
    app = typer.Typer(add_completion=False)
    app.command("simulate")(simulate_command.simulate)
    command = typer.main.get_command(app)
    with command.make_context("python -m ext trace simulate", list(arguments)) as parsed:
        return Request(**{field.name: parsed.params[field.name] for field in fields(Request)})


def _write(trace_file: TraceFile, output: Path) -> None:
    try:
        trace_file.write(output)
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written: {error.strerror}. Name another file.") from error


def _simulated_again(measured: TraceFile) -> TraceFile:
    """What the simulator makes of the times in a measured file."""
    times = mean_times(measured.steps, measured.plan.num_stages)
    try:
        simulation = simulate_plan(measured.plan, measured_costs(times, hand_over(measured.steps)))
    except ValueError as error:
        raise DataError(f"the measured file's plan cannot be simulated: {error}") from error
    return TraceFile("simulated", measured.plan, (simulated_trace(simulation),))


def _compared(predicted: TraceFile, measured: TraceFile) -> dict[str, Any]:
    plan = measured.plan
    stages = [
        {"stage": stage, "predicted": bubbles[0], "measured": bubbles[1], "difference": bubbles[1] - bubbles[0]}
        for stage, rank in enumerate(plan.rank_of)
        for bubbles in [(predicted.bubbles[rank], measured.bubbles[rank])]
    ]
    return {
        "schedule": plan.schedule,
        "same_orders": predicted.plan.to_json() == plan.to_json(),
        "steps": [trace.step for trace in measured.steps],
        "predicted_pipeline_time_ms": predicted.pipeline_time * 1e3,
        "measured_pipeline_time_ms": measured.pipeline_time * 1e3,
        "predicted_bubble": sum(predicted.bubbles) / len(predicted.bubbles),
        "measured_bubble": sum(measured.bubbles) / len(measured.bubbles),
        "stages": stages,
    }


def _show(result: dict[str, Any], predicted: TraceFile, measured: TraceFile) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    table = Table("stage", "bubble predicted", "measured", "difference")
    rows = [(str(row["stage"]), row["predicted"], row["measured"]) for row in result["stages"]]
    for name, expected, found in [*rows, ("all", result["predicted_bubble"], result["measured_bubble"])]:
        table.add_row(name, f"{expected:.1%}", f"{found:.1%}", f"{found - expected:+.1%}")
    console.print(table)
    times = result["predicted_pipeline_time_ms"], result["measured_pipeline_time_ms"]
    console.print(
        f"pipeline time {times[0]:.6g} ms {predicted.source}, {times[1]:.6g} ms {measured.source} "
        f"({times[1] / times[0] - 1:+.1%})"
    )
    if not result["same_orders"]:
        plans = [f"{trace_file.plan.schedule} ({trace_file.plan.hash})" for trace_file in (predicted, measured)]
        console.print(f"the orders differ: predicted {plans[0]}, measured {plans[1]}")
