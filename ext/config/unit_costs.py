"""Where the costs of layers' units come from: measured in this run, or read from an earlier one's file. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ext.config.decide import decides_about_units
from ext.config.model import ExtConfig
from ext.core.errors import ConfigError
from ext.cost.profile import LayerProfile
from ext.recompute.lynx import UnitPolicyConfig
from ext.recompute.pipeline_tables import UnitCostsOfStages
from ext.recompute.profile_file import UNIT_PROFILE, UnitProfile, load_profile

KEY = "ext.recompute.policy.profile"


def profile_path(config: ExtConfig) -> Path | None:
    """The file that the policy names."""
    options = None if config.recompute is None else config.recompute.policy
    path = options.profile if isinstance(options, UnitPolicyConfig) else None
    return None if path is None else Path(path)


def measures_units(config: ExtConfig) -> bool:
    """Whether this run has to measure units."""
    return decides_about_units(config) and profile_path(config) is None


def known_units(
    config: ExtConfig,
    layers: Sequence[Sequence[LayerProfile]],
    measured: UnitCostsOfStages | None,
    about: Mapping[str, str],
) -> UnitCostsOfStages:
    """The costs of all stages. One rank calls it for all.

    What was measured is written beside the run (into the folder that EXT_RUN_DIR names), for a later run to name.

    Args:
        config: the user's.
        layers: of each stage, as profiled whole in this run.
        measured: costs of their units, where they were measured.
        about: device and versions.

    Raises:
        ConfigError: the file does not exist, is damaged, or is of another device, release, model or shape; or nothing
            can be written.
    """
    path = profile_path(config)
    if path is not None:
        try:
            return load_profile(path, about).units(layers)
        except ConfigError as error:
            raise ConfigError(*(f"{KEY}: {problem}" for problem in error.problems)) from None
    assert measured is not None, "without a file, units are measured"
    profile = UnitProfile.of(layers, measured, **about)
    path = Path(os.environ.get("EXT_RUN_DIR", ".")) / UNIT_PROFILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.save(path)
    except OSError as error:
        raise ConfigError(f"the unit profile cannot be written to {path}: {error}. Set EXT_RUN_DIR.") from error
    return profile.units(layers)
