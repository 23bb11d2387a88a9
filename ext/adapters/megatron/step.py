"""One call of the forward-backward function: the actions of this rank, run with Megatron's own steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel import schedules as host
from megatron.core.utils import get_model_type
from torch import Tensor, nn

from ext.adapters.megatron.grad_sync import GradSync
from ext.adapters.megatron.layers import MegatronRngTracker, dropped, forwards_replaced, statistics_kept
from ext.adapters.megatron.units import as_host, bound
from ext.core.errors import DataError
from ext.pipeline.actions import Action, B, Kind
from ext.pipeline.plan import Plan
from ext.recompute.regions import MicrobatchRegions
from ext.recompute.stage_units import StageUnits
from ext.recompute.unit_engine import MicrobatchUnits
from ext.runtime.channels import Links, Receiver
from ext.runtime.messages import TensorSpec, as_tuple
from ext.runtime.split_backward import WeightGradQueue

if TYPE_CHECKING:
    from ext.adapters.megatron.watches import Watches


@dataclass(frozen=True)
class Call:
    """What Megatron passes to a forward-backward function, as far as steps need it; see its docstring."""

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: nn.Module
    config: Any
    num_microbatches: int
    context_parallel: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None


def host_forward(
    call: Call,
    function: Callable[..., Any],
    data: Any,
    inputs: Tensor | None,
    store: list[Any],
    microbatch: int,
    *,
    is_last: bool,
) -> tuple[Any, Tensor]:
    """Megatron's forward step of one micro-batch: the stage's outputs, on the last one the loss, and its tokens."""
    is_first_microbatch = host.check_first_val_step(call.first_val_step, call.forward_only, microbatch == 0)
    return host.forward_step(
        function,
        data,
        call.model,
        call.num_microbatches,
        inputs,
        store,
        call.config,
        call.context_parallel,
        call.collect_non_loss_data,
        is_first_microbatch=is_first_microbatch,
        current_microbatch=microbatch,
        is_last_stage=is_last,
    )


@dataclass
class InFlight:
    """What a micro-batch keeps between its actions."""

    inputs: Tensor | None = None
    outputs: Any = None
    output_spec: TensorSpec | None = None
    input_grad: Tensor | None = None
    regions: MicrobatchRegions | MicrobatchUnits | None = None


@dataclass
class Step:
    """Runs a plan's actions of one rank once.

    Attributes:
        store: what the loss function gave for each micro-batch, on the last stage.
        num_tokens: tokens that count in the loss, summed over the micro-batches.
        num_reruns: layers that were run again.
        num_forwards: forwards that have run.
    """

    call: Call
    plan: Plan
    rank: int
    links: Links
    layers: Sequence[nn.Module]
    grad_sync: GradSync
    watches: Watches
    units: StageUnits | None = None
    store: list[Any] = field(default_factory=list)
    num_reruns: int = 0
    num_forwards: int = 0

    def __post_init__(self) -> None:
        self.weight_grads = WeightGradQueue(self.plan.max_deferred(self.rank), self.watches.memory.note)
        device = next((p.device for p in self.call.model.parameters()), torch.device("cpu"))
        self.num_tokens = torch.zeros([], dtype=torch.int, device=device)
        self._flights = [InFlight() for _ in range(self.plan.num_microbatches)]
        self._first_spec: TensorSpec | None = None
        self._trackers = (MegatronRngTracker(),)
        backwards = [action for action in self.plan.orders[self.rank] if action.kind is B]
        self._last_backward = backwards[-1] if backwards else None

    def run(self) -> None:
        """Run all actions, then wait until all that was sent has left."""
        with contextlib.nullcontext() if self.call.forward_only else self.watches.memory.counting(self._held):
            self._run_actions()
        with self.watches.watchdog.action("what was sent but has not left"):
            self.links.drain()
        self.watches.recorder.actions_done(self.rank)

    def _run_actions(self) -> None:
        for action in self.plan.orders[self.rank]:
            if action == self._last_backward:
                self.grad_sync.before_last_backward()
            with self.watches.watchdog.action(str(action)), self._recorded(action):
                _HANDLERS[action.kind](self, action.stage, action.microbatch)

    def _held(self) -> Iterator[Tensor]:
        """What the step itself holds for the micro-batches in flight; the loss takes the last outputs at once."""
        is_last = self.rank == self.plan.num_stages - 1
        for flight in self._flights:
            if flight.inputs is not None:
                yield flight.inputs
            if not is_last and isinstance(flight.outputs, Tensor):
                yield flight.outputs

    def _recorded(self, action: Action) -> AbstractContextManager[None]:
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            return contextlib.nullcontext()  # posting a receive takes no time; the wait for it is recorded
        return self.watches.recorder.action(action.kind, action.stage, action.microbatch)

    def _received(self, channel: Receiver, kind: Kind, stage: int, microbatch: int) -> Any:
        what = f"micro-batch {microbatch} of {channel.name}"
        with self.watches.watchdog.waiting(what), self.watches.recorder.waiting(str(kind), stage, microbatch):
            return channel.wait(microbatch)

    @contextlib.contextmanager
    def _rerunning(self, stage: int, microbatch: int) -> Iterator[None]:
        """Around every re-run of layers."""
        watches = self.watches
        with statistics_kept(self.layers), watches.recorder.rerun(stage, microbatch), watches.memory.reruns():
            yield

    # -- compute -------------------------------------------------------------------------------------------

    def _forward(self, stage: int, microbatch: int) -> None:
        call, flight = self.call, self._flights[microbatch]
        if stage > 0:
            channel = self.links.inputs_from(self.plan.rank_of[stage - 1])
            inputs = self._received(channel, Kind.RECV_F, stage, microbatch)
            assert isinstance(inputs, Tensor)
            flight.inputs = inputs if call.forward_only else inputs.requires_grad_()
        with self._layers_as_planned(stage, microbatch, flight):
            function, is_last = self._forward_step_func(stage, microbatch), stage == self.plan.num_stages - 1
            flight.outputs, num_tokens = host_forward(
                call, function, call.data_iterator, flight.inputs, self.store, microbatch, is_last=is_last
            )
        self.watches.memory.sample()
        self.num_forwards += 1
        self.num_tokens += num_tokens
        if stage < self.plan.num_stages - 1:
            flight.output_spec = self._checked(flight.outputs, stage, microbatch)
        elif call.forward_only:
            flight.outputs = None
        if call.forward_only:
            flight.inputs = None

    def _recompute(self, stage: int, microbatch: int) -> None:
        regions = self._flights[microbatch].regions
        assert regions is not None
        regions.recompute()

    def _backward(self, stage: int, microbatch: int) -> None:
        call, flight = self.call, self._flights[microbatch]
        gradient = None
        if stage < self.plan.num_stages - 1:
            channel = self.links.output_grads_from(self.plan.rank_of[stage + 1])
            received = self._received(channel, Kind.RECV_B, stage, microbatch)
            gradient = as_tuple(received)[0]
        regions = flight.regions
        with contextlib.nullcontext() if regions is None else regions.backward():
            model_type = get_model_type(call.model)
            input_grad: Any = host.backward_step(flight.inputs, flight.outputs, gradient, model_type, call.config)
            flight.input_grad = input_grad
        if regions is not None:
            self.num_reruns += regions.num_reruns
        flight.regions = flight.outputs = None

    def _input_grad(self, stage: int, microbatch: int) -> None:
        with self.weight_grads.deferring(stage, microbatch):
            self._backward(stage, microbatch)

    def _weight_grad(self, stage: int, microbatch: int) -> None:
        self.weight_grads.release(stage, microbatch)

    def _forward_step_func(self, stage: int, microbatch: int) -> Callable[..., Any]:
        """The user's function, with weight gradients that can wait for W where the plan splits this backward."""
        function = self.call.forward_step_func
        if self.call.forward_only or (stage, microbatch) not in self.plan.split_backwards:
            return function

        def forward_step(*args: Any) -> Any:
            return self.weight_grads.intercepting(lambda given: function(*given))(args)

        return forward_step

    @contextlib.contextmanager
    def _layers_as_planned(self, stage: int, microbatch: int, flight: InFlight) -> Iterator[None]:
        """The first layers of the stage, as many as the plan recomputes, drop what they would keep."""
        if self.units is not None and not self.call.forward_only:
            with self._units_as_planned(self.units, stage, microbatch, flight):
                yield
            return
        count = self.plan.recomputed_layers[stage]
        if self.call.forward_only or not count:
            yield
            return
        regions = flight.regions = MicrobatchRegions(self._trackers, partial(self._rerunning, stage, microbatch))
        replace = dropped(regions)
        forwards = [layer.forward for layer in self.layers[:count]]
        if self.plan.split_backwards:  # the re-run makes the graph that the backward walks
            queue = self.weight_grads
            forwards = [_intercepted(queue, forward) for forward in forwards]
        with forwards_replaced(self.layers[:count], [replace(forward) for forward in forwards]):
            yield

    @contextlib.contextmanager
    def _units_as_planned(self, units: StageUnits, stage: int, microbatch: int, flight: InFlight) -> Iterator[None]:
        """The same where the tables of a unit policy say what is dropped."""
        is_split = (stage, microbatch) in self.plan.split_backwards
        coming = self.plan.next_backward(stage, microbatch)
        next_backward: Any = None if coming is None else self._flights[coming].regions
        layers = [bound(layer) for layer in self.layers]
        # Tables begin with what the forward step does before the layers, and may end with what it does behind them.
        num_behind = len(units.tables.tables) - 1 - len(layers)
        flight.regions, (_, *stand_ins) = units.start(
            [None, *layers, *[None] * num_behind],
            around=self.weight_grads.interception if is_split else contextlib.nullcontext,
            recomputing=partial(self._rerunning, stage, microbatch),
            next_backward=next_backward,
        )
        with forwards_replaced(self.layers, [as_host(*pair) for pair in zip(layers, stand_ins, strict=False)]):
            yield

    # -- communication -------------------------------------------------------------------------------------

    def _send_outputs(self, stage: int, microbatch: int) -> None:
        flight = self._flights[microbatch]
        self.links.outputs_to(self.plan.rank_of[stage + 1]).send(flight.outputs, microbatch)
        if self.call.forward_only:
            flight.outputs = None
        else:
            # The channel holds the memory until the send is done: what is freed here is the graph's hold on it.
            host.deallocate_output_tensor(flight.outputs, self.call.config.deallocate_pipeline_outputs)

    def _checked(self, outputs: Any, stage: int, microbatch: int) -> TensorSpec:
        """The shape of a stage's output, refused where the next stage does not expect it."""
        if not isinstance(outputs, Tensor):
            raise DataError(
                f"stage {stage} must give one tensor to the next one, found {type(outputs).__name__}. Let the "
                "forward step return the model's output tensor."
            )
        spec = TensorSpec(tuple(outputs.shape), outputs.dtype, requires_grad=False)
        self._first_spec = self._first_spec or spec
        if spec != self._first_spec and not self.call.config.variable_seq_lengths:
            raise DataError(
                f"micro-batch {microbatch}: stage output got {spec}, expected {self._first_spec} as in the first "
                "micro-batch of the step. Pad to one size, or set variable_seq_lengths in Megatron's config."
            )
        return spec

    def _post_inputs(self, stage: int, microbatch: int) -> None:
        self.links.inputs_from(self.plan.rank_of[stage - 1]).post(microbatch)

    def _send_input_grads(self, stage: int, microbatch: int) -> None:
        flight = self._flights[microbatch]
        assert flight.inputs is not None
        gradient = torch.zeros_like(flight.inputs) if flight.input_grad is None else flight.input_grad
        self.links.input_grads_to(self.plan.rank_of[stage - 1]).send_known([gradient])
        flight.inputs = flight.input_grad = None

    def _post_output_grads(self, stage: int, microbatch: int) -> None:
        spec = self._flights[microbatch].output_spec
        assert spec is not None
        self.links.output_grads_from(self.plan.rank_of[stage + 1]).post(microbatch, (spec,))


def _intercepted(queue: WeightGradQueue, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return queue.intercepting(lambda _: forward(*args, **kwargs))(None)

    return run


_HANDLERS: dict[Kind, Callable[[Step, int, int], None]] = {
    Kind.F: Step._forward,
    Kind.R: Step._recompute,
    Kind.B: Step._backward,
    Kind.I: Step._input_grad,
    Kind.W: Step._weight_grad,
    Kind.SEND_F: Step._send_outputs,
    Kind.RECV_F: Step._post_inputs,
    Kind.SEND_B: Step._send_input_grads,
    Kind.RECV_B: Step._post_output_grads,
}
