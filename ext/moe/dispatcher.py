"""Registry of dispatchers. Free of torch: an entry holds options and imports its torch part when it builds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ext.core.errors import ConfigError
from ext.core.model import StrictModel
from ext.core.registry import Registry

if TYPE_CHECKING:
    from ext.comm.topology import RankGroup
    from ext.moe.dispatchers.base import Dispatcher


class DispatcherConfig(StrictModel):
    """Options of a dispatcher, as written under ``ext.moe.dispatcher``; ``type`` is its name."""

    type: str


class DispatcherFactory(ABC):
    """Builds one dispatcher per expert-parallel group from options."""

    Config: ClassVar[type[DispatcherConfig]]

    def __init__(self, config: DispatcherConfig | None = None) -> None:
        self.config = config if config is not None else self.Config()  # type: ignore[call-arg]

    @abstractmethod
    def build(self, group: RankGroup, num_experts: int) -> Dispatcher:
        """The dispatcher of ``num_experts`` experts spread over ``group``. No communication."""


DISPATCHERS: Registry[DispatcherFactory] = Registry("dispatcher", DispatcherFactory, builtins=("ext.moe.dispatcher",))


@DISPATCHERS.register("linear")
class Linear(DispatcherFactory):
    """One all-to-all over the whole group, as stock DeepSpeed does."""

    class Config(DispatcherConfig):
        type: Literal["linear"] = "linear"

    def build(self, group: RankGroup, num_experts: int) -> Dispatcher:
        from ext.moe.dispatchers.build import linear

        return linear(group, num_experts)


@DISPATCHERS.register("hierarchical")
class Hierarchical(DispatcherFactory):
    """Two hops, inside nodes and between them (Tutel, arXiv:2206.03382, section 4.3).

    Where the ranks do not form several whole nodes it is the linear one, and says so.
    """

    class Config(DispatcherConfig):
        type: Literal["hierarchical"] = "hierarchical"
        order: Literal["rail_first", "node_first"] = Field(
            default="rail_first",
            description="the first hop: between equal local ranks, or inside the node",
        )
        deduplicate: bool | None = Field(
            default=None,
            description="without a capacity, send one copy of a token per node; absent: if the rail is first",
        )

        @model_validator(mode="after")
        def _copies_need_the_rail_first(self) -> Hierarchical.Config:
            if self.deduplicate and self.order == "node_first":
                raise ConfigError("'deduplicate': true needs 'order': 'rail_first', found 'node_first'. Change one.")
            return self

    def build(self, group: RankGroup, num_experts: int) -> Dispatcher:
        from ext.moe.dispatchers.build import hierarchical

        assert isinstance(self.config, Hierarchical.Config)
        return hierarchical(group, num_experts, self.config.order, self.config.deduplicate)


@DISPATCHERS.register("auto")
class Auto(DispatcherFactory):
    """Linear or hierarchical by message size, as a measurement on the first call says."""

    class Config(DispatcherConfig):
        type: Literal["auto"] = "auto"
        probe_seconds: Annotated[float, Field(gt=0, le=60)] = Field(
            default=4.0, description="about how long one measurement may take"
        )
        probe_file: str | None = Field(
            default=None, description="JSON file that keeps the measurements for later runs on the same nodes"
        )

    def build(self, group: RankGroup, num_experts: int) -> Dispatcher:
        from ext.moe.dispatchers.build import auto

        assert isinstance(self.config, Auto.Config)
        return auto(group, num_experts, self.config.probe_seconds, self.config.probe_file)
