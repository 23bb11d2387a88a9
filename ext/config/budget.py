"""The memory budget of a run: given where it must be, and kept by what was decided. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ext.config.decide import BUDGET_KEY, leaves_recompute_open
from ext.config.model import ExtConfig
from ext.pipeline.memory_table import StageMemory, amount
from ext.recompute.stage_aware import BudgetError

REPORT_SWITCH = "EXT_MEMORY_REPORT"
"""Environment variable that asks for the memory of every stage in any run; rank 0's counts."""


def is_report_asked(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for the memory of every stage."""
    return environ.get(REPORT_SWITCH, "") not in ("", "0")


def missing_budget(config: ExtConfig, *, on_cpu: bool) -> str | None:
    """What to say where a policy needs a budget and neither config nor device gives one."""
    recompute = config.recompute
    if not on_cpu or recompute is None or recompute.memory_budget_gib is not None or not leaves_recompute_open(config):
        return None
    return (
        f"{BUDGET_KEY}: missing. On CPU the policy '{recompute.policy.type}' needs it, as the ranks share one "
        "memory. Give the GiB of one rank: one number, or a list with one per stage."
    )


def is_given(config: ExtConfig) -> bool:
    """Whether the user gave a budget: then it is kept under every policy."""
    return config.recompute is not None and config.recompute.memory_budget_gib is not None


def check_budgets(
    config: ExtConfig, rows: Sequence[StageMemory], policy: str, change: Callable[[StageMemory], str]
) -> None:
    """Refuse a plan that does not keep a given budget.

    Args:
        config: the user's.
        rows: predicted memory of every stage, with budgets.
        policy: name of the recompute policy in force, for people.
        change: the nearest change that fits, for a stage that does not.

    Raises:
        BudgetError: a stage needs more than its budget.
    """
    over = [row for row in rows if row.exceeds] if is_given(config) else []
    if over:
        raise BudgetError(
            *(
                f"{BUDGET_KEY}: stage {row.stage} needs {amount(row.total)} under the policy {policy}, the budget is "
                f"{amount(row.budget or 0)}."
                for row in over
            ),
            change(over[0]),
        )
