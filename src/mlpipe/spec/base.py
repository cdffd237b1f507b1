"""What all mappings of a pipeline file have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, populate_by_name=False
    )


def one_of(*keys: str) -> dict[str, Any]:
    """The JSON Schema of a rule in `spec/rules.py`: exactly one of these keys."""
    return {"oneOf": [{"required": [key]} for key in keys]}
