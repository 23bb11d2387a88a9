"""A plan as a DeepSpeed pipeline schedule: one instruction class per kind of action."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe.schedule import (
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    ReduceGrads,
    ReduceTiedGrads,
)

from ext.pipeline.actions import Kind
from ext.pipeline.plan import Plan


class Forward(PipeInstruction):
    """Load or wait for the inputs, then run the stage."""


class Recompute(PipeInstruction):
    """Re-run what the forward dropped."""


class Backward(PipeInstruction):
    """Wait for the gradient of the outputs, then run the whole backward."""


class InputGradients(PipeInstruction):
    """Wait for the gradient of the outputs, then run the backward without its weight gradients."""


class WeightGradients(PipeInstruction):
    """Compute and accumulate the weight gradients that the micro-batch's `InputGradients` left."""


class SendActivations(PipeInstruction):
    """Start sending the outputs to the next stage."""


class PostActivations(PipeInstruction):
    """Post the receive of the inputs from the previous stage."""


class SendGradients(PipeInstruction):
    """Start sending the gradient of the inputs to the previous stage."""


class PostGradients(PipeInstruction):
    """Post the receive of the gradient of the outputs from the next stage."""


class FinishStep(PipeInstruction):
    """Wait for all sends and agree with the other ranks that the step worked."""


INSTRUCTIONS: dict[Kind, type[PipeInstruction]] = {
    Kind.F: Forward,
    Kind.R: Recompute,
    Kind.B: Backward,
    Kind.I: InputGradients,
    Kind.W: WeightGradients,
    Kind.SEND_F: SendActivations,
    Kind.RECV_F: PostActivations,
    Kind.SEND_B: SendGradients,
    Kind.RECV_B: PostGradients,
}


class PlanSchedule(PipeSchedule):
    """The actions of one rank, then, in training, DeepSpeed's own reductions and optimizer step."""

    def __init__(self, plan: Plan, rank: int, *, training: bool) -> None:
        super().__init__(micro_batches=plan.num_microbatches, stages=plan.num_stages, stage_id=rank)
        self._order = plan.orders[rank]
        self._training = training

    def num_pipe_buffers(self) -> int:
        """A slot per micro-batch; slots hold memory only while their micro-batch is in flight."""
        return self.micro_batches

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for action in self._order:
            yield [INSTRUCTIONS[action.kind](stage=action.stage, microbatch=action.microbatch)]
        yield [FinishStep()]
        if self._training:
            yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
