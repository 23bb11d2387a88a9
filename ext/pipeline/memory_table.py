"""The memory of every stage of a plan, predicted and measured, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ext.cost.states import States
from ext.pipeline.actions import B, W
from ext.pipeline.costs import StageCosts
from ext.pipeline.memory import heaviest_loads, in_flight, peak
from ext.pipeline.plan import Plan
from ext.pipeline.stage_model import PipelineProfile

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class StageMemory:
    """Bytes that the rank of one stage holds at its heaviest moment.

    Attributes:
        stage: index of the stage.
        layers: of the stage.
        recomputed: how many of them are recomputed.
        in_flight: most micro-batches that hold activations at once.
        states: parameters, gradients, optimizer.
        activations: what autograd and the engine hold for the micro-batches in flight, at its peak, with the working
            set of a recompute and gradients that a W holds while it runs.
        loss: the part of ``activations`` that the layers behind the last recomputable one hold: logits and loss.
        transient: most that a layer's forward or backward holds for a moment beside them.
        messages: received and sent tensors that wait; an upper bound.
        budget: what the rank may hold; None where nothing limits it.
        measured: states and activations as counted in a run; None before.
        allocated: peak of the device's allocator in a run; None before and on CPU.
    """

    stage: int
    layers: int
    recomputed: int
    in_flight: int
    states: States
    activations: int
    loss: int = 0
    transient: int = 0
    messages: int = 0
    budget: int | None = None
    measured: int | None = None
    allocated: int | None = None

    @property
    def live(self) -> int:
        """What ``measured`` counts: states and activations."""
        return self.states.total + self.activations

    @property
    def total(self) -> int:
        """All that the rank needs."""
        return self.live + self.transient + self.messages

    @property
    def exceeds(self) -> bool:
        """Whether the prediction is above the budget."""
        return self.budget is not None and self.total > self.budget


def predict(
    plan: Plan,
    profile: PipelineProfile,
    budgets: Sequence[int] | None = None,
    costs: Sequence[StageCosts] | None = None,
) -> list[StageMemory]:
    """The memory of every stage of a linear plan, by stage.

    Args:
        plan: with one stage per rank.
        profile: of these stages.
        budgets: bytes that each stage's rank may hold.
        costs: of the stages, where not whole layers are recomputed.
    """
    rows = []
    for index, stage in enumerate(profile.stages):
        order = plan.orders[plan.rank_of[index]]
        loads = heaviest_loads(order)
        sizes = stage.costs(plan.recomputed_layers[index]) if costs is None else costs[index]
        states, activations = profile.states(index), peak(loads, sizes)
        passing, beside = profile.passing_gradients(index)
        if passing and not any(action.kind is B for action in order):
            states = replace(states, gradients=states.gradients - passing)
            activations = max(activations, peak(heaviest_loads(order, within=W), sizes) + beside)
        rows.append(
            StageMemory(
                stage=index,
                layers=plan.layers_per_stage[index],
                recomputed=plan.recomputed_layers[index],
                in_flight=in_flight(loads),
                states=states,
                activations=round(activations),
                loss=max(load.kept * stage.loss_bytes + load.waiting * stage.waiting_loss_bytes for load in loads),
                transient=stage.transient,
                messages=profile.messages(index),
                budget=None if budgets is None else budgets[index],
            )
        )
    return rows


def heaviest(rows: Sequence[StageMemory]) -> StageMemory:
    """The stage with most memory: measured where it was, else predicted."""
    return max(rows, key=lambda row: row.total if row.measured is None else row.measured)


def table(rows: Sequence[StageMemory]) -> str:
    """One line per stage, the heaviest marked; columns that hold nothing are left out."""
    name, size = unit_for(max(row.total for row in rows))

    def shown(value: int | None) -> str:
        return "" if value is None else f"{value / size:.3f}"

    columns: dict[str, list[str]] = {
        "stage": [str(row.stage) for row in rows],
        "layers": [str(row.layers) for row in rows],
        "recomputed": [str(row.recomputed) for row in rows],
        "in flight": [str(row.in_flight) for row in rows],
        "parameters": [shown(row.states.parameters) for row in rows],
        "gradients": [shown(row.states.gradients) for row in rows],
        "optimizer": [shown(row.states.optimizer) for row in rows],
        "buckets": [shown(row.states.buckets or None) for row in rows],
        "activations": [shown(row.activations) for row in rows],
        "(loss)": [f"({shown(row.loss)})" if row.loss else "" for row in rows],
        "live": [shown(row.live) for row in rows],
        "measured": [shown(row.measured) for row in rows],
        "passing": [shown(row.transient or None) for row in rows],
        "messages": [shown(row.messages or None) for row in rows],
        "total": [shown(row.total) for row in rows],
        "allocated": [shown(row.allocated) for row in rows],
        "budget": [shown(row.budget) for row in rows],
    }
    most = heaviest(rows)
    marks = ["  <- heaviest" if row is most else "" for row in rows]
    filled = {title: cells for title, cells in columns.items() if any(cells)}
    widths = {title: max(map(len, (title, *cells))) for title, cells in filled.items()}
    lines = [" ".join(title.rjust(widths[title]) for title in filled)]
    for index, mark in enumerate(marks):
        lines.append(" ".join(cells[index].rjust(widths[title]) for title, cells in filled.items()) + mark)
    return f"memory per stage in {name}\n" + "\n".join(lines)


def unit_for(size: float) -> tuple[str, int]:
    """Name and bytes of the unit in which ``size`` reads well."""
    return next((unit for unit in (("GiB", GIB), ("MiB", MIB)) if size >= unit[1]), ("KiB", KIB))


def amount(size: float) -> str:
    """Bytes with a unit, as in ``1.250 GiB``."""
    name, unit = unit_for(size)
    return f"{size / unit:.3f} {name}"
