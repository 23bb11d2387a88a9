"""What to say of a stage that held too much: where, how much was predicted and measured, what would fit."""

from __future__ import annotations

import torch

from ext.pipeline.memory_table import StageMemory, amount


def most_seen(row: StageMemory) -> int:
    """The larger of what was counted and what the device's allocator saw."""
    return max(row.measured or 0, row.allocated or 0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def story(row: StageMemory, what: str, change: str) -> str:
    """One sentence of figures, and the change.

    Args:
        row: of the stage, measured as far as it is.
        what: the stage did.
        change: the nearest that fits.
    """
    measured = most_seen(row)
    limit = "" if row.budget is None else f", the budget is {amount(row.budget)}"
    held = f"{amount(measured)} were measured" if measured else "nothing was measured"
    return f"stage {row.stage} {what}: {amount(row.total)} were predicted, {held}{limit}. {change}"
