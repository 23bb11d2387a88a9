"""Pipeline schedules, recomputation and MoE dispatch for DeepSpeed and Megatron-core."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "describe", "initialize", "memory_report", "pipeline_module", "recompute_report"]


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """A drop-in for ``deepspeed.initialize``: same arguments, same results.

    Where ds_config has an ``"ext"`` block, the engine it returns obeys it; without one this is stock DeepSpeed.
    Collective over all ranks, like the original.

    One argument more: ``sample_batch``, what the data iterator would give for one micro-batch. Policies that measure
    the layers then decide here; without it they do so at the first ``train_batch``, from its first micro-batch,
    which is not consumed.

    Returns:
        engine, optimizer, data loader, learning-rate scheduler.

    Raises:
        ConfigError: on every rank alike and before any collective of ours: all that cannot work.
    """
    from ext.adapters.deepspeed.initialize import initialize

    return initialize(*args, **kwargs)


def pipeline_module(layers: Any, *, config: Any, sample_batch: Any = None, **kwargs: Any) -> Any:
    """A ``deepspeed.pipe.PipelineModule`` whose layers are placed by ``ext.pipeline.partition``.

    Collective over all ranks, like PipelineModule, after ``deepspeed.init_distributed``.

    Args:
        layers: as for PipelineModule.
        config: the ds_config: a dictionary, a path, or base64 text.
        sample_batch: inputs and labels of one micro-batch; ``recompute_aware`` and ``auto`` measure the layers with
            it.
        kwargs: as for PipelineModule: ``num_stages`` or ``topology``, ``loss_fn``, ...

    Raises:
        ConfigError: on every rank alike: the layers cannot be placed so, or were not built as their specs say.
        InfeasibleError: on every rank alike: no layout fits the memory budget.
    """
    from ext.adapters.deepspeed.placement import pipeline_module

    return pipeline_module(layers, config=config, sample_batch=sample_batch, **kwargs)


def memory_report(engine: Any) -> list[Any]:
    """The memory of every stage, predicted, and measured once the first training step is done.

    Empty unless the config has a policy or budget that needs it, or EXT_MEMORY_REPORT=1 is set. Local.

    Returns:
        One `ext.pipeline.memory_table.StageMemory` per stage; ``ext.pipeline.memory_table.table`` writes them out.
    """
    from ext.adapters.deepspeed.initialize import memory_report

    return memory_report(engine)


def recompute_report(engine: Any) -> list[Any]:
    """What the policies `lynx_heu` and `lynx_opt` recomputed in the last training step, planned beside measured.

    Empty under other policies. Collective over the pipeline of this rank.

    Returns:
        One `ext.recompute.stage_report.StageRecompute` per stage; ``ext.recompute.stage_report.table`` writes them out.
    """
    from ext.adapters.deepspeed.initialize import recompute_report

    return recompute_report(engine)


def describe(engine: Any) -> dict[str, Any]:
    """What is active in an engine that `initialize` returned.

    Returns:
        ``active``, ``schedule``, ``policy``, ``partition`` (type and layers per stage), ``dispatcher``,
        ``plan_hash``, ``orders`` (rank as string -> actions as text, without communication) and ``recomputes``
        (stage as string -> layers, or units of layers, that this rank re-ran in its last training step). Local: any
        rank may call it.
    """
    from ext.adapters.deepspeed.initialize import describe

    return describe(engine)
