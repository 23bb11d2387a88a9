"""Unit costs as JSON beside a run, so that one measurement serves many plans. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ext.core.errors import ConfigError
from ext.cost.profile import LOSS, LayerProfile
from ext.recompute.stage_tables import kinds_of
from ext.recompute.units import AllReduces, LayerCosts, UnitCosts

FORMAT = 2
UNIT_PROFILE = "ext_unit_profile.json"
"""Where a run writes what it measured, for a later one to name as its policy's `profile`."""


@dataclass(frozen=True)
class UnitProfile:
    """What was measured on one device for one micro-batch.

    Attributes:
        layers: costs by kind of layer.
        slowdown: time of a recompute under a collective over its time alone.
        about: where it holds: device, versions.
        order: kind of each layer of the model, in model order; empty for one that is never recomputed.
    """

    layers: Mapping[str, LayerCosts]
    slowdown: float = 1.0
    about: Mapping[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, layers: Sequence[Sequence[LayerProfile]], units: Sequence[Sequence[LayerCosts | None]], **about: str
    ) -> UnitProfile:
        """The profile of a pipeline's layers; those of one class and structure become one kind, the fastest of them.

        Args:
            layers: of each stage, as profiled whole.
            units: of each stage, costs of the same layers' units.
            about: see `UnitProfile`.
        """
        flat = [costs for stage in units for costs in stage]
        names = [layer.name for stage, own in zip(layers, units, strict=True) for layer in stage[: len(own)]]
        order, kinds = [""] * len(flat), {}
        for positions, costs in kinds_of(flat):
            name = names[positions[0]]
            kind = next(k for n in count(1) if (k := name if n == 1 else f"{name}-{n}") not in kinds)
            kinds[kind] = costs
            for position in positions:
                order[position] = kind
        return cls(kinds, about=about, order=tuple(order))

    def units(self, layers: Sequence[Sequence[LayerProfile]]) -> list[tuple[LayerCosts | None, ...]]:
        """The costs of a pipeline's layers, by stage.

        Args:
            layers: of each stage, as profiled whole in this run; a loss behind them is left out.

        Raises:
            ConfigError: the profile is of other layers or shapes.
        """
        stages = [[layer for layer in stage if layer.name != LOSS] for stage in layers]
        flat = [layer for stage in stages for layer in stage]
        names = ["" if not layer.recomputable else layer.name for layer in flat]
        found = [kind.partition("-")[0] for kind in self.order]
        problems = []
        if found != names:
            problems.append(f"it is of the layers {', '.join(found)}; this run has {', '.join(names)}")
        else:
            problems += [
                f"layer {number} took {self.layers[kind].input_bytes} bytes, in this run {layer.bytes_of(layer.inputs)}"
                for number, (kind, layer) in enumerate(zip(self.order, flat, strict=True))
                if kind and self.layers[kind].input_bytes != layer.bytes_of(layer.inputs)
            ]
        if problems:
            raise ConfigError(f"the unit profile does not fit: {'; '.join(problems)}. Remove it to measure again.")
        costs = iter([self.layers.get(kind) for kind in self.order])
        return [tuple(next(costs) for _ in stage) for stage in stages]

    def save(self, path: Path) -> None:
        """Writes the profile; an existing file is replaced at once, never half-written."""
        content = {
            "format": FORMAT,
            "about": dict(self.about),
            "slowdown": self.slowdown,
            "order": self.order,
            "layers": {kind: asdict(costs) for kind, costs in self.layers.items()},
        }
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def load_profile(path: Path, about: Mapping[str, str] | None = None) -> UnitProfile:
    """The profile in a file.

    Args:
        path: of a file that `UnitProfile.save` wrote.
        about: where it is to be used; entries that both name must agree.

    Raises:
        ConfigError: no such file, not a profile, of another format, or measured somewhere else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no unit profile: {error}. Remove it, and the next run measures again.") from error
    if found != FORMAT:
        raise ConfigError(f"{path} has format {found}, this release reads {FORMAT}. Remove it to measure again.")
    try:
        layers = {kind: layer_costs(costs) for kind, costs in content["layers"].items()}
        order = tuple(map(str, content["order"]))
        profile = UnitProfile(layers, float(content["slowdown"]), dict(content["about"]), order)
        if unknown := sorted({*order} - {*layers, ""}):
            raise ValueError(f"kinds {unknown} have no costs")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: {error}. Remove it, and the next run measures again.") from error
    wrong = [
        f"{path} was measured with {key} {profile.about[key]}, this run has {wanted}. Remove it to measure again."
        for key, wanted in (about or {}).items()
        if key in profile.about and profile.about[key] != wanted
    ]
    if wrong:
        raise ConfigError(*wrong)
    return profile


def layer_costs(content: Mapping[str, Any]) -> LayerCosts:
    """The inverse of ``asdict`` for costs of a layer that were stored as JSON."""
    units = tuple(UnitCosts(**{**unit, "inputs": tuple(unit["inputs"])}) for unit in content["units"])
    waits = content.get("all_reduces")
    times = float(content["forward"]), float(content["backward"])
    return LayerCosts(units, int(content["input_bytes"]), *times, None if waits is None else AllReduces(**waits))
