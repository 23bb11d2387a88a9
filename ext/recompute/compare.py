"""Simulated throughput of recompute policies for a model on a cluster: full, selective, on demand, HEU, OPT. No torch.

Every policy decides for each stage of a 1F1B pipeline within the stage's memory; the simulator times the step with the
recomputation that stays in the critical path. All figures are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ext.core.errors import ConfigError
from ext.cost.collectives import all_reduce
from ext.cost.hardware import Device, Link
from ext.cost.transformer import TransformerShape
from ext.pipeline.build import build_plan
from ext.pipeline.costs import Costs, StageCosts
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.simulate import simulate
from ext.recompute.analytic import tensor_parallel_windows, transformer_costs
from ext.recompute.heu import solve_heu
from ext.recompute.opt import solve_opt
from ext.recompute.problem import InfeasibleBudget, Solution, StageProblem, evaluate
from ext.recompute.table import KEEP, UnitTable
from ext.recompute.windows import ON_DEMAND, one_f_one_b_waits

STATE_BYTES = 18.0
"""Per parameter: 16-bit weight and gradient, fp32 gradient, master weight and two moments, but for the sharded rest."""
RESERVED = 0.1
"""Share of a device's memory left to the allocator, workspaces and communication."""
POLICIES = ("none", "full", "selective", "on_demand", "heu", "opt")
_CORE_ATTENTION = ("scores", "scale_mask", "softmax", "dropout")


@dataclass(frozen=True)
class Job:
    """One training job.

    Attributes:
        shape: of the model.
        device: of every rank.
        link: between tensor-parallel ranks.
        tensor_parallel: ranks that share a layer.
        stages: pipeline ranks.
        micro_batch: samples.
        num_microbatches: per step.
        flash: attention without stored scores.
        head: whether the last stage computes logits on top of its layers; without, all stages take equally long.
    """

    shape: TransformerShape
    device: Device
    link: Link
    tensor_parallel: int
    stages: int
    micro_batch: int
    num_microbatches: int
    flash: bool
    head: bool = True

    @property
    def layers_per_stage(self) -> int:
        if self.shape.num_layers % self.stages:
            raise ConfigError(f"{self.shape.num_layers} layers do not divide over {self.stages} stages.")
        return self.shape.num_layers // self.stages

    @property
    def reduce_time(self) -> float:
        """Seconds of one all-reduce of a layer's activations."""
        return all_reduce(self.shape.boundary_bytes(self.micro_batch), self.tensor_parallel, self.link)

    def problem(self, stage: int, *, overlap: bool = True) -> StageProblem:
        """The choice of tables on a stage.

        Raises:
            ConfigError: weights, gradients and optimizer alone fill the device.
        """
        kw = {"micro_batch": self.micro_batch, "device": self.device, "tensor_parallel": self.tensor_parallel}
        costs = transformer_costs(self.shape, link=self.link, flash=self.flash, **kw)
        windows = ()
        if overlap:
            windows = (
                *tensor_parallel_windows(self.shape, link=self.link, **kw),
                *one_f_one_b_waits(stage, self.stages, self.num_microbatches, costs.forward),
            )
        in_flight = min(self.stages - stage, self.num_microbatches)
        budget = int(self.device.memory_bytes * (1 - RESERVED) - self._fixed_bytes(stage))
        if budget <= 0:
            raise ConfigError(f"weights and optimizer states alone fill a device of stage {stage}. Use more ranks.")
        return StageProblem(costs, self.layers_per_stage, in_flight, budget, windows)

    def _fixed_bytes(self, stage: int) -> float:
        parameters = self.layers_per_stage * self.shape.layer_parameters
        if stage in (0, self.stages - 1):
            parameters += self.shape.embedding_parameters
        fixed = STATE_BYTES * parameters / self.tensor_parallel
        if stage == self.stages - 1:
            # Logits in 16 bit and their fp32 log-probabilities.
            tokens = self.micro_batch * self.shape.seq_length
            fixed += 6 * tokens * self.shape.vocab_size / self.tensor_parallel
        return fixed

    def step_time(self, exposed: Sequence[float]) -> float:
        """Simulated seconds of a step with these seconds of recomputation per micro-batch in each stage's backward."""
        schedule = SCHEDULES.get("1f1b")(shape=PipelineShape(self.stages, self.num_microbatches))
        recomputed = tuple(self.layers_per_stage if seconds > 0 else 0 for seconds in exposed)
        plan = build_plan(
            schedule, layers_per_stage=(self.layers_per_stage,) * self.stages, recomputed_layers=recomputed
        )
        return simulate(plan, Costs(tuple(map(self._stage_costs, range(self.stages), exposed)))).step_time

    def _stage_costs(self, stage: int, exposed: float) -> StageCosts:
        problem = self.problem(stage)
        layers, forward = self.layers_per_stage, problem.layer.forward
        # What of the backward's all-reduces the host's weight gradients do not hide.
        left = sum(w.capacity for w in problem.windows if w.name in ("B1", "B2"))
        head = 0.0
        if self.head and stage == self.stages - 1:
            head = self.device.compute_time(self.shape.head_flops(self.micro_batch) / self.tensor_parallel)
        return StageCosts(
            forward=layers * (forward + 2 * self.reduce_time) + head,
            input_grad=layers * (forward + left) + head,
            weight_grad=layers * forward + head,
            recompute=exposed,
        )


@dataclass(frozen=True)
class Outcome:
    """What one policy comes to.

    Attributes:
        policy: its name.
        step_time: simulated seconds; None where it does not fit.
        exposed: seconds per micro-batch of recomputation in the critical path, by stage.
        solutions: of the solvers, by stage.
    """

    policy: str
    step_time: float | None
    exposed: tuple[float, ...] = ()
    solutions: tuple[Solution, ...] = ()


def compare(job: Job, policies: Sequence[str] = POLICIES, opt_seconds: float = 2.0) -> dict[str, Outcome]:
    """The policies' outcomes, by name.

    Args:
        job: what is trained.
        policies: names out of `POLICIES`.
        opt_seconds: time limit of OPT per stage.
    """
    deciders: dict[str, Callable[[int], Solution | float]] = {
        "none": lambda stage: _fixed_table(job, stage, ()),
        "full": lambda stage: _full(job, stage),
        "selective": lambda stage: _fixed_table(job, stage, _CORE_ATTENTION),
        "on_demand": lambda stage: solve_heu(job.problem(stage, overlap=False)),
        "heu": lambda stage: solve_heu(job.problem(stage)),
        "opt": lambda stage: solve_opt(job.problem(stage), time_limit=opt_seconds),
    }
    return {policy: _outcome(job, policy, deciders[policy]) for policy in policies}


def _outcome(job: Job, policy: str, decide: Callable[[int], Solution | float]) -> Outcome:
    exposed, solutions = [], []
    for stage in range(job.stages):
        try:
            found = decide(stage)
        except ConfigError:
            return Outcome(policy, None)
        if isinstance(found, Solution):
            solutions.append(found)
            found = found.exposed
        exposed.append(found)
    return Outcome(policy, job.step_time(exposed), tuple(exposed), tuple(solutions))


def _full(job: Job, stage: int) -> float:
    """Every layer run again in the backward, its all-reduces included; its inputs are kept."""
    problem = job.problem(stage)
    needed = problem.input_bytes + problem.layer.activation_bytes
    if needed > problem.budget:
        raise InfeasibleBudget(problem.budget, needed)
    return problem.num_layers * (problem.layer.forward + 2 * job.reduce_time)


def _fixed_table(job: Job, stage: int, dropped: tuple[str, ...]) -> Solution:
    """The same units dropped in every layer and recomputed on demand."""
    problem = replace(job.problem(stage), windows=())
    decisions = {}
    for unit in problem.layer.units:
        unused = "unused" if not unit.needed and unit.name not in dropped else KEEP
        decisions[unit.name] = ON_DEMAND if unit.name in dropped else unused
    tables = (UnitTable.of(decisions),) * problem.num_layers
    exposed, size = evaluate(problem, tables)
    if size > problem.budget:
        raise InfeasibleBudget(problem.budget, size)
    return Solution(tables, exposed, size, "fixed")
