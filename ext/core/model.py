"""The pydantic base of every configuration block."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Frozen; refuses unknown keys and never converts a value to another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
