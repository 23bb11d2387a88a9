"""Layer-level recompute policies: how many layers of each stage the forward drops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from ext.core.errors import ConfigError
from ext.core.model import StrictModel
from ext.core.registry import Registry


class PolicyConfig(StrictModel):
    """Options of a policy, as written under ``ext.recompute.policy``; ``type`` is its name."""

    type: str


class RecomputePolicy(ABC):
    """Chooses the recomputed layers of every stage."""

    Config: ClassVar[type[PolicyConfig]]

    def __init__(self, config: PolicyConfig | None = None) -> None:
        self.config = config if config is not None else self.Config()  # type: ignore[call-arg]

    @abstractmethod
    def recomputed_layers(self, recomputable: Sequence[int], may_recompute: Sequence[bool]) -> tuple[int, ...]:
        """Layers that each stage recomputes, counted from its first.

        Args:
            recomputable: layers of each stage that can be recomputed.
            may_recompute: by stage, False where the schedule's definition keeps everything.

        Raises:
            ConfigError: the policy asks for more than there is.
        """


POLICIES: Registry[RecomputePolicy] = Registry(
    "recompute policy",
    RecomputePolicy,
    builtins=("ext.recompute.policy", "ext.recompute.stage_aware", "ext.recompute.lynx"),
)


@POLICIES.register("none")
class NoRecompute(RecomputePolicy):
    """Keeps every activation."""

    class Config(PolicyConfig):
        type: Literal["none"] = "none"

    def recomputed_layers(self, recomputable: Sequence[int], may_recompute: Sequence[bool]) -> tuple[int, ...]:
        return (0,) * len(recomputable)


@POLICIES.register("full")
class FullRecompute(RecomputePolicy):
    """Recomputes every layer, except on stages that the schedule's definition keeps whole."""

    class Config(PolicyConfig):
        type: Literal["full"] = "full"

    def recomputed_layers(self, recomputable: Sequence[int], may_recompute: Sequence[bool]) -> tuple[int, ...]:
        return tuple(count if may else 0 for count, may in zip(recomputable, may_recompute, strict=True))


class ProfiledPolicy(FullRecompute):
    """A policy that decides once the costs of the layers are known; until then everything is recomputed."""


@POLICIES.register("per_stage")
class PerStageRecompute(RecomputePolicy):
    """Recomputes a given number of layers on each stage; wins over the schedule's definition."""

    class Config(PolicyConfig):
        type: Literal["per_stage"] = "per_stage"
        layers: tuple[int, ...] = Field(description="recomputed layers, one number per stage")

    def recomputed_layers(self, recomputable: Sequence[int], may_recompute: Sequence[bool]) -> tuple[int, ...]:
        assert isinstance(self.config, PerStageRecompute.Config)
        layers = self.config.layers
        key = "ext.recompute.policy"
        if len(layers) != len(recomputable):
            raise ConfigError(f"{key}: {len(layers)} numbers given, the pipeline has {len(recomputable)} stages.")
        problems = [
            f"{key}: stage {stage} has {most} layers that can be recomputed, {asked} asked; give 0 to {most}."
            for stage, (asked, most) in enumerate(zip(layers, recomputable, strict=True))
            if not 0 <= asked <= most
        ]
        if problems:
            raise ConfigError(*problems)
        return tuple(layers)
