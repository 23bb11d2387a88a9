"""`python -m ext simulate`: step time, bubble and memory of one schedule, without a device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ext.commands.simulate_auto import run_search
from ext.commands.simulate_config import ConfigRequest, memory_json, run_config
from ext.commands.simulate_request import Request, check_request, make
from ext.core.errors import ConfigError
from ext.pipeline.build import build_plan, default_recompute, full_recompute
from ext.pipeline.costs import Costs
from ext.pipeline.fit import ROUNDING
from ext.pipeline.grid import grid
from ext.pipeline.layout import LayerCosts, stage_costs
from ext.pipeline.memory_table import StageMemory
from ext.pipeline.memory_table import table as memory_table
from ext.pipeline.schedule import Schedule
from ext.pipeline.schedules.auto import Auto
from ext.pipeline.simulate import Simulation
from ext.pipeline.simulate import simulate as simulate_plan
from ext.pipeline.stage_model import equal_layers
from ext.planner.search.search import Chosen
from ext.recompute.stage_aware import BudgetError, StageAware

GRID_COLUMNS = 66
"""The text shows a grid of up to this many columns by itself."""


def simulate(
    stages: Annotated[int | None, typer.Option(help="Pipeline ranks P.", show_default="required")] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Micro-batches per step.", show_default="required without --config")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Name of a schedule.", show_default="required without --config")
    ] = None,
    forward: Annotated[float, typer.Option(help="Time of F, per stage and micro-batch.")] = 1.0,
    input_grad: Annotated[float, typer.Option(help="Time of I.")] = 1.0,
    weight_grad: Annotated[float, typer.Option(help="Time of W; B takes input-grad + weight-grad.")] = 1.0,
    recompute: Annotated[float | None, typer.Option(help="Time of R.", show_default="as --forward")] = None,
    p2p: Annotated[float, typer.Option(help="Time of a message between ranks.")] = 0.0,
    stash: Annotated[float, typer.Option(help="What a recomputed stage keeps, as a share of its activations.")] = 0.0,
    recompute_policy: Annotated[
        str,
        typer.Option(
            help="none, full, stage_aware, or default: stage_aware with a budget, else the schedule's own.",
            metavar="NAME",
        ),
    ] = "default",
    activation_budget: Annotated[float | None, typer.Option(help="Activations that a rank may hold, in A.")] = None,
    num_layers: Annotated[int | None, typer.Option(help="Layers N.", show_default="8 per stage")] = None,
    layers_per_stage: Annotated[
        str | None, typer.Option(help="Layers of each stage, as in 2,2,3,1.", metavar="LIST", show_default="uniform")
    ] = None,
    search_seconds: Annotated[float, typer.Option(help="Time of a search, for schedules that search.")] = 5.0,
    tolerance: Annotated[float, typer.Option(help="auto keeps plain 1f1b within this share of the best.")] = 0.0,
    config: Annotated[
        Path | None,
        typer.Option(help="A ds_config instead of the options above: seconds, and memory per stage.", metavar="FILE"),
    ] = None,
    model: Annotated[
        str, typer.Option(help="With --config: a preset, or a JSON file with the shape.", metavar="NAME|FILE")
    ] = "gpt-1.3b",
    device: Annotated[str, typer.Option(help="With --config: a preset.", metavar="NAME")] = "a100-80gb",
    world_size: Annotated[int | None, typer.Option(help="With --config: ranks.", show_default="one replica")] = None,
    show_grid: Annotated[
        bool | None, typer.Option("--grid/--no-grid", help="Show the text grid.", show_default="where it is small")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate one step of a pipeline: time, bubble, memory per rank.

    Times are per stage of N/P layers and per micro-batch, in any one unit. Memory is in units of A, all activations
    of N/P layers for one micro-batch. With --config a GPT is timed and weighed by formulas, in seconds and bytes.
    """
    if config is not None:
        _simulate_config(ConfigRequest(config, model, device, stages, world_size), show_grid, as_json=as_json)
        return
    missing = {"--stages": stages, "--micro-batches": micro_batches, "--schedule": schedule}
    if stages is None or micro_batches is None or schedule is None:
        raise ConfigError(
            *(f"{name}: missing; give it, or --config." for name, value in missing.items() if value is None)
        )
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
        tolerance=tolerance,
    )
    result, chosen = run_with_search(request, show_progress=not as_json)
    if as_json:
        searched = {} if chosen is None else {"search": chosen.to_json()}
        typer.echo(json.dumps({**to_json(result), **searched}))
    else:
        show(result, show_grid)
        if chosen is not None:
            typer.echo(f"auto: {chosen.reason}; {chosen.num_evaluations} candidates, ended by {chosen.stopped_by}")


def _simulate_config(request: ConfigRequest, show_grid: bool | None, *, as_json: bool) -> None:
    result, rows = run_config(request)
    if as_json:
        typer.echo(json.dumps({**to_json(result), "memory": memory_json(rows)}))
    else:
        show(result, show_grid, rows)


def run(request: Request) -> Simulation:
    """Simulate what is asked.

    Raises:
        ConfigError: all that is wrong with the request.
        ScheduleError: a schedule of the user's own does not make a valid plan.
        InfeasibleError: the budget cannot be kept.
    """
    return run_with_search(request)[0]


def run_with_search(request: Request, *, show_progress: bool = False) -> tuple[Simulation, Chosen | None]:
    """As `run`, with what the search found where the schedule is one that searches."""
    schedule, layers = check_request(request)
    layer = _layer_costs(request, sum(layers))
    if isinstance(schedule, Auto):
        chosen, space = run_search(request, schedule, layer, layers, show_progress=show_progress)
        return simulate_plan(chosen.plan, space.costs(chosen.layout)), chosen
    if request.is_stage_aware:
        schedule, recomputed = within_budget(request, schedule, layer, layers)
        costs = Costs(stage_costs(layer, layers, recomputed), latency=request.p2p)
    else:
        recomputed = recomputed_layers(request, schedule, layers)
        costs = Costs(stage_costs(layer, layers, recomputed), latency=request.p2p)
        schedule = make(request.schedule, request.shape, costs)
    result = simulate_plan(build_plan(schedule, layers_per_stage=layers, recomputed_layers=recomputed), costs)
    _check_budget(result, request.activation_budget)
    return result, None


def recomputed_layers(request: Request, schedule: Schedule, layers: Sequence[int]) -> tuple[int, ...]:
    """Recomputed layers of each stage where the policy's name decides them."""
    if request.recompute_policy == "full":
        return full_recompute(schedule, layers)
    if request.recompute_policy == "none":
        return (0,) * len(layers)
    return default_recompute(schedule, layers)


def within_budget(
    request: Request, schedule: Schedule, layer: LayerCosts, layers: Sequence[int]
) -> tuple[Schedule, tuple[int, ...]]:
    """The variant of the schedule and the recomputed layers of each stage that the budget allows.

    Raises:
        InfeasibleError: it allows none.
    """
    models = [
        equal_layers(layer, count, may_recompute=schedule.may_recompute(stage)) for stage, count in enumerate(layers)
    ]
    budget = request.activation_budget
    assert budget is not None
    try:
        choice = StageAware().choose(schedule, models, [budget] * len(layers), latency=request.p2p)
    except BudgetError as error:
        raise BudgetError(*(f"--activation-budget: {problem}" for problem in error.problems)) from None
    return choice.schedule, choice.recomputed_layers


def _check_budget(result: Simulation, budget: float | None) -> None:
    """A budget holds whatever decides the recomputation."""
    if budget is None:
        return
    over = [
        f"--activation-budget: rank {rank} holds {peak:.4g}, the budget is {budget:g}."
        for rank, peak in enumerate(result.peak_activations)
        if peak > budget * ROUNDING
    ]
    if over:
        raise BudgetError(*over, "Raise the budget, or leave the policy out to have as much recomputed as it takes.")


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


def show(result: Simulation, show_grid: bool | None, rows: Sequence[StageMemory] = ()) -> None:
    """Print the result for people; with ``rows`` times are seconds, and memory is theirs."""
    from rich.console import Console

    plan = result.plan
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{plan.schedule}[/bold]: {plan.num_ranks} ranks, {plan.num_microbatches} micro-batches")
    console.print(
        f"step time [bold]{result.step_time:.6g}[/bold]{' s' if rows else ''} (simulated), "
        f"bubble {result.bubble_share:.1%}, recompute {result.recompute_share:.1%} of all ranks' time"
    )
    console.print(memory_table(rows) if rows else _rank_table(result))
    text = grid(result) if show_grid is not False else ""
    if show_grid or text and max(line.count(" ") for line in text.splitlines()) < GRID_COLUMNS:
        typer.echo(text)
        typer.echo("F forward, B backward, I and W its halves, R recompute while waiting, r recompute inside B or I")


def _rank_table(result: Simulation) -> Any:
    from rich.table import Table

    plan = result.plan
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
    return table


def _plain(value: float) -> float:
    """Without the noise of the last digits: 1.18, not 1.1800000000000002."""
    return float(f"{value:.12g}")
