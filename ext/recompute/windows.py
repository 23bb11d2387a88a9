"""Windows: when a dropped unit may be recomputed without cost, and in which order these times come.

For one micro-batch and one layer the order is F1 < F2 < P < B2 < C of the MLP half < B1 < C of the attention half:
forward all-reduces of the next micro-batch, pipeline wait, the all-reduces of the backward, and on demand (C).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ext.recompute.units import ATTENTION, MLP, AllReduces

ON_DEMAND = "C"
WAIT = "P"
"""The pipeline wait before a micro-batch's backward."""
UNDER_FORWARD = ("F1", "F2")
"""Windows under the all-reduces of the forward of the stage's next micro-batch."""
BEFORE_BACKWARD = (*UNDER_FORWARD, WAIT)
"""Windows that end before a micro-batch's backward; the last one catches what the others did not do."""
IN_BACKWARD = ("B1", "B2", ON_DEMAND)
"""Where a layer's values come back while the backward is at it or near it."""
_ON_DEMAND_POSITION = {MLP: 50, ATTENTION: 70}


@dataclass(frozen=True)
class Window:
    """A time in which recomputation is free, as seen from one layer and one micro-batch.

    Attributes:
        name: as it stands in tables and reports.
        capacity: seconds of recomputation that it hides per layer.
        position: place in the order of time.
        halves: units of these halves may run in it; empty for all.
        stage_wide: values recomputed here live for all layers of a micro-batch at once; else for one layer.
        exposed: share of the micro-batches that lack this window; theirs is recomputed on demand.
        slowdown: time of a recompute inside the window over its time alone.
        last_layer: whether the last layer of a stage has it, too.
    """

    name: str
    capacity: float
    position: int
    halves: frozenset[str] = frozenset()
    stage_wide: bool = False
    exposed: float = 0.0
    slowdown: float = 1.0
    last_layer: bool = True

    def admits(self, half: str) -> bool:
        """Whether units of ``half`` may run in it."""
        return not self.halves or half in self.halves


def on_demand_position(half: str) -> int:
    """Place of the on-demand recompute of a half in the order of time; the backward meets the MLP half first."""
    return _ON_DEMAND_POSITION.get(half, _ON_DEMAND_POSITION[ATTENTION])


def forward_windows(first: float, second: float, slowdown: float = 1.0) -> tuple[Window, Window]:
    """F1 and F2: the two all-reduces of the same layers' forward of the stage's next micro-batch, in seconds."""
    return (
        Window("F1", first, 10, stage_wide=True, slowdown=slowdown),
        Window("F2", second, 20, stage_wide=True, slowdown=slowdown),
    )


def backward_windows(first: float, second: float, slowdown: float = 1.0) -> tuple[Window, Window]:
    """B1 and B2: the all-reduces of the input gradients of a layer's fc1 and of the next layer's qkv.

    Args:
        first: seconds of the former that the host does not fill itself (with the weight gradient).
        second: the same for the latter; the last layer of a stage has no next layer.
        slowdown: see `Window`.
    """
    return (
        Window("B1", first, 60, frozenset((ATTENTION,)), slowdown=slowdown),
        Window("B2", second, 40, frozenset((MLP,)), slowdown=slowdown, last_layer=False),
    )


def wait_window(capacity: float, exposed: float, slowdown: float = 1.0) -> Window:
    """P: a pipeline wait before a micro-batch's backward, filled by an R action.

    Args:
        capacity: seconds per layer, the same for every micro-batch that has the wait.
        exposed: share of the step's micro-batches without a wait.
        slowdown: see `Window`.
    """
    return Window(WAIT, capacity, 30, stage_wide=True, exposed=exposed, slowdown=slowdown)


def one_f_one_b_waits(rank: int, num_ranks: int, num_microbatches: int, forward: float) -> tuple[Window, ...]:
    """The pipeline waits of a rank under 1F1B, as a window per layer; none on the last rank.

    Rank s of p waits before its first backward and before each of its p-1-s cool-down backwards, each time for at
    least the forward of a stage.

    Args:
        rank: position in the pipeline.
        num_ranks: pipeline ranks, of one stage each.
        num_microbatches: per step.
        forward: seconds of one layer's forward.
    """
    waits = min(num_ranks - rank, num_microbatches)
    return (wait_window(forward, 1 - waits / num_microbatches),) if rank < num_ranks - 1 else ()


def all_reduce_windows(waits: AllReduces, in_flight: int, forward_exposed: float) -> tuple[Window, ...]:
    """F1 and F2, where the stage holds several micro-batches, B1 and B2, as measured.

    Args:
        waits: of one layer.
        in_flight: most micro-batches that the stage holds activations of.
        forward_exposed: share of the micro-batches whose backward has no other one's forward before it.
    """
    forward = forward_windows(waits.first_forward, waits.second_forward) if in_flight > 1 else ()
    return (
        *(replace(window, exposed=forward_exposed) for window in forward),
        *backward_windows(waits.mlp_backward, waits.attention_backward),
    )
