"""Everything about a ds_config that can be known before launch, all of it at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ext.config.batch import Batch, batch_problems, read_batch
from ext.config.model import ExtConfig, read_block, stray_keys
from ext.config.problems import Problem, shown
from ext.config.source import UnreadableConfig, read_ds_config
from ext.config.sub_pipeline import sub_pipeline_problems
from ext.core.errors import ConfigError, ExtError
from ext.pipeline.plan import PipelineShape
from ext.pipeline.plan_file import read_content, read_plan
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.schedules.plan_file import PlanFile
from ext.recompute.lynx import UnitPolicy
from ext.recompute.policy import POLICIES
from ext.recompute.tables_file import read_tables


@dataclass(frozen=True)
class Launch:
    """Numbers of a launch; None where not given, and then what depends on them is skipped."""

    world_size: int | None = None
    pipeline_stages: int | None = None
    tensor_parallel: int | None = 1
    num_layers: int | None = None

    @property
    def data_parallel(self) -> int | None:
        """Replicas of the model, None where unknown or not whole."""
        if self.world_size is None or self.pipeline_stages is None or self.tensor_parallel is None:
            return None
        replicas, rest = divmod(self.world_size, self.pipeline_stages * self.tensor_parallel)
        return replicas if rest == 0 else None


def check_config(
    ds_config: str | Path | dict[str, Any],
    *,
    world_size: int | None = None,
    pipeline_stages: int | None = None,
    tensor_parallel: int = 1,
    num_layers: int | None = None,
) -> list[Problem]:
    """All violations of a ds_config, in no process group; empty where there is none.

    Args:
        ds_config: what DeepSpeed takes: a dictionary, a path, or base64 text.
        world_size: ranks in all.
        pipeline_stages: pipeline ranks.
        tensor_parallel: ranks that share each layer.
        num_layers: layers of the module, as many as its list holds.
    """
    try:
        config = read_ds_config(ds_config)
    except UnreadableConfig as error:
        return [error.problem]
    launch, problems = _read_launch(world_size, pipeline_stages, tensor_parallel, num_layers)
    problems += stray_keys(config)
    ext_config, of_block = read_block(config.get("ext"))
    if of_block:
        ext_config = _right_part(config.get("ext"), of_block)
    problems += of_block
    batch, of_batch = read_batch(config)
    problems += of_batch
    problems += _layout(launch)
    problems += batch_problems(batch, *_data_parallel(config, launch))
    problems += _precision(config)
    if launch.pipeline_stages not in (None, 1) or _asks_for_pipeline(config.get("ext")):
        problems += _zero(config)
    if ext_config is not None:
        problems += _loss_scaling(config, ext_config)
        problems += _microbatches(ext_config, batch.completed(launch.data_parallel), launch)
        problems += _lists(ext_config, launch)
        problems += unit_policy_problems(ext_config)
        problems += _unit_tables(ext_config)
        problems += sub_pipeline_problems(ext_config, batch.completed(launch.data_parallel).micro)
    return problems


def microbatches_per_step(ds_config: dict[str, Any], launch: Launch) -> int | None:
    """Gradient accumulation steps as DeepSpeed would compute them, None where a number is missing."""
    return read_batch(ds_config)[0].completed(_data_parallel(ds_config, launch)[0]).gas


def _read_launch(*numbers: int | None) -> tuple[Launch, list[Problem]]:
    problems: list[Problem] = []
    good: dict[str, int | None] = {}
    for field, number in zip(fields(Launch), numbers, strict=True):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            problems.append(Problem(field.name, f"found {shown(number)}; allowed: a whole number above 0."))
            number = None
        good[field.name] = number
    return Launch(**good), problems


def _layout(launch: Launch) -> Iterator[Problem]:
    world, stages, tensor, layers = (getattr(launch, field.name) for field in fields(Launch))
    if world and stages and tensor and world % (stages * tensor):
        each = stages * tensor
        nearest = " or ".join(str(n * each) for n in (world // each, world // each + 1) if n)
        yield Problem(
            "world_size",
            f"{world} ranks cannot be cut into replicas of {stages} pipeline stages x {tensor} tensor-parallel "
            f"ranks = {each}. Use {nearest} ranks.",
        )
    if stages and layers and layers < stages:
        yield Problem(
            "num_layers",
            f"{layers} layers cannot fill {stages} pipeline stages of at least one. Use {layers} stages or fewer.",
        )


def _data_parallel(config: dict[str, Any], launch: Launch) -> tuple[int | None, str]:
    """Data-parallel size, None where unknown, and the text that explains it."""
    data_parallel = launch.data_parallel
    if data_parallel is None or config.get("sequence_parallel_size", 1) != 1:
        return None, ""
    return data_parallel, (
        f"; {launch.world_size} ranks / ({launch.pipeline_stages} stages x {launch.tensor_parallel} tensor parallel)"
        f" = {data_parallel}"
    )


def _precision(config: dict[str, Any]) -> Iterator[Problem]:
    on = [
        key
        for key in ("fp16", "bf16", "bfloat16")
        if isinstance(config.get(key), dict) and config[key].get("enabled") is True
    ]
    if "fp16" in on and len(on) > 1:
        yield Problem("fp16.enabled", f"both fp16 and {on[1]} are enabled. Disable one.")


def _loss_scaling(config: dict[str, Any], ext_config: ExtConfig) -> Iterator[Problem]:
    fp16 = config.get("fp16")
    if ext_config.needs_pipeline_model and isinstance(fp16, dict) and fp16.get("enabled") is True:
        yield Problem(
            "fp16.enabled",
            "loss scaling under this package's schedules is not built in this release. Enable bf16 in its place, or "
            "remove ext.pipeline and ext.recompute.",
        )


def _right_part(block: Any, problems: list[Problem]) -> ExtConfig | None:
    """The block without the keys that have problems, so that the rest is still checked; None without a rest."""
    if not isinstance(block, dict):
        return None
    rest = {key: dict(value) if isinstance(value, dict) else value for key, value in block.items()}
    config = None
    while problems:
        removed = [_remove(rest, problem.key) for problem in problems]
        if not any(removed):
            return None
        config, problems = read_block(rest)
    return config


def _remove(block: dict[Any, Any], dotted: str) -> bool:
    """Take a key out of the block, or the part it should be in; whether there was anything to take."""
    _, key, *inner = [*dotted.split("."), ""]
    within = block.get(key)
    if isinstance(within, dict) and inner[0] in within:
        del within[inner[0]]
        return True
    return block.pop(key, None) is not None


def _asks_for_pipeline(block: Any) -> bool:
    """Whether the block, right or wrong, is on and can only work on a pipeline module."""
    return (
        isinstance(block, dict)
        and block.get("enabled") is not False
        and bool({"pipeline", "recompute", "tensor_parallel", "trace"} & set(block))
    )


def _zero(config: dict[str, Any]) -> Iterator[Problem]:
    zero = config.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if stage in (2, 3):
        yield Problem(
            "zero_optimization.stage",
            f"ZeRO {stage} cannot work with a pipeline: it would shard gradients that every micro-batch adds to. "
            "Allowed: 0 or 1. Use ZeRO 1 with more pipeline stages or recomputation, or ZeRO 3 without a pipeline.",
        )


def _microbatches(config: ExtConfig, batch: Batch, launch: Launch) -> Iterator[Problem]:
    if config.pipeline is None or batch.gas is None or batch.gas < 1:
        return
    options = config.pipeline.schedule
    schedule = SCHEDULES.get(options.type)
    stages = launch.pipeline_stages
    if stages is None and batch.gas >= schedule.min_microbatches:
        return
    try:
        schedule(options, shape=PipelineShape(stages or 2, batch.gas))
    except (ExtError, ValueError) as error:
        yield Problem("ext.pipeline.schedule", str(error))


def _unit_tables(config: ExtConfig) -> Iterator[Problem]:
    """What is wrong with the unit tables of a plan's file that is right otherwise."""
    options = None if config.pipeline is None else config.pipeline.schedule
    if not isinstance(options, PlanFile.Config):
        return
    try:
        plan = read_plan(options.path)
    except ConfigError:
        return  # the schedule tells of it
    if not plan.unit_tables:
        return
    try:
        schedule = PlanFile(options, shape=PipelineShape(plan.num_ranks, plan.num_microbatches))
        read_tables(read_content(options.path), plan, schedule, None)
    except ConfigError as error:
        yield from (Problem("ext.pipeline.schedule", f"{options.path}: {problem}") for problem in error.problems)


def unit_policy_problems(config: ExtConfig) -> Iterator[Problem]:
    """What goes with policies that decide unit by unit, and what with no other."""
    recompute = config.recompute
    if recompute is None:
        return
    policy = recompute.policy.type
    if recompute.overlap is not None and not issubclass(POLICIES.get(policy), UnitPolicy):
        yield Problem(
            "ext.recompute.overlap",
            f"goes with the policies 'lynx_heu' and 'lynx_opt', found '{policy}', under which the schedule says "
            "when layers are recomputed. Remove the key or change the policy.",
        )


def _lists(config: ExtConfig, launch: Launch) -> Iterator[Problem]:
    placed = config.pipeline.partition.layers if config.pipeline else None
    recompute = config.recompute
    recomputed = getattr(recompute.policy, "layers", None) if recompute else None
    budgets = recompute.memory_budget_gib if recompute and isinstance(recompute.memory_budget_gib, tuple) else None
    lists = {
        "ext.pipeline.partition": placed,
        "ext.recompute.policy": recomputed,
        "ext.recompute.memory_budget_gib": budgets,
    }
    given = {key: values for key, values in lists.items() if values is not None}
    first = next(iter(given.items()), None)
    stages = launch.pipeline_stages
    for key, values in given.items():
        if stages and len(values) != stages:
            yield Problem(key, f"{len(values)} numbers given, the pipeline has {stages} stages. Give one per stage.")
        elif not stages and first and len(values) != len(first[1]):
            yield Problem(key, f"{len(values)} numbers given, {first[0]} has {len(first[1])}. Both need one per stage.")
    layers = launch.num_layers
    if placed and layers and sum(placed) != layers:
        yield Problem(
            "ext.pipeline.partition",
            f"{' + '.join(map(str, placed))} = {sum(placed)} layers, the model has {layers}. Make the sum {layers}.",
        )
    if recomputed:
        yield from _recomputed(recomputed, placed, launch)


def _recomputed(recomputed: tuple[int, ...], placed: tuple[int, ...] | None, launch: Launch) -> Iterator[Problem]:
    """More recomputed layers than a stage can have."""
    if placed and len(placed) == len(recomputed):
        limits = placed
    elif launch.num_layers:
        limits = (launch.num_layers - len(recomputed) + 1,) * len(recomputed)
    else:
        return
    for stage, (asked, limit) in enumerate(zip(recomputed, limits, strict=True)):
        if asked > limit:
            yield Problem(
                "ext.recompute.policy",
                f"stage {stage}: {asked} recomputed layers asked, the stage has {max(limit, 0)} at most. Lower it.",
            )
    if launch.num_layers and sum(recomputed) > launch.num_layers:
        yield Problem(
            "ext.recompute.policy",
            f"{sum(recomputed)} recomputed layers asked in all, the model has {launch.num_layers}. Lower them.",
        )
