"""Timelines as pictures, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ext.core.errors import ConfigError
from ext.pipeline.chrome import TraceFile
from ext.pipeline.trace import IDLE, LOAD, OPTIMIZER, Span, StepTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people with any colour vision tell apart.
STYLES: dict[str, tuple[str, str]] = {
    "F": ("#56B4E9", "forward"),
    "B": ("#009E73", "backward"),
    "I": ("#009E73", "input gradient"),
    "W": ("#F0E442", "weight gradient"),
    "R": ("#E69F00", "recompute"),
    "RECV_F": ("#CC79A7", "communication"),
    "RECV_B": ("#CC79A7", "communication"),
    "SEND_F": ("#CC79A7", "communication"),
    "SEND_B": ("#CC79A7", "communication"),
    LOAD: ("#D55E00", "data"),
    OPTIMIZER: ("#BBBBBB", "reductions, optimizer"),
    IDLE: ("#F4F4F4", "idle"),
}
"""Colour and legend of each name."""

_INCHES_PER_ROW = 0.42
_WIDTH = 14.0
_POINTS_PER_DIGIT = 6.0
_MS = 1e3
_SUFFIXES = (".png", ".svg", ".pdf")


def draw_files(files: Sequence[TraceFile], output: Path, step: int | None = None) -> None:
    """Draw one step of each file, one panel above the other, on one scale of time.

    Args:
        files: at least one.
        output: what to write.
        step: its number; the last step of each file where None.

    Raises:
        ConfigError: matplotlib is missing, a file has no such step, or the picture cannot be written.
    """
    if output.suffix not in _SUFFIXES:
        raise ConfigError(f"--output: found '{output}'; end the name in {', '.join(_SUFFIXES)}.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "drawing needs matplotlib, which is not installed. Run: pip install 'megatron-deepspeed-ext[plot]'"
        ) from error
    steps = [_chosen(trace_file, step) for trace_file in files]
    heights = [len(trace.rows) for trace in steps]
    figure = Figure(figsize=(_WIDTH, sum(heights) * _INCHES_PER_ROW + 0.9 * len(steps) + 0.6), layout="constrained")
    panels = figure.subplots(len(steps), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    length = max(max(span.end for row in trace.rows for span in row) - trace.start for trace in steps)
    for trace_file, trace, axes in zip(files, steps, panels, strict=True):
        _panel(axes, trace_file, trace, length)
    panels[-1].set_xlabel("ms")
    figure.legend(handles=_legend(steps), loc="outside lower center", ncols=9, frameon=False, fontsize=9)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=110)
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written: {error.strerror}. Name another file.") from error


def _chosen(trace_file: TraceFile, step: int | None) -> StepTrace:
    if step is None:
        return trace_file.steps[-1]
    for trace in trace_file.steps:
        if trace.step == step:
            return trace
    known = ", ".join(str(trace.step) for trace in trace_file.steps)
    raise ConfigError(f"--step: found {step}; the {trace_file.source} file has {known}.")


def _panel(axes: Axes, trace_file: TraceFile, trace: StepTrace, length: float) -> None:
    for rank, row in enumerate(trace.rows):
        _bars(axes, row, rank, trace.start)
        _microbatches(axes, row, rank, trace.start, length)
    plan = trace_file.plan
    axes.set_title(
        f"{plan.schedule}, {trace_file.source}: {trace.pipeline_time * 1e3:.4g} ms, bubble {trace.bubble:.1%}",
        loc="left",
        fontsize=10,
    )
    names = ["stage " + ", ".join(map(str, plan.stages_of(rank))) for rank in range(plan.num_ranks)]
    labels = [f"{name}\n{bubble:.1%} bubble" for name, bubble in zip(names, trace.bubbles, strict=True)]
    axes.set_yticks(range(plan.num_ranks), labels, fontsize=7)
    axes.set_ylim(plan.num_ranks - 0.5, -0.5)
    axes.set_xlim(-0.005 * length * _MS, length * 1.005 * _MS)
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _bars(axes: Axes, row: Sequence[Span], rank: int, origin: float) -> None:
    """One collection for all bars of a name, which stays fast with many of them; later names lie on top."""
    for layer, (name, (color, _)) in enumerate(reversed(STYLES.items()), 1):
        bars = [((span.start - origin) * _MS, span.duration * _MS) for span in row if span.name == name]
        is_narrow = name in (IDLE, OPTIMIZER, LOAD)
        height = 0.5 if is_narrow else 0.84
        axes.broken_barh(
            bars,
            (rank - height / 2, height),
            facecolors=color,
            edgecolors="white",
            linewidth=0.0 if is_narrow else 0.4,
            zorder=layer + len(STYLES) * (name == "R"),
        )


def _microbatches(axes: Axes, row: Sequence[Span], rank: int, origin: float, length: float) -> None:
    """The micro-batch of every bar of compute that is wide enough; of a backward, in what follows its recompute."""
    recomputed = {(span.stage, span.microbatch): span.end for span in row if span.inline}
    for span in row:
        if not (span.is_compute or span.inline):
            continue
        start = span.start
        if span.name in "BI":
            start = max(start, recomputed.get((span.stage, span.microbatch), start))
        points = (span.end - start) / length * (_WIDTH - 1.5) * 72
        if points > _POINTS_PER_DIGIT * len(str(span.microbatch)):
            middle = ((start + span.end) / 2 - origin) * _MS
            axes.text(middle, rank, str(span.microbatch), ha="center", va="center", fontsize=7, zorder=4 * len(STYLES))


def _legend(steps: Sequence[StepTrace]) -> list[Any]:
    from matplotlib.patches import Patch

    present = {span.name for trace in steps for row in trace.rows for span in row}
    labels = {label: color for name, (color, label) in STYLES.items() if name in present}
    return [Patch(color=color, label=label) for label, color in labels.items()]
