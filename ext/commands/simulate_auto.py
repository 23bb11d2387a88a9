"""The schedule `auto` on the command line: a search, its progress, and what it was compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ext.commands.simulate_request import Request
from ext.pipeline.layout import LayerCosts
from ext.pipeline.schedules.auto import Auto
from ext.planner.search.search import Chosen, search
from ext.planner.search.space import Space, any_layers
from ext.recompute.stage_aware import BudgetError

_RECOMPUTE = {"none": "none", "full": "all"}


def run_search(
    request: Request, schedule: Auto, layer: LayerCosts, layers: Sequence[int], *, show_progress: bool
) -> tuple[Chosen, Space]:
    """Search within what the options leave open; layers move unless `--layers-per-stage` places them.

    Raises:
        BudgetError: nothing keeps the budget.
    """
    budget = math.inf if request.activation_budget is None else request.activation_budget
    space = Space(
        models=any_layers(layer),
        layers_per_stage=tuple(layers),
        num_microbatches=request.micro_batches,
        budgets=(budget,) * len(layers),
        latency=request.p2p,
        moves_layers=request.layers_per_stage is None,
        recompute=_RECOMPUTE.get(request.recompute_policy, "open"),  # type: ignore[arg-type]
    )
    options = {"seconds": request.search_seconds, "seed": schedule.config.seed, "tolerance": request.tolerance}
    try:
        if not show_progress:
            return search(space, **options), space
        return _search_with_bar(space, options), space
    except BudgetError as error:
        raise BudgetError(*(f"--activation-budget: {problem}" for problem in error.problems)) from None


def _search_with_bar(space: Space, options: dict[str, Any]) -> Chosen:
    """On standard error; Ctrl-C ends the search with the best so far."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("searching"),
        BarColumn(),
        TextColumn("best {task.fields[best]}"),
        TextColumn("(Ctrl-C ends)"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0, best="-")

        def update(share: float, best: float) -> None:
            progress.update(task, completed=share, best=f"{best:.6g}")

        return search(space, **options, on_progress=update)
