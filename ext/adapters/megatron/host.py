"""What takes the place of Megatron's own functions while the patches are applied."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel import schedules

from ext.adapters.megatron import arguments
from ext.adapters.megatron.arguments import Request
from ext.adapters.megatron.schedule import PlanForwardBackward

_host_get_forward_backward_func = schedules.get_forward_backward_func


class _Active:
    """The function that this process's training runs, once its flags are read; None for the host's own."""

    function: PlanForwardBackward | None = None


def activate(request: Request) -> None:
    """From here on `get_forward_backward_func` obeys the request."""
    config = request.config
    wanted = config is not None and config.needs_pipeline_model
    _Active.function = PlanForwardBackward(config, request.name) if config is not None and wanted else None


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> Callable[..., Any]:
    """The function that runs our plans where the flags ask for one, else Megatron's own."""
    return _Active.function or _host_get_forward_backward_func(pp_size, vp_size)


def with_our_flags(provider: Callable[..., Any] | None) -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
    """An ``extra_args_provider`` that adds our flags to those of ``provider``."""

    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return arguments.add_arguments(parser if provider is None else provider(parser))

    return add


def given_request() -> Request:
    """What this process's command line asks for."""
    return arguments.read(sys.argv[1:])
