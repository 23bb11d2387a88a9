"""What `python -m ext simulate` is asked, and everything that can be wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

import ext
from ext.config.release import BUILT
from ext.core.errors import ConfigError, nearest
from ext.pipeline.costs import Costs
from ext.pipeline.layout import uniform_layers
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES, Schedule

LAYERS_PER_STAGE = 8
"""Layers of a stage where neither ``--num-layers`` nor ``--layers-per-stage`` is given."""

MAX_CELLS = 500_000
"""Stages times micro-batches, and layers, that one simulation holds."""

LARGEST = 1e100
"""Times and sizes above this, or below one part of it, would overflow."""

POLICIES = ("default", "none", "full", "stage_aware")


@dataclass(frozen=True)
class Request:
    """The command's options as given."""

    stages: int
    micro_batches: int
    schedule: str
    forward: float
    input_grad: float
    weight_grad: float
    recompute: float | None
    p2p: float
    stash: float
    recompute_policy: str
    activation_budget: float | None
    num_layers: int | None
    layers_per_stage: str | None
    search_seconds: float
    tolerance: float = 0.0

    @property
    def is_stage_aware(self) -> bool:
        """Whether the budget decides what is recomputed; a budget without a policy means that."""
        return self.recompute_policy == "stage_aware" or (
            self.recompute_policy == "default" and self.activation_budget is not None
        )

    @property
    def shape(self) -> PipelineShape:
        return PipelineShape(self.stages, self.micro_batches)


def check_request(request: Request) -> tuple[Schedule, tuple[int, ...]]:
    """The schedule asked for, made without costs, and the layers of each of its stages.

    Raises:
        ConfigError: all that is wrong with the request, one line each.
    """
    missing = [name for name in ("stages", "micro_batches", "schedule") if getattr(request, name) is None]
    if missing:
        raise ConfigError(*(f"{_option(name)}: missing; give it." for name in missing))
    problems = list(_wrong_numbers(request))
    num_stages = request.stages
    # Where a number is wrong the schedule is still made, with one that it takes, to find what else is wrong.
    shape = PipelineShape(max(1, request.stages), request.micro_batches if request.micro_batches > 0 else MAX_CELLS)
    try:
        schedule = make(request.schedule, shape)
        num_stages = request.stages if problems else len(schedule.rank_of)
    except ConfigError as error:
        schedule = None
        problems += [f"--schedule: {problem}" for problem in error.problems]
    problems += _wrong_policy(request)
    layers = _layers(request, num_stages, problems)
    if problems or schedule is None:
        raise ConfigError(*problems)
    return schedule, layers


def make(name: str, shape: PipelineShape, costs: Costs | None = None) -> Schedule:
    """The schedule of a name, with its default options.

    Raises:
        ConfigError: unknown name, one that is not built yet, or a shape that the schedule does not take.
    """
    if name not in SCHEDULES and _is_planned("pipeline.schedule", name):
        raise ConfigError(_not_built(name, tuple(SCHEDULES)))
    cls = SCHEDULES.get(name)
    try:
        return cls(shape=shape, costs=costs)
    except ValidationError as error:
        raise ConfigError(f"'{name}' needs options, which this command does not take: {error}") from error


def _wrong_numbers(request: Request) -> Iterator[str]:
    for name in ("stages", "micro_batches", "num_layers"):
        value = getattr(request, name)
        if value is not None and not 1 <= value <= MAX_CELLS:
            yield f"{_option(name)}: found {_shown(value)}; give a whole number from 1 to {MAX_CELLS}."
    for name in ("forward", "input_grad", "weight_grad", "activation_budget", "search_seconds"):
        value = getattr(request, name)
        if value is not None and not 1 / LARGEST <= value <= LARGEST:
            yield f"{_option(name)}: found {value}; give a number above 0, up to {LARGEST:g}."
    for name in ("recompute", "p2p"):
        value = getattr(request, name)
        if value is not None and not 0 <= value <= LARGEST:
            yield f"{_option(name)}: found {value}; give a number from 0 to {LARGEST:g}."
    if not 0 <= request.tolerance < 1:
        yield f"--tolerance: found {request.tolerance}; give a share from 0 up to, not including, 1."
    if not 0 <= request.stash <= 1:
        yield f"--stash: found {request.stash}; give the share that stays, from 0 to 1."
    cells = request.stages * request.micro_batches
    if max(request.stages, request.micro_batches) <= MAX_CELLS < cells and request.stages > 0:
        yield f"--stages x --micro-batches: found {cells}; a simulation holds up to {MAX_CELLS}. Give fewer of either."


def _wrong_policy(request: Request) -> Iterator[str]:
    policy = request.recompute_policy
    if policy in ("lynx_heu", "lynx_opt"):
        yield (
            f"--recompute-policy: '{policy}' decides about parts of layers, these options are about whole ones. Known: "
            f"{', '.join(POLICIES)}. Give a ds_config with '{policy}' by --config."
        )
    elif policy not in POLICIES and _is_planned("recompute.policy", policy):
        yield f"--recompute-policy: {_not_built(policy, POLICIES)}"
    elif policy not in POLICIES:
        yield f"--recompute-policy: unknown policy '{policy}'.{nearest(policy, POLICIES)} Known: {', '.join(POLICIES)}."
    elif policy == "stage_aware" and request.activation_budget is None:
        yield "--recompute-policy: 'stage_aware' needs a budget; give --activation-budget."


def _is_planned(key: str, name: str) -> bool:
    names = BUILT[key]
    return isinstance(names, dict) and name in names


def _not_built(name: str, built: tuple[str, ...]) -> str:
    return f"'{name}' is not built in this release ({ext.__version__}). Built: {', '.join(built)}."


def _layers(request: Request, num_stages: int, problems: list[str]) -> tuple[int, ...]:
    """Layers of each stage; what is wrong with them is added to the problems."""
    given, num_layers = request.layers_per_stage, request.num_layers
    if given is None:
        num_layers = LAYERS_PER_STAGE * request.stages if num_layers is None else num_layers
        try:
            return uniform_layers(num_layers, num_stages) if num_layers > 0 and 0 < num_stages <= MAX_CELLS else ()
        except ConfigError as error:
            problems += [f"--num-layers: {problem}" for problem in error.problems]
            return ()
    try:
        layers = tuple(int(word) for word in given.split(","))
    except ValueError:
        problems.append(
            f"--layers-per-stage: found '{given[:60]}'; give whole numbers with commas between, as in 2,2,3,1."
        )
        return ()
    shown = _shown(given)
    if len(layers) != num_stages:
        problems.append(f"--layers-per-stage: found {len(layers)} numbers for {num_stages} stages; give one per stage.")
    if min(layers) < 1:
        problems.append(f"--layers-per-stage: found {shown}; every stage needs at least one layer.")
    if num_layers is not None and sum(layers) != num_layers:
        problems.append(f"--layers-per-stage: {shown} sums to {_shown(sum(layers))}, --num-layers says {num_layers}.")
    if sum(layers) > MAX_CELLS:
        problems.append(f"--layers-per-stage: {shown} sums to more than {MAX_CELLS} layers. Give fewer.")
    return layers


def _shown(value: object) -> str:
    """A value as typed, cut where it would fill the screen."""
    text = str(value) if not isinstance(value, int) or abs(value) < 10**60 else "a number of more than 60 digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
