"""What each rank does: join the link, measure the layer and the link, make tables, time all modes."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from emulated_network import DEVICE, enter
from emulated_network.shaped import set_rate
from ext.comm.tensor_parallel.group import TensorParallelGroup
from ext.comm.tensor_parallel.rng import RngStream
from ext.recompute.heu import solve_heu
from ext.recompute.problem import Solution, StageProblem
from ext.recompute.profile import profile_layer
from ext.recompute.table import KEEP, UNUSED, UnitTable
from ext.recompute.units import LayerCosts
from ext.recompute.windows import ON_DEMAND, Window, backward_windows, forward_windows
from ext.runtime.live_bytes import LiveBytes
from ext.testing.shared_unit_layer import SharedUnitLayer
from tensor_parallel_bench.modes import Full, Mode, Stage, SubPipelined, Units
from tensor_parallel_bench.setting import Outcome, Setting

IN_FLIGHT = 2
DROPOUT = 0.1


class _Silent(TensorParallelGroup):
    """Computes a rank's share without its collectives."""

    def start_all_reduce(self, tensor: Tensor, op: Any = None) -> None:
        return None


def measure(rank: int, world_size: int, setting: Setting) -> list[Outcome]:
    """On every rank: the outcome at every rate of the link."""
    if setting.namespaces:
        dist.barrier()  # all are connected before the first one leaves
        time.sleep(0.5)
        dist.destroy_process_group()
        enter(setting.namespaces[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
        dist.init_process_group("gloo", init_method=f"file://{setting.store}", rank=rank, world_size=world_size)
    group, stream = TensorParallelGroup(dist.group.WORLD, rank, world_size), RngStream(100 + rank)
    layers = [_layer(setting, group, stream, seed) for seed in range(setting.num_layers)]
    shape = (setting.micro_batch, setting.seq, setting.hidden)
    torch.manual_seed(7)
    inputs = [torch.randn(shape).requires_grad_() for _ in range(setting.num_microbatches)]
    stage = Stage(layers, inputs, stream, group)
    alone = _layer(setting, _Silent(None, rank, world_size), stream, 0)
    costs = profile_layer(alone, inputs[0])
    forward = _mean(costs.forward)
    found = []
    for ratio in setting.ratios or (None,):
        if ratio is not None:
            set_rate(setting.namespaces[rank], inputs[0].numel() * 32e-6 / (ratio * forward))
        found.append(_at_this_rate(setting, stage, alone, costs, forward))
    return found


def _layer(setting: Setting, group: TensorParallelGroup, stream: RngStream, seed: int) -> SharedUnitLayer:
    return SharedUnitLayer(setting.hidden, setting.heads, group, stream=stream, dropout=DROPOUT, seed=seed)


def _at_this_rate(setting: Setting, stage: Stage, alone: SharedUnitLayer, costs: LayerCosts, forward: float) -> Outcome:
    payload = torch.ones_like(stage.inputs[0])
    all_reduce = _fastest(lambda: stage.group.all_reduce(payload))
    windows = _windows(stage, alone, all_reduce, forward)
    problem, solution = _solve(setting, stage, costs, windows)
    overlapped = Units("overlapped", solution.tables)
    modes: list[Mode] = [Mode(), Full(), Units("on_demand", [_on_demand(t) for t in solution.tables]), overlapped]
    modes.append(SubPipelined())
    outcome = Outcome(all_reduce / forward, all_reduce, forward)
    _check_and_count(stage, modes, outcome)
    overlapped.report.__init__()
    for turn in range(setting.repeats):
        for mode in (*modes[turn % len(modes) :], *modes[: turn % len(modes)]):
            dist.barrier()
            start = time.perf_counter()
            stage.step(mode)
            dist.barrier()
            outcome.times.setdefault(mode.name, []).append(time.perf_counter() - start)
    outcome.windows = overlapped.report.rows(problem, solution)
    return outcome


def _windows(stage: Stage, alone: SharedUnitLayer, all_reduce: float, forward: float) -> tuple[Window, ...]:
    """F1, F2, B1 and B2 as measured; all ranks take the mean."""
    tokens = torch.randn(stage.inputs[0].shape[0] * stage.inputs[0].shape[1], alone.norm1.weight.numel())
    left = []
    for linear in (alone.fc1, alone.qkv):
        gradient = torch.randn(tokens.shape[0], linear.weight.shape[0])
        left.append(max(0.0, all_reduce - _mean(_fastest(lambda g=gradient: g.t().matmul(tokens)))))
    slowdown = max(1.0, _under_all_reduces(stage, alone) / forward)
    lacking = (IN_FLIGHT - 1) / len(stage.inputs)  # the last backwards come when all forwards are done
    forwards = [replace(window, exposed=lacking) for window in forward_windows(all_reduce, all_reduce, slowdown)]
    return (*forwards, *backward_windows(left[0], left[1], slowdown))


def _under_all_reduces(stage: Stage, alone: SharedUnitLayer) -> float:
    """Seconds of a layer's forward while all-reduces run."""
    payload, times = torch.ones_like(stage.inputs[0]), []
    with torch.no_grad():
        for _ in range(3):
            works = [stage.group.start_all_reduce(payload.clone()) for _ in range(3)]
            start = time.perf_counter()
            alone(stage.inputs[0])
            times.append(time.perf_counter() - start)
            for work in filter(None, works):
                work.wait()
    return _mean(statistics.median(times))


def _solve(
    setting: Setting, stage: Stage, costs: LayerCosts, windows: tuple[Window, ...]
) -> tuple[StageProblem, Solution]:
    """Tables with the least exposed time for the bytes; rank 0 decides."""
    kept = setting.keep_share * costs.activation_bytes * setting.num_layers * IN_FLIGHT
    budget = int(kept) + costs.activation_bytes  # of the layer that is being recomputed
    problem = StageProblem(costs, setting.num_layers, IN_FLIGHT, budget, windows)
    decided: list[Any] = [(problem, solve_heu(problem)) if stage.group.rank == 0 else None]
    dist.broadcast_object_list(decided, src=0)
    return decided[0]


def _on_demand(table: UnitTable) -> UnitTable:
    recomputed = {u: d if d in (KEEP, UNUSED) else ON_DEMAND for u, d in table.decisions}
    return UnitTable.of(recomputed)


def _check_and_count(stage: Stage, modes: Sequence[Mode], outcome: Outcome) -> None:
    """Every mode gives bit for bit the gradients of the first, but for the parts' own masks; bytes after a forward."""
    weights = [p for layer in stage.layers for p in layer.parameters()]
    expected: list[Tensor] = []
    for mode in modes:
        outcome.held[mode.name] = _held_after_forward(stage, mode, weights)
        mode.forget()
        for tensor in (*weights, *stage.inputs):
            tensor.grad = None
        stage.step(mode)
        gradients = [tensor.grad.clone() for tensor in weights if tensor.grad is not None]
        expected = expected or gradients
        alike = all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
        if not alike and not isinstance(mode, SubPipelined):
            raise SystemExit(f"{mode.name} gives other gradients than {modes[0].name}")


def _held_after_forward(stage: Stage, mode: Mode, weights: Sequence[Tensor]) -> int:
    gc.collect()
    counter = LiveBytes([*weights, *stage.inputs])
    with counter.created():
        output, _ = mode.forward(stage, stage.inputs[0])
        gc.collect()
        assert output.requires_grad
        return counter.now


def _fastest(run: Callable[[], Any], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return _mean(statistics.median(times[1:]))


def _mean(seconds: float) -> float:
    """Over the ranks, so that all decide alike."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()
