"""What is compared, under what times, and what the simulator says of it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ext.pipeline.costs import Costs, StageCosts
from ext.pipeline.plan import Plan
from ext.pipeline.simulate import simulate

OURS, STOCK, DUALPIPEV, TORCH, PLANNED = "ours", "stock", "dualpipev", "torch", "planned"


@dataclass(frozen=True)
class Setting:
    """The emulated machine.

    Attributes:
        num_ranks: pipeline ranks.
        num_microbatches: per step.
        forward, input_grad, weight_grad, recompute: seconds of one rank's share of the model for one micro-batch.
        layers_per_rank: sleeping layers in such a share.
        latency: seconds that a message travels.
        counts_activations: whether DeepSpeed's layers count what they hold, in shares of one rank's activations.
    """

    num_ranks: int
    num_microbatches: int
    forward: float
    input_grad: float
    weight_grad: float
    recompute: float
    layers_per_rank: int = 1
    latency: float = 0.0
    counts_activations: bool = False


@dataclass(frozen=True)
class Contestant:
    """Somebody who runs the same layers.

    Attributes:
        name: for people, and the key of results.
        kind: which code runs it.
        schedule: name within that code; of a planned one the path of its plan file.
        recompute: "none", "full", or "default": the schedule's own.
        trace: whether every step is traced to a file.
    """

    name: str
    kind: str
    schedule: str
    recompute: str = "default"
    trace: bool = False


def simulated_seconds(plan: Plan, contestant: Contestant, setting: Setting) -> float:
    """Step time of a plan under the setting's times."""
    share = plan.num_ranks / plan.num_stages
    stages = [
        StageCosts(
            forward=setting.forward * share,
            input_grad=setting.input_grad * share,
            weight_grad=setting.weight_grad * share,
            recompute=setting.recompute * share * recomputed / layers,
        )
        for recomputed, layers in zip(plan.recomputed_layers, plan.layers_per_stage, strict=True)
    ]
    if contestant.kind == TORCH and plan.split_backwards:
        # torch runs the whole backward of its first stage in W.
        first = stages[0]
        stages[0] = replace(first, input_grad=0.0, weight_grad=first.input_grad + first.weight_grad)
    return simulate(plan, Costs(tuple(stages), latency=setting.latency)).step_time
