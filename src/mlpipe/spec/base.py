"""What all mappings of a pipeline file have in common."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict

_LOADER = "pydantic.plugin._loader"


class SpecModel(BaseModel):
    """Its validator is made when the first value is checked: once for a whole file, where every class would
    make its own and those of all that it contains."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        populate_by_name=False,
        defer_build=True,
    )

    @classmethod
    def model_rebuild(cls, **options: Any) -> bool | None:
        """Without pydantic's search of all installed packages for plugins, which imports thirty modules of
        the standard library for it: a tenth of a command. Should the search move, it takes place again."""
        if _LOADER in sys.modules:
            return super().model_rebuild(**options)
        none: Any = ModuleType(_LOADER)
        none.get_plugins = tuple
        sys.modules[_LOADER] = none
        try:
            return super().model_rebuild(**options)
        finally:  # whoever else uses pydantic in this process has its plugins
            del sys.modules[_LOADER]


def one_of(*keys: str) -> dict[str, Any]:
    """The JSON Schema of a rule in `spec/rules.py`: exactly one of these keys."""
    return {"oneOf": [{"required": [key]} for key in keys]}
