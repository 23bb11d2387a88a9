"""What takes the place of Megatron's own functions while the patches are applied."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

import patches
from ext.adapters.megatron import arguments
from ext.adapters.megatron.arguments import Request
from ext.adapters.megatron.moe import Connection, connect
from ext.adapters.megatron.resolve import runs_plans
from ext.adapters.megatron.schedule import PlanForwardBackward
from ext.adapters.megatron.states import ADAM_MOMENTS
from ext.config import ExtConfig

_host_get_forward_backward_func = schedules.get_forward_backward_func


class _Active:
    """What this process's training runs, once its flags are read; None for the host's own."""

    function: PlanForwardBackward | None = None
    config: ExtConfig | None = None
    is_connected = False
    connections: tuple[Connection, ...] = ()
    told = ""


def activate(request: Request, moments: int = ADAM_MOMENTS, iteration: Callable[[], int] | None = None) -> None:
    """From here on `get_forward_backward_func` obeys the request; the rest as in `PlanForwardBackward`."""
    config = _Active.config = request.config
    _Active.is_connected, _Active.told = False, ""
    _Active.function = None
    if config is not None and runs_plans(config):
        _Active.function = PlanForwardBackward(config, request.name, moments, iteration)
    if config is not None and config.moe is not None:
        patches.apply("megatron_token_dispatcher")


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> Callable[..., Any]:
    """The function that runs our plans where the flags ask for one, else Megatron's own."""
    function = _Active.function or _host_get_forward_backward_func(pp_size, vp_size)
    if _Active.config is None or _Active.config.moe is None:
        return function
    return partial(_connect_and_run, function, _Active.config)


def _connect_and_run(function: Callable[..., Any], config: ExtConfig, **call: Any) -> Any:
    """The function, once the model's dispatchers are connected: that is collective over the world."""
    if not _Active.is_connected:
        _Active.is_connected = True
        chunks = call["model"] if isinstance(call["model"], list) else [call["model"]]
        _Active.connections = tuple(connect(chunk, config) for chunk in chunks)
    outcome = function(**call)
    _tell_dispatcher(_Active.connections[0].describe())
    return outcome


def _tell_dispatcher(text: str) -> None:
    """What takes tokens to their experts, once, and what a measurement chose, each time that it chooses anew."""
    if text != _Active.told and dist.get_rank() == 0:
        print(f"megatron-deepspeed-ext: MoE dispatcher {text}", file=sys.stderr, flush=True)  # noqa: T201
    _Active.told = text


def with_our_flags(provider: Callable[..., Any] | None) -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
    """An ``extra_args_provider`` that adds our flags to those of ``provider``."""

    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return arguments.add_arguments(parser if provider is None else provider(parser))

    return add


def given_request() -> Request:
    """What this process's command line asks for."""
    return arguments.read(sys.argv[1:])
