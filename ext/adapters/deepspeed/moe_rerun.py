"""Keeping routing decisions under DeepSpeed's own activation checkpointing in a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.pipe import PipelineModule

from ext.core.replay import Memory


def remember_under_checkpointing(module: Any) -> None:
    """Let ``module``, if it is a PipelineModule, checkpoint layers whose re-run takes the first run's decisions.

    To be called once the engine is built, which compares ``activation_checkpoint_func`` with DeepSpeed's own.
    Our recompute policies do without that function and open the scopes themselves.
    """
    if not isinstance(module, PipelineModule):
        return
    host = module.activation_checkpoint_func

    def checkpoint(layers: Callable[..., Any], *inputs: Any) -> Any:
        memory = Memory()

        def run(*args: Any) -> Any:
            with memory.replaying() if in_backward() else memory.recording():
                return layers(*args)

        return host(run, *inputs)

    module.activation_checkpoint_func = checkpoint


def in_backward() -> bool:
    """Whether autograd is running: a forward that runs then is the host's recomputation."""
    return torch._C._current_graph_task_id() != -1
