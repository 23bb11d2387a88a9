"""Unit costs as JSON beside a run, so that one measurement serves many plans. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ext.core.errors import ConfigError
from ext.recompute.units import AllReduces, LayerCosts, UnitCosts

FORMAT = 1


@dataclass(frozen=True)
class UnitProfile:
    """What was measured on one device for one micro-batch.

    Attributes:
        layers: costs by kind of layer.
        slowdown: time of a recompute under a collective over its time alone.
        about: where it holds: device, versions, shapes.
    """

    layers: Mapping[str, LayerCosts]
    slowdown: float = 1.0
    about: Mapping[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes the profile; an existing file is replaced at once, never half-written."""
        content = {
            "format": FORMAT,
            "about": dict(self.about),
            "slowdown": self.slowdown,
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
        layers = {kind: _layer(costs) for kind, costs in content["layers"].items()}
        profile = UnitProfile(layers, float(content["slowdown"]), dict(content["about"]))
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


def _layer(content: Mapping[str, Any]) -> LayerCosts:
    units = tuple(UnitCosts(**{**unit, "inputs": tuple(unit["inputs"])}) for unit in content["units"])
    waits = content.get("all_reduces")
    times = float(content["forward"]), float(content["backward"])
    return LayerCosts(units, int(content["input_bytes"]), *times, None if waits is None else AllReduces(**waits))
