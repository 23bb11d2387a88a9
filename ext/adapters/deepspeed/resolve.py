"""From the user's config and module to the plan that the engine runs; the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ext.adapters.deepspeed.layers import LayerInventory
from ext.config import ExtConfig, resolved
from ext.config.decide import Decision, decide
from ext.pipeline.stage_model import PipelineProfile
from ext.recompute.pipeline_tables import UnitCostsOfStages


@dataclass(frozen=True)
class Resolution(Decision):
    """What the config means for this module.

    Attributes:
        replaces_host_checkpointing: whether DeepSpeed's activation_checkpoint_interval is out of force.
    """

    replaces_host_checkpointing: bool = False


def resolve(
    config: ExtConfig,
    inventory: LayerInventory,
    num_microbatches: int,
    profile: PipelineProfile | None = None,
    budgets: Sequence[int] | None = None,
    units: UnitCostsOfStages | None = None,
) -> Resolution:
    """Build the plan for a module's layers; see `decide`."""
    decision = decide(
        config,
        inventory.layers_per_stage,
        inventory.recomputable_per_stage,
        num_microbatches,
        profile,
        budgets,
        units=units,
    )
    plan, schedule = decision.plan, decision.schedule
    replaces = config.recompute is not None or schedule.recomputes_by_default or any(plan.recomputed_layers)
    return Resolution(**vars(decision), replaces_host_checkpointing=replaces)


def summary(config: ExtConfig, resolution: Resolution | None) -> str:
    """The one line that rank 0 prints at start; without a pipeline there is no resolution."""
    import deepspeed

    dispatcher = "" if config.moe is None else f"MoE dispatcher {config.moe.dispatcher.type}"
    return resolved.summary(f"deepspeed {deepspeed.__version__}", resolution, dispatcher)


def write_resolved(config: ExtConfig, resolution: Resolution | None) -> Path:
    """Write what is active beside the run; see `ext.config.resolved`."""
    import deepspeed
    import torch

    versions = {"deepspeed": deepspeed.__version__, "torch": torch.__version__}
    return resolved.write_resolved(config, resolution, versions)
