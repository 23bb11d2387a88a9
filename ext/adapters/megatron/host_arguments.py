"""``parse_args`` of Megatron-LM's training code with our flags; importable only where there is a checkout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.training.arguments import parse_args as _host_parse_args  # pyright: ignore[reportMissingImports]

from ext.adapters.megatron import check, host
from ext.adapters.megatron.states import moments_of


def parse_args(extra_args_provider: Callable[..., Any] | None = None, ignore_unknown_args: bool = False) -> Any:
    """Megatron's arguments; what our flags ask for is checked against them and put in force.

    Raises:
        ConfigError: before any process group exists, everything that cannot work.
    """
    request = host.given_request()
    args = _host_parse_args(host.with_our_flags(extra_args_provider), ignore_unknown_args)
    check.raise_if_any(check.problems(args, request, on_cpu=not torch.cuda.is_available()))
    host.activate(request, moments_of(args), lambda: args.curr_iteration)
    return args
