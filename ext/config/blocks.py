"""The parts of the ``"ext"`` block as strict, frozen models; nothing here needs torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from ext.config import release
from ext.config.problems import Problem, Violations, validate
from ext.core.errors import ConfigError
from ext.core.model import StrictModel
from ext.core.registry import Registry
from ext.moe.dispatcher import DISPATCHERS, DispatcherConfig
from ext.moe.router import RouterConfig
from ext.pipeline.schedule import SCHEDULES, ScheduleConfig
from ext.recompute.policy import POLICIES, PolicyConfig

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


def key(default: Any, description: str, allowed: str, **constraints: Any) -> Any:
    """A field with its help text and, for messages, what it allows."""
    return Field(default, description=description, json_schema_extra={"allowed": allowed}, **constraints)


class Block(StrictModel):
    """A part of the ``"ext"`` block; ``where`` is the dotted path of its keys."""

    where: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None or name not in cls.model_fields}

    @field_validator("*", mode="before")
    @classmethod
    def _is_built(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        path = cls.where + name
        if path in release.BUILT and not release.named(path):
            value = _plain(value)
        release.require(path, value, cls.model_fields[name].get_default(call_default_factory=False))
        return value


def _plain(value: Any) -> Any:
    """The value in ``{"type": value}``, the object form of a value that has no options."""
    if not (isinstance(value, dict) and "type" in value):
        return value
    extra = [str(name) for name in value if name != "type"]
    if extra:
        raise Violations(Problem(name, "unknown key. Allowed: type.") for name in extra)
    return value["type"]


def _options(value: Any) -> Any:
    """A name or a list per stage as the object that it stands for."""
    if isinstance(value, str):
        return {"type": value}
    if isinstance(value, (list, tuple)):
        return {"type": release.PER_STAGE, "layers": value}
    return value


def _registered(registry: Registry[Any], value: Any) -> Any:
    """The Config of the class that ``value`` names, with the options that ``value`` holds."""
    options = _options(value)
    name = options.get("type") if isinstance(options, dict) else None
    if not isinstance(name, str):
        return value
    model = registry.get(name).Config
    if ":" not in name:
        return validate(model, options)
    # An imported class has a type of its own; the path as typed is what the registry finds it by.
    own = {key: option for key, option in options.items() if key != "type"}
    has_type = not model.model_fields["type"].is_required()
    return validate(model, own if has_type else options).model_copy(update={"type": name})


def _schedule(value: Any) -> Any:
    return _registered(SCHEDULES, value)


def _dispatcher(value: Any) -> Any:
    return _registered(DISPATCHERS, value)


def _policy(value: Any) -> Any:
    config = _registered(POLICIES, value)
    _check_layers(getattr(config, "layers", None), at_least=0)
    return config


def _check_layers(layers: tuple[int, ...] | None, at_least: int) -> None:
    if layers is not None and (not layers or min(layers) < at_least):
        raise ConfigError(f"found {list(layers)!r}; allowed: one whole number per stage, each {at_least} or more.")


class Partition(StrictModel):
    """Who places layers on stages: a name, or with `per_stage` the layers of every stage."""

    type: str = key("module", "How layers are placed on stages.", "the name of a partition")
    layers: tuple[int, ...] | None = key(
        None,
        "Layers of each stage, for the type 'per_stage'.",
        "a list of whole numbers, one per stage, each 1 or more",
    )

    @model_validator(mode="after")
    def _layers_belong_to_per_stage(self) -> Partition:
        if (self.type == release.PER_STAGE) != (self.layers is not None):
            raise ConfigError(f"'layers' goes with the type '{release.PER_STAGE}' and with no other.")
        _check_layers(self.layers, at_least=1)
        return self

    @property
    def places_layers(self) -> bool:
        """Whether it decides while the module is built; otherwise the module's own ``partition_method`` does."""
        return self.type not in ("module", "auto")


class PipelineBlock(Block):
    """``ext.pipeline``; its defaults are what stock DeepSpeed does."""

    where = "pipeline."

    schedule: Annotated[SerializeAsAny[ScheduleConfig], BeforeValidator(_schedule)] = Field(
        default_factory=lambda: _schedule("1f1b"), description="Order of forwards, recomputes and backwards per rank."
    )
    partition: Annotated[Partition, BeforeValidator(_options)] = Field(
        default_factory=Partition, description="Who places layers on stages; 'module' leaves it to the user's module."
    )
    tolerance: float = key(
        0.02,
        "The schedule 'auto' keeps plain 1f1b within this share of the best time.",
        "a number from 0 up to, not including, 1",
        ge=0,
        lt=1,
    )


class RecomputeBlock(Block):
    """``ext.recompute``. Without the block a schedule's own policy holds; a block always wins."""

    where = "recompute."

    policy: Annotated[SerializeAsAny[PolicyConfig], BeforeValidator(_policy)] = Field(
        description="Which layers drop their activations and run their forward again.",
        json_schema_extra={"allowed": "the name of a policy or a list of recomputed layers, one number per stage"},
    )
    memory_budget_gib: Positive | tuple[Positive, ...] | None = key(
        None,
        "All device memory of one rank in GiB (2^30 bytes), one number or one per stage; absent: 90 % of the device.",
        "a number above 0, or a list of such numbers, one per stage",
    )
    overlap: bool | None = key(
        None, "Whether recomputation runs under communication; absent: as the policy has it.", "true or false"
    )

    @model_validator(mode="before")
    @classmethod
    def _budget_asks_for_a_policy(cls, data: Any) -> Any:
        """A budget alone means the policy that keeps it with whole layers."""
        if isinstance(data, dict) and data.get("policy") is None and data.get("memory_budget_gib") is not None:
            return {**data, "policy": "stage_aware"}
        return data

    @field_validator("memory_budget_gib")
    @classmethod
    def _one_budget_at_least(cls, value: Any) -> Any:
        if value == ():
            raise ConfigError("found an empty list; allowed: a number above 0, or one such number per stage.")
        return value


class TensorParallelBlock(Block):
    """``ext.tensor_parallel``."""

    where = "tensor_parallel."

    sub_pipeline: Annotated[int, Field(ge=1, le=2)] = key(
        1, "Parts into which a micro-batch is cut so that one part's all-reduce runs under another's work.", "1 or 2"
    )


class TopologyBlock(Block):
    """``ext.moe.topology``: what the hosts do not tell about the cluster."""

    where = "moe.topology."

    ranks_per_node: Count | None = key(None, "Ranks that share a node.", "a whole number above 0")


class MoeBlock(Block):
    """``ext.moe``."""

    where = "moe."

    dispatcher: Annotated[SerializeAsAny[DispatcherConfig], BeforeValidator(_dispatcher)] = Field(
        default_factory=lambda: _dispatcher("linear"),
        description="The all-to-all that moves tokens to their experts and back.",
    )
    router: RouterConfig = Field(
        default_factory=RouterConfig, description="How tokens choose experts; by default as the host does."
    )
    parallelism: Count | Literal["auto"] = key(
        1, "Ranks r over which the weights of one expert are spread.", "a whole number above 0, or 'auto'"
    )
    pipeline_degree: Count | Literal["auto"] = key(
        1,
        "Parts d into which tokens are cut so that all-to-all and experts overlap.",
        "a whole number above 0, or 'auto'",
    )
    topology: TopologyBlock = Field(
        default_factory=TopologyBlock, description="Facts about the cluster that the hosts do not tell."
    )


class TraceBlock(Block):
    """``ext.trace``."""

    where = "trace."

    path: Annotated[str, Field(min_length=1)] = Field(
        description="File for the Chrome/Perfetto trace.", json_schema_extra={"allowed": "the name of a file"}
    )
    steps: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] = key(
        (3, 5),
        "First and last traced step, inclusive; the first step of a run is 0.",
        "a list of two whole numbers, first and last step, neither below 0",
    )

    @field_validator("steps")
    @classmethod
    def _in_order(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value[0] > value[1]:
            raise ConfigError(f"found {list(value)}; the first step is after the last. Swap them.")
        return value
