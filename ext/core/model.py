"""The pydantic base of every configuration block."""

from __future__ import annotations

from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class StrictModel(BaseModel):
    """Frozen; refuses unknown keys and never converts a value to another type.

    Sequences are tuples, because they cannot change either; the lists of JSON are taken for them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _take_list_for_tuple(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, list) and _holds_tuple(cls.model_fields[str(info.field_name)].annotation):
            return tuple(value)
        return value


def _holds_tuple(annotation: Any) -> bool:
    return tuple in (annotation, get_origin(annotation)) or any(map(_holds_tuple, get_args(annotation)))
