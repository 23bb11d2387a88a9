"""`python -m ext simulate`: step time, bubble and memory of one schedule, without a device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ext.commands.simulate_request import Request, check_request, make
from ext.pipeline.build import build_plan, default_recompute, full_recompute
from ext.pipeline.costs import Costs
from ext.pipeline.grid import grid
from ext.pipeline.layout import LayerCosts, stage_costs
from ext.pipeline.schedule import Schedule
from ext.pipeline.simulate import Simulation
from ext.pipeline.simulate import simulate as simulate_plan

GRID_COLUMNS = 66
"""The text shows a grid of up to this many columns by itself."""


def simulate(
    stages: Annotated[int, typer.Option(help="Pipeline ranks P.")],
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per step.")],
    schedule: Annotated[str, typer.Option(help="Name of a schedule.")],
    forward: Annotated[float, typer.Option(help="Time of F, per stage and micro-batch.")] = 1.0,
    input_grad: Annotated[float, typer.Option(help="Time of I.")] = 1.0,
    weight_grad: Annotated[float, typer.Option(help="Time of W; B takes input-grad + weight-grad.")] = 1.0,
    recompute: Annotated[float | None, typer.Option(help="Time of R.", show_default="as --forward")] = None,
    p2p: Annotated[float, typer.Option(help="Time of a message between ranks.")] = 0.0,
    stash: Annotated[float, typer.Option(help="What a recomputed stage keeps, as a share of its activations.")] = 0.0,
    recompute_policy: Annotated[
        str, typer.Option(help="none, full, or default: the schedule's own.", metavar="NAME")
    ] = "default",
    activation_budget: Annotated[float | None, typer.Option(help="Activations that a rank may hold, in A.")] = None,
    num_layers: Annotated[int | None, typer.Option(help="Layers N.", show_default="8 per stage")] = None,
    layers_per_stage: Annotated[
        str | None, typer.Option(help="Layers of each stage, as in 2,2,3,1.", metavar="LIST", show_default="uniform")
    ] = None,
    search_seconds: Annotated[float, typer.Option(help="Time of a search, for schedules that search.")] = 5.0,
    show_grid: Annotated[
        bool | None, typer.Option("--grid/--no-grid", help="Show the text grid.", show_default="where it is small")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate one step of a pipeline: time, bubble, memory per rank.

    Times are per stage of N/P layers and per micro-batch, in any one unit. Memory is in units of A, all activations
    of N/P layers for one micro-batch.
    """
    request = Request(
        stages=stages,
        micro_batches=micro_batches,
        schedule=schedule,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        recompute=recompute,
        p2p=p2p,
        stash=stash,
        recompute_policy=recompute_policy,
        activation_budget=activation_budget,
        num_layers=num_layers,
        layers_per_stage=layers_per_stage,
        search_seconds=search_seconds,
    )
    result = run(request)
    if as_json:
        typer.echo(json.dumps(to_json(result)))
    else:
        show(result, show_grid)


def run(request: Request) -> Simulation:
    """Simulate what is asked.

    Raises:
        ConfigError: all that is wrong with the request.
        ScheduleError: a schedule of the user's own does not make a valid plan.
    """
    schedule, layers = check_request(request)
    recomputed = recomputed_layers(request, schedule, layers)
    costs = Costs(stage_costs(_layer_costs(request, sum(layers)), layers, recomputed), latency=request.p2p)
    schedule = make(request.schedule, request.shape, costs)
    return simulate_plan(build_plan(schedule, layers_per_stage=layers, recomputed_layers=recomputed), costs)


def recomputed_layers(request: Request, schedule: Schedule, layers: Sequence[int]) -> tuple[int, ...]:
    """Recomputed layers of each stage: where a policy's name, and a budget, become numbers."""
    if request.recompute_policy == "full":
        return full_recompute(schedule, layers)
    if request.recompute_policy == "none":
        return (0,) * len(layers)
    return default_recompute(schedule, layers)


def _layer_costs(request: Request, num_layers: int) -> LayerCosts:
    """One layer's share of a stage of N/P layers, whose activations are 1."""
    share = request.stages / num_layers
    return LayerCosts(
        forward=request.forward * share,
        input_grad=request.input_grad * share,
        weight_grad=request.weight_grad * share,
        recompute=(request.forward if request.recompute is None else request.recompute) * share,
        activations=share,
        stash=request.stash * share,
    )


def to_json(result: Simulation) -> dict[str, Any]:
    """The result as the command line's contract has it, and the peaks of micro-batches in flight."""
    return {
        "schedule": result.plan.schedule,
        "step_time": _plain(result.step_time),
        "bubble_share": _plain(result.bubble_share),
        "recompute_share": _plain(result.recompute_share),
        "peak_activations": [_plain(peak) for peak in result.peak_activations],
        "peak_in_flight": list(result.peak_in_flight),
        "layers_per_stage": list(result.plan.layers_per_stage),
        "recomputed_layers": list(result.plan.recomputed_layers),
        "plan_hash": result.plan.hash,
        "orders": result.plan.to_json(),
    }


def show(result: Simulation, show_grid: bool | None) -> None:
    """Print the result for people."""
    from rich.console import Console
    from rich.table import Table

    plan = result.plan
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{plan.schedule}[/bold]: {plan.num_ranks} ranks, {plan.num_microbatches} micro-batches")
    console.print(
        f"step time [bold]{result.step_time:.6g}[/bold] (simulated), bubble {result.bubble_share:.1%}, "
        f"recompute {result.recompute_share:.1%} of all ranks' time"
    )
    table = Table("rank", "stages", "layers", "recomputed", "busy", "in flight", "peak (A)")
    for rank in range(plan.num_ranks):
        stages = plan.stages_of(rank)
        table.add_row(
            str(rank),
            ",".join(map(str, stages)),
            ",".join(str(plan.layers_per_stage[stage]) for stage in stages),
            ",".join(str(plan.recomputed_layers[stage]) for stage in stages),
            f"{result.busy[rank] / result.step_time:.1%}",
            str(result.peak_in_flight[rank]),
            f"{result.peak_activations[rank]:.4g}",
        )
    console.print(table)
    text = grid(result) if show_grid is not False else ""
    if show_grid or text and max(line.count(" ") for line in text.splitlines()) < GRID_COLUMNS:
        typer.echo(text)
        typer.echo("F forward, B backward, I and W its halves, R recompute while waiting, r recompute inside B or I")


def _plain(value: float) -> float:
    """Without the noise of the last digits: 1.18, not 1.1800000000000002."""
    return float(f"{value:.12g}")
