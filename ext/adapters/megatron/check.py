"""Our flags against Megatron's parsed arguments, before launch: everything that cannot work, both flags named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ext.adapters.megatron import limits, resolve
from ext.adapters.megatron.arguments import Request
from ext.config import ExtConfig
from ext.config.budget import missing_budget
from ext.config.decide import BUDGET_KEY, reads_plan_file
from ext.core.errors import ConfigError
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES


def problems(args: Any, request: Request, *, on_cpu: bool = False) -> list[str]:
    """Every problem, empty where there is none.

    Args:
        args: Megatron's, as parsed and not yet validated: what the user typed, with defaults elsewhere.
        request: ours.
        on_cpu: whether ranks share the memory of a host.
    """
    config = request.config
    if config is None:
        return []
    experts = list(_impossible_experts(args))
    if config.moe is not None:
        experts += [*_without_experts(args, request), *_wrong_topology(args, config, request.name)]
    if not resolve.runs_plans(config):
        return experts
    schedule = SCHEDULES.get(resolve.schedule_type(config))
    recomputes = limits.recomputing_key(config.recompute is not None, schedule.recomputes_by_default)
    try:
        splits = resolve.splits_backward(config, _shape(args) if reads_plan_file(config) else None)
    except ConfigError as error:  # of a plan file
        return [f"{request.name(limits.SCHEDULE)}: {problem}" for problem in error.problems] + experts
    found = limits.problems(args, request.name, splits=splits, recomputes=recomputes)
    if splits and getattr(args, "transformer_impl", "local") != "local":
        found += limits.layers_that_cannot_split(["its layers"], request.name)
    found += _too_few_microbatches(args, config, schedule.min_microbatches, request.name)
    found += _wrong_lists(args, config, request.name)
    found += wrong_budgets(config, args.pipeline_model_parallel_size, request.name)
    missing = missing_budget(config, on_cpu=on_cpu)
    if missing is not None:
        found.append(missing.replace(BUDGET_KEY, request.name(BUDGET_KEY.removeprefix("ext."))))
    return found + experts


def _without_experts(args: Any, request: Request) -> Iterator[str]:
    name = request.name("moe.dispatcher")
    if getattr(args, "num_experts", None) is None:
        yield f"{name}: needs a model with experts. Give --num-experts, or remove it."
    elif args.moe_token_dispatcher_type != "alltoall":
        yield (
            f"{name}: needs --moe-token-dispatcher-type alltoall, found {args.moe_token_dispatcher_type}. Change it, "
            f"or remove {name}."
        )


def _impossible_experts(args: Any) -> Iterator[str]:
    """What Megatron refuses itself, but later and without the numbers."""
    experts = getattr(args, "num_experts", None)
    if not experts:
        return
    ranks, top_k = getattr(args, "expert_model_parallel_size", None) or 1, getattr(args, "moe_router_topk", None)
    if experts % ranks:
        even = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        yield (
            f"--expert-model-parallel-size {ranks}: so many ranks cannot share --num-experts {experts} evenly. Use "
            f"{even}, or another number of experts."
        )
    if top_k and top_k > experts:
        yield f"--moe-router-topk {top_k}: allowed are 1 to {experts}, the --num-experts. Lower it."
    shared = getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size or 1
    stages = args.pipeline_model_parallel_size or 1
    if args.world_size % (ranks * shared * stages):
        yield (
            f"--expert-model-parallel-size {ranks}: {ranks} x {shared} tensor-parallel ranks of an expert x {stages} "
            f"pipeline stages do not divide the {args.world_size} ranks. Lower one of them, or start other ranks."
        )


def _wrong_topology(args: Any, config: ExtConfig, name: Callable[[str], str]) -> Iterator[str]:
    assert config.moe is not None
    given = config.moe.topology.ranks_per_node
    if given is not None and args.world_size % given:
        yield (
            f"{name('moe.topology.ranks_per_node')}: {given} does not divide the world size {args.world_size}. Give "
            "the number of ranks on each node, or remove it to use the ranks' hosts."
        )


def _shape(args: Any) -> PipelineShape | None:
    """Ranks and micro-batches of a step; None where Megatron's arguments make no sense or let the number grow."""
    micro, replicas, stages = args.micro_batch_size, _data_parallel(args), args.pipeline_model_parallel_size
    if not (micro and replicas and stages) or getattr(args, "rampup_batch_size", None):
        return None
    given = (args.global_batch_size or micro * replicas) // (micro * replicas)
    return PipelineShape(stages, given) if given else None


def _too_few_microbatches(args: Any, config: ExtConfig, needed: int, name: Callable[[str], str]) -> Iterator[str]:
    micro, total, replicas = args.micro_batch_size, args.global_batch_size, _data_parallel(args)
    if not micro or not replicas:
        return  # Megatron complains by itself
    flag = "--global-batch-size"
    if getattr(args, "rampup_batch_size", None):
        total, flag = int(args.rampup_batch_size[0]), "--rampup-batch-size"
    if total is None:
        total = micro * replicas
    given = total // (micro * replicas)
    if 0 < given < needed:
        yield (
            f"{name(limits.SCHEDULE)}: schedule '{resolve.schedule_type(config)}' needs at least {needed} "
            f"micro-batches per step; {flag} {total} with --micro-batch-size {micro} on {replicas} data-parallel "
            f"ranks gives {given}. "
            f"Raise {flag} to {needed * micro * replicas} or more, or use the schedule '1f1b'."
        )


def _wrong_lists(args: Any, config: ExtConfig, name: Callable[[str], str]) -> Iterator[str]:
    layers = None if config.recompute is None else getattr(config.recompute.policy, "layers", None)
    stages = args.pipeline_model_parallel_size
    if layers is None:
        return
    if len(layers) != stages:
        yield (
            f"{name(limits.RECOMPUTE)}: {len(layers)} numbers given, --pipeline-model-parallel-size is {stages}. "
            "Give one number per stage."
        )
    elif args.num_layers and sum(layers) > args.num_layers:
        yield (
            f"{name(limits.RECOMPUTE)}: {sum(layers)} recomputed layers asked, --num-layers is {args.num_layers}. "
            "Lower them."
        )


def wrong_budgets(config: ExtConfig, num_stages: int, name: Callable[[str], str]) -> Iterator[str]:
    """Budgets that are not as many as the pipeline has stages."""
    given = None if config.recompute is None else config.recompute.memory_budget_gib
    if isinstance(given, tuple) and len(given) != num_stages:
        yield (
            f"{name(BUDGET_KEY.removeprefix('ext.'))}: {len(given)} numbers given, the pipeline has {num_stages} "
            "stages. Give one number, or one per stage."
        )


def _data_parallel(args: Any) -> int | None:
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    each = 1
    for size in sizes:
        each *= size or 1
    replicas, rest = divmod(args.world_size, each)
    return None if rest else replicas


def raise_if_any(found: list[str]) -> None:
    """Raise everything that was found, in one error.

    Raises:
        ConfigError: there is a problem.
    """
    if found:
        raise ConfigError(*found)
